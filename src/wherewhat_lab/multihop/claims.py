"""Claims of arXiv 2605.31558 about trained small models, judged on finished runs of both tasks over seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from wherewhat.errors import ConfigError
from wherewhat.files import plain_json
from wherewhat.measures.statistics import Interval, interval, wilson
from wherewhat.measures.swaps import LABELS
from wherewhat.report.claims.claim import (
    LEAST_DOCUMENTS,
    MOST,
    ClaimNumber,
    ClaimPart,
    ClaimVerdict,
    Judged,
    at_least,
    at_most,
    both,
    verdict_json,
    verdict_of,
)
from wherewhat.report.claims.judgement import CLAIMS, FORMAT, Judgement
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
from wherewhat_lab.multihop.learning import PURE, align, find_learning
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask

Runs = Mapping[str, Sequence[RunFigures]]
"""Runs with different seeds by task, ``number`` and ``letter``."""

LONGER = 500
"""Extra tokens at which generalisation is judged."""

SPREAD = 0.05
"""Share of the training steps above which numbers of hops are learned one after the other."""


def check_seeds(found: Mapping[str, Sequence[object]]) -> None:
    """Check that there are three or more runs of each task."""
    missing = [task for task in PAPER if len(found.get(task, ())) < LEAST_DOCUMENTS]
    if missing:
        raise ConfigError(f"claims are judged over seeds: give three or more runs of the {missing[0]} task")


def judge_runs(found: Runs) -> list[ClaimVerdict]:
    """Judge claims 11 to 16 on trained models; the statements are those of ``wherewhat claims``.

    Args:
        found: Numbers of the runs of both tasks, three or more seeds each.
    """
    check_seeds(found)
    claims = {claim.number: claim for claim in CLAIMS}
    names = tuple(one.run.path.name for runs in found.values() for one in runs)
    verdicts = []
    for number, rule in _RULES.items():
        judged = rule(found)
        verdict, condition = verdict_of(judged.parts)
        claim = replace(claims[number], change=_CHANGE[number])
        verdicts.append(ClaimVerdict(claim, verdict, condition, judged, names))
    return verdicts


def judgement(found: Runs, verdicts: Sequence[ClaimVerdict]) -> Judgement:
    """Return the verdicts in the form in which those on pretrained models are stored."""
    runs = [one.run for same in found.values() for one in same]
    result: dict[str, Any] = {
        "wherewhat_claims": FORMAT,
        "model": "multi-hop models",
        "weights": "trained",
        "claims": [verdict_json(one) for one in verdicts],
        "runs": [
            {"name": run.path.name, "config_hash": run.directory.config_hash, "setup": run.setup.values()}
            for run in runs
        ],
        "versions": collect_versions(),
        "command": shlex.join(["wherewhat", "multihop", "claims", *(run.path.name for run in runs)]),
    }
    return Judgement(cast("dict[str, Any]", plain_json(result)))


def _purity(found: Runs) -> Judged:
    aligned = {task: align([one.records for one in runs]) for task, runs in found.items()}
    numbers, together, before = [], [], []
    for task, one in aligned.items():
        correlation = one.correlation_interval()
        if correlation is not None:
            numbers.append(ClaimNumber(f"{task}: correlation of accuracy and pure heads over training", correlation))
        together.append(at_least(correlation, MOST))
        for kind in PURE:
            lag = one.lag_interval(kind)
            if lag is not None and any(one.pure[kind]):
                title = f"{task}: steps from accuracy 0.9 to pure {kind} heads"
                numbers.append(ClaimNumber(title, lag, 0.0, "at the same time"))
                before.append(at_most(lag, 0.0))
    return Judged(
        numbers,
        [
            ClaimPart(
                f"accuracy and pure heads correlate by at least {MOST} in both tasks",
                both(*together),
                "only their occurring together is meant",
            ),
            ClaimPart(
                "heads of both kinds are pure, on average, when accuracy reaches 0.9",
                both(*before),
                "only the order is meant",
            ),
        ],
        ["A head counts from the step on from which it stays pure (γ = 0.1)."],
    )


def _kinds(found: Runs) -> Judged:
    versions = {"over all keys": {task: [one.purity for one in runs] for task, runs in found.items()}}
    apart = {task: [x for one in runs if (x := one.purity_no_sink) is not None] for task, runs in found.items()}
    notes = []
    if all(len(apart[task]) == len(runs) for task, runs in found.items()):
        versions["without the sink"] = apart
    else:
        notes.append("Records of earlier versions have no scores without the first key: judged over all keys alone.")
    numbers, parts = [], []
    for version, by_task in versions.items():
        counts = {
            (task, kind): interval([float(len(purity.pure(kind, 0.1))) for purity in purities])
            for task, purities in by_task.items()
            for kind in (*PURE, *(["sink"] if version == "without the sink" else []))
        }
        numbers += [
            ClaimNumber(f"{task}: {kind if kind == 'sink' else f'pure {kind}'} heads at the end, {version}", value)
            for (task, kind), value in counts.items()
        ]
        parts += [
            ClaimPart(
                f"{version}: number has at least one pure head of each kind",
                both(*(at_least(counts["number", kind], 1.0) for kind in PURE)),
                f"number is meant, {version}",
            ),
            ClaimPart(
                f"{version}: letter has pure symbolic heads and no pure positional one",
                both(at_least(counts["letter", "symbolic"], 1.0), at_most(counts["letter", "positional"], 0.0)),
                f"letter is meant, {version}",
            ),
        ]
    return Judged(numbers, parts, notes)


def _order(found: Runs) -> Judged:
    numbers, spreads, orders = [], {}, {}
    for task, runs in found.items():
        learned = [find_learning(one.records, levels=(0.9,)).passed[0].double() for one in runs]
        steps = runs[0].run.setup.training.steps
        known = [passed for passed in learned if bool((passed >= 0).all())]
        if not known:
            continue
        spreads[task] = interval([float(passed.max() - passed.min()) / steps for passed in known])
        orders[task] = wilson([float(bool((passed.diff() > 0).all())) for passed in known])
        title = f"{task}: steps between the first and the last number of hops at 0.9, share of the training"
        numbers.append(ClaimNumber(title, spreads[task]))
        numbers.append(ClaimNumber(f"{task}: trainings that learn 1, 2, 3 and 4 hops in this order", orders[task]))
    return Judged(
        numbers,
        [
            ClaimPart(
                f"number learns them in order in most trainings, over at least {SPREAD:.0%} of the steps",
                both(at_least(spreads.get("number"), SPREAD), at_least(orders.get("number"), 0.5)),
                "number is meant",
            ),
            ClaimPart(
                f"letter learns all within {SPREAD:.0%} of the steps",
                at_most(spreads.get("letter"), SPREAD),
                "letter is meant",
            ),
        ],
    )


def _functions(found: Runs) -> Judged:
    named, hops, symbolic = [], {}, []
    for task, runs in found.items():
        function = ROLES.index("Index" if task == "number" else "Retrieval")
        counts = []
        for one in runs:
            roles = one.flow.get("roles")
            if roles is None:
                continue
            named += (roles != ROLES.index("other")).flatten().double().tolist()
            counts.append(float((roles == function).sum()))
            pure = one.purity.final[0]
            reflexive = (roles == ROLES.index("Reflexive")) & torch.isin(pure, _codes(*PURE))
            symbolic += (pure[reflexive] == LABELS.index("symbolic")).double().tolist()
        hops[task] = interval(counts) if counts else None
    share, own = wilson(named) if named else None, wilson(symbolic) if symbolic else None
    numbers = [
        *([] if share is None else [ClaimNumber("heads with one of the three functions", share)]),
        *(ClaimNumber(f"{task}: heads that make the hop", value) for task, value in hops.items() if value is not None),
        *(
            []
            if own is None
            else [ClaimNumber("pure heads that implement Reflexive: symbolic ones", own, 0.5, "chance")]
        ),
    ]
    return Judged(
        numbers,
        [
            ClaimPart(
                f"at least {MOST:.0%} of all heads have one of the three functions",
                at_least(share, MOST),
                "only the functions are meant",
            ),
            ClaimPart(
                "both tasks have heads that make the hop",
                both(*(at_least(value, 1.0) for value in hops.values())),
                "the hop is meant",
            ),
            ClaimPart(
                f"of the pure heads that implement Reflexive, at least {MOST:.0%} are symbolic",
                at_least(own, MOST),
                "only Reflexive is meant",
            ),
        ],
        ["Functions are found on solved inputs, see `wherewhat multihop roles`."],
    )


def _constructions(found: Runs) -> Judged:
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
    numbers = [
        ClaimNumber(
            f"{name}: correct answers of the constructed layer, {one.inputs:,} inputs of up to {longest} tokens",
            Interval(1 - one.wrong / one.inputs, None, None, one.inputs).within(SHARE),
        )
        for name, one in checks.items()
    ]
    lengths = (4, 8, 16, 32, 64, 128, 256)
    within = {
        at: all(index_discrepancy(n, INDEX_ANGLE, at=at) <= index_bound(n, INDEX_ANGLE) + 1e-12 for n in lengths)
        and all(
            retrieval_discrepancy(n, theta, omega, at=at) <= retrieval_bound(n - 1, theta, omega) + 1e-12
            for n in lengths
            if (n - 1) * theta <= omega
        )
        for at in ("worst", "best")
    }
    return Judged(
        numbers,
        [
            ClaimPart(
                "a constructed layer of one head answers all inputs",
                all(not one.wrong for one in checks.values()),
                "the constructions are meant",
            ),
            ClaimPart(
                "the bounds hold for the input with the smallest discrepancy",
                within["worst"],
                "the minimum over inputs is meant",
            ),
            ClaimPart(
                "the bounds hold for the input with the largest discrepancy, as stated",
                within["best"],
                "the maximum over inputs is meant",
            ),
        ],
        [f"Lengths of the bounds: {', '.join(map(str, lengths))} tokens."],
    )


def _lengths(found: Runs) -> Judged:
    kept = {}
    for task, runs in found.items():
        values = [one.extra["last"][LONGER].overall for one in runs if LONGER in one.extra["last"]]
        kept[task] = interval(values).within(SHARE) if values else None
    numbers = [
        ClaimNumber(f"{task}: accuracy with {LONGER} extra tokens", value, PAPER[task].accuracy[LONGER], "in the paper")
        for task, value in kept.items()
        if value is not None
    ]
    return Judged(
        numbers,
        [
            ClaimPart(
                f"letter keeps at least half with {LONGER} extra tokens",
                at_least(kept["letter"], 0.5),
                "letter is meant",
            ),
            ClaimPart(
                f"number keeps less than half with {LONGER} extra tokens",
                at_most(kept["number"], 0.5),
                "number is meant",
            ),
        ],
    )


def _codes(*kinds: str) -> torch.Tensor:
    return torch.tensor([LABELS.index(kind) for kind in kinds])


_RULES: Mapping[int, Callable[[Runs], Judged]] = {
    11: _purity,
    12: _kinds,
    13: _order,
    14: _functions,
    15: _constructions,
    16: _lengths,
}
_CHANGE = {
    11: "another γ, or the step at which heads first become pure",
    12: "another γ; ablation of all heads of a kind (`wherewhat multihop roles` removes single ones)",
    13: "another accuracy than 0.9, other learning rates",
    14: "another threshold of attention",
    15: "nothing: the constructions are exact, and the bounds are theorems",
    16: "the learning rate, dropout and encoding of the training",
}
