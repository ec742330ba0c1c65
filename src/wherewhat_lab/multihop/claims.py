"""Claims of arXiv 2605.31558 about trained small models, judged on finished runs of both tasks over seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch

from wherewhat.errors import ConfigError
from wherewhat.files import plain_json
from wherewhat.measures.statistics import Interval, interval, wilson
from wherewhat.measures.swaps import LABELS
from wherewhat.models.source import Weights
from wherewhat.progress import counted
from wherewhat.report.judgement import FORMAT, Judgement
from wherewhat.rules.claims.claim import MOST, Claim, ClaimVerdict, Stability, verdict_json, verdict_of
from wherewhat.rules.claims.registry import CLAIMS
from wherewhat.rules.claims.stability import RESAMPLES, Counts, draws, stabilities, stable
from wherewhat.rules.rule import LEAST_DOCUMENTS, Item, Number, Rule, Statement, at_least, at_most
from wherewhat.runs.directory import collect_versions
from wherewhat.scores import SHARE
from wherewhat_lab.constructions.checks import check_randomly
from wherewhat_lab.constructions.discrepancy import (
    index_bound,
    index_discrepancy,
    retrieval_bound,
    retrieval_discrepancy,
)
from wherewhat_lab.constructions.transformers import index_transformer, letter_angle, retrieval_transformer
from wherewhat_lab.multihop.figures import INDEX_ANGLE, PAPER, RETRIEVAL_ANGLE, ROLES, RunFigures
from wherewhat_lab.multihop.learning import PURE, pooled
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask

LONGER = 500
"""Extra tokens at which generalisation is judged."""

SPREAD = 0.05
"""Share of the training steps above which numbers of hops are learned one after the other."""


_CONSTRUCTED = 15
"""The claim about constructed layers, which no training changes."""

_EXACT = Stability("it rests on constructed layers, which are exact")


class TrainedRuns(dict[str, Sequence[RunFigures]]):
    """Runs with different seeds by task, ``number`` and ``letter``."""

    def find(self, task: str, weights: Weights | None = None) -> Sequence[RunFigures] | None:
        """Return the runs of a task; None if there are none. Trained models have no control models."""
        return None if weights else self.get(task)


def check_seeds(by_task: Mapping[str, Sequence[object]]) -> None:
    """Check that there are three or more runs of each task."""
    missing = [task for task in PAPER if len(by_task.get(task, ())) < LEAST_DOCUMENTS]
    if missing:
        raise ConfigError(f"claims are judged over seeds: give three or more runs of the {missing[0]} task")


def judge_runs(
    by_task: Mapping[str, Sequence[RunFigures]], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[ClaimVerdict]:
    """Judge claims 11 to 16 on trained models; the statements are those of ``wherewhat claims``.

    Each is judged again by resamples of the trainings of each task, drawn with replacement. A decided verdict that
    changes in more than a tenth of them becomes "cannot be told". Claim 15 is about constructed layers and
    not resampled.

    Args:
        by_task: Numbers of the runs of both tasks, three or more seeds each.
        seed: Seed of the resamples.
        resamples: Their number.
    """
    check_seeds(by_task)
    runs = {f"{task} {i}": (task, figures) for task, same in by_task.items() for i, figures in enumerate(same)}
    groups = [[name for name, (of, _) in runs.items() if of == task] for task in by_task]

    def judged(counts: Counts, _: int) -> list[ClaimVerdict]:
        drawn: dict[str, list[RunFigures]] = {task: [] for task in by_task}
        for name, count in counts:
            task, figures = runs[name]
            drawn[task] += [figures] * count
        return [_judge(claim, drawn) for claim in TRAINED_CLAIMS if claim.number != _CONSTRUCTED]

    verdicts = {claim.number: _judge(claim, by_task) for claim in TRAINED_CLAIMS}
    over = " and ".join(f"{counted(len(same), 'training')} of {task}" for task, same in by_task.items())
    found = stabilities(verdicts, draws(groups, 1, seed=seed, resamples=resamples), judged, over=over)
    return list((verdicts | {number: stable(verdicts[number], one) for number, one in found.items()}).values())


def _judge(claim: Claim, by_task: Mapping[str, Sequence[RunFigures]]) -> ClaimVerdict:
    assert claim.rule is not None
    judged = claim.rule.judged(TrainedRuns(by_task))
    names = tuple(figures.run.path.name for runs in by_task.values() for figures in runs)
    return ClaimVerdict(claim, *verdict_of(judged.statements), judged, names, _EXACT)


def judgement(by_task: Mapping[str, Sequence[RunFigures]], verdicts: Sequence[ClaimVerdict]) -> Judgement:
    """Return the verdicts in the form in which those on pretrained models are stored."""
    runs = [figures.run for same in by_task.values() for figures in same]
    result: dict[str, Any] = {
        "wherewhat_claims": FORMAT,
        "model": "multi-hop models",
        "weights": "trained",
        "claims": [verdict_json(verdict) for verdict in verdicts],
        "runs": [
            {"name": run.path.name, "config_hash": run.directory.config_hash, "setup": run.setup.values()}
            for run in runs
        ],
        "versions": collect_versions(),
        "command": shlex.join(["wherewhat", "multihop", "claims", *(run.path.name for run in runs)]),
    }
    return Judgement(cast("dict[str, Any]", plain_json(result)))


def _trained(number: int, *, change: str) -> Callable[[Callable[[TrainedRuns], Iterable[Item]]], Claim]:
    """Turn a function into the rule by which the claim of that number is judged on trained models."""

    def declare(judge: Callable[[TrainedRuns], Iterable[Item]]) -> Claim:
        known = next(claim for claim in CLAIMS if claim.number == number)
        return replace(known, change=change, rule=Rule(judge, tuple(PAPER)))

    return declare


@_trained(11, change="another γ, or the step at which heads first become pure")
def _purity(trained: TrainedRuns) -> Iterator[Item]:
    together, before = [], []
    for task, runs in trained.items():
        aligned = pooled([run.alignment for run in runs])
        correlation = aligned.correlation_interval()
        if correlation is not None:
            yield Number(f"{task}: correlation of accuracy and pure heads over training", correlation)
        together.append(at_least(correlation, MOST))
        for kind in PURE:
            lag = aligned.lag_interval(kind)
            if lag is not None and any(aligned.pure[kind]):
                yield Number(f"{task}: steps from accuracy 0.9 to pure {kind} heads", lag, 0.0, "at the same time")
                before.append(at_most(lag, 0.0))
    statement = f"accuracy and pure heads correlate by {together[0]} in both tasks"
    yield Statement(statement, *together, condition="only their occurring together is meant")
    statement = "heads of both kinds are pure, on average, when accuracy reaches 0.9"
    yield Statement(statement, *before, condition="only the order is meant")
    yield "A head counts from the step on from which it stays pure (γ = 0.1)."


@_trained(12, change="another γ; ablation of all heads of a kind (`wherewhat multihop roles` removes single ones)")
def _kinds(trained: TrainedRuns) -> Iterator[Item]:
    versions = {"over all keys": {task: [run.purity for run in runs] for task, runs in trained.items()}}
    apart = {task: [x for run in runs if (x := run.purity_no_sink) is not None] for task, runs in trained.items()}
    if all(len(apart[task]) == len(runs) for task, runs in trained.items()):
        versions["without the sink"] = apart
    else:
        yield "Records of earlier versions have no scores without the first key: judged over all keys alone."
    for version, by_task in versions.items():
        counts = {}
        for task, purities in by_task.items():
            for kind in (*PURE, *(["sink"] if version == "without the sink" else [])):
                counts[task, kind] = interval([float(len(purity.pure(kind, 0.1))) for purity in purities])
                heads = kind if kind == "sink" else f"pure {kind}"
                yield Number(f"{task}: {heads} heads at the end, {version}", counts[task, kind])
        yield Statement(
            f"{version}: number has at least one pure head of each kind",
            *(at_least(counts["number", kind], 1.0) for kind in PURE),
            condition=f"number is meant, {version}",
        )
        yield Statement(
            f"{version}: letter has pure symbolic heads and no pure positional one",
            at_least(counts["letter", "symbolic"], 1.0),
            at_most(counts["letter", "positional"], 0.0),
            condition=f"letter is meant, {version}",
        )


@_trained(13, change="another accuracy than 0.9, other learning rates")
def _order(trained: TrainedRuns) -> Iterator[Item]:
    spreads, orders = {}, {}
    for task, runs in trained.items():
        learned = [run.learning.passed[0].double() for run in runs]
        steps = runs[0].run.setup.training.steps
        known = [passed for passed in learned if bool((passed >= 0).all())]
        if not known:
            continue
        spreads[task] = interval([float(passed.max() - passed.min()) / steps for passed in known])
        orders[task] = wilson([float(bool((passed.diff() > 0).all())) for passed in known])
        title = f"{task}: steps between the first and the last number of hops at 0.9, share of the training"
        yield Number(title, spreads[task])
        yield Number(f"{task}: trainings that learn 1, 2, 3 and 4 hops in this order", orders[task])
    apart, ordered = at_least(spreads.get("number"), SPREAD), at_least(orders.get("number"), 0.5)
    statement = f"number learns them in order in most trainings, over {apart:.0%} of the steps"
    yield Statement(statement, apart, ordered, condition="number is meant")
    together = at_most(spreads.get("letter"), SPREAD)
    yield Statement(f"letter learns all within {SPREAD:.0%} of the steps", together, condition="letter is meant")


@_trained(14, change="another threshold of attention")
def _functions(trained: TrainedRuns) -> Iterator[Item]:
    named, symbolic, hops = [], [], {}
    for task, runs in trained.items():
        function = ROLES.index("Index" if task == "number" else "Retrieval")
        counts = []
        for run in runs:
            roles = run.flow.get("roles")
            if roles is None:
                continue
            named += (roles != ROLES.index("other")).flatten().double().tolist()
            counts.append(float((roles == function).sum()))
            pure = run.purity.final[0]
            reflexive = (roles == ROLES.index("Reflexive")) & torch.isin(pure, _codes(*PURE))
            symbolic += (pure[reflexive] == LABELS.index("symbolic")).double().tolist()
        hops[task] = interval(counts) if counts else None
    share, own = wilson(named) if named else None, wilson(symbolic) if symbolic else None
    if share is not None:
        yield Number("heads with one of the three functions", share)
    for task, value in hops.items():
        if value is not None:
            yield Number(f"{task}: heads that make the hop", value)
    if own is not None:
        yield Number("pure heads that implement Reflexive: symbolic ones", own, 0.5, "chance")
    most, most_symbolic = at_least(share, MOST), at_least(own, MOST)
    statement = f"{most:.0%} of all heads have one of the three functions"
    yield Statement(statement, most, condition="only the functions are meant")
    bounds = [at_least(value, 1.0) for value in hops.values()]
    yield Statement("both tasks have heads that make the hop", *bounds, condition="the hop is meant")
    statement = f"of the pure heads that implement Reflexive, {most_symbolic:.0%} are symbolic"
    yield Statement(statement, most_symbolic, condition="only Reflexive is meant")
    yield "Functions are found on solved inputs, see `wherewhat multihop roles`."


@_trained(15, change="nothing: the constructions are exact, and the bounds are theorems")
def _constructions(trained: TrainedRuns) -> Iterator[Item]:
    del trained  # constructed layers are not trained
    longest = 32
    index, retrieval = IndexTask(target=16), RetrievalTask(target=8)
    omega = letter_angle(retrieval)
    theta = min(RETRIEVAL_ANGLE, 0.9 * omega / (2 * longest))
    checks = {
        "Index": check_randomly(index_transformer(index, theta=INDEX_ANGLE, longest=longest), index, longest=longest),
        "Retrieval": check_randomly(
            retrieval_transformer(retrieval, theta=theta, longest=longest), retrieval, longest=longest
        ),
    }
    for name, check in checks.items():
        title = f"{name}: correct answers of the constructed layer, {check.inputs:,} inputs of up to {longest} tokens"
        yield Number(title, Interval(1 - check.wrong / check.inputs, None, None, check.inputs).within(SHARE))
    statement = "a constructed layer of one head answers all inputs"
    yield Statement(statement, not any(x.wrong for x in checks.values()), condition="the constructions are meant")
    lengths = (4, 8, 16, 32, 64, 128, 256)
    inputs: Mapping[Literal["worst", "best"], tuple[str, str]] = {
        "worst": ("smallest discrepancy", "the minimum over inputs is meant"),
        "best": ("largest discrepancy, as stated", "the maximum over inputs is meant"),
    }
    for at, (size, condition) in inputs.items():
        yield Statement(
            f"the bounds hold for the input with the {size}",
            *(index_discrepancy(n, INDEX_ANGLE, at=at) <= index_bound(n, INDEX_ANGLE) + 1e-12 for n in lengths),
            *(
                retrieval_discrepancy(n, theta, omega, at=at) <= retrieval_bound(n - 1, theta, omega) + 1e-12
                for n in lengths
                if (n - 1) * theta <= omega
            ),
            condition=condition,
        )
    yield f"Lengths of the bounds: {', '.join(map(str, lengths))} tokens."


@_trained(16, change="the learning rate, dropout and encoding of the training")
def _lengths(trained: TrainedRuns) -> Iterator[Item]:
    kept = {}
    for task, runs in trained.items():
        values = [run.extra["last"][LONGER].overall for run in runs if LONGER in run.extra["last"]]
        if values:
            kept[task] = interval(values).within(SHARE)
            title = f"{task}: accuracy with {LONGER} extra tokens"
            yield Number(title, kept[task], PAPER[task].accuracy[LONGER], "in the paper")
    for task, bound, most in (
        ("letter", at_least(kept.get("letter"), 0.5), "at least half"),
        ("number", at_most(kept.get("number"), 0.5), "less than half"),
    ):
        yield Statement(f"{task} keeps {most} with {LONGER} extra tokens", bound, condition=f"{task} is meant")


def _codes(*kinds: str) -> torch.Tensor:
    return torch.tensor([LABELS.index(kind) for kind in kinds])


TRAINED_CLAIMS = (_purity, _kinds, _order, _functions, _constructions, _lengths)
"""The claims with their rules for trained models."""
