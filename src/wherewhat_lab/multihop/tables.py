"""Tables of the multi-hop study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from wherewhat.errors import ConfigError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.statistics import Interval, in_words
from wherewhat.measures.swaps import SCORE_LABELS, SCORES
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.progress import Progress
from wherewhat_lab.constructions.checks import LONGEST, check_randomly
from wherewhat_lab.constructions.discrepancy import (
    HopHead,
    index_bound,
    index_discrepancy,
    retrieval_bound,
    retrieval_discrepancy,
)
from wherewhat_lab.constructions.transformers import (
    additive_function,
    distinct_tokens,
    fourier_transformer,
    index_function,
    index_transformer,
    letter_angle,
    random_function,
    retrieval_transformer,
)
from wherewhat_lab.multihop.accuracy import Accuracy
from wherewhat_lab.multihop.figures import INDEX_ANGLE, RETRIEVAL_ANGLE, frequency_ids
from wherewhat_lab.multihop.functions import ablate_heads, find_roles, other_sequences, patch_heads
from wherewhat_lab.multihop.learning import PURE, align, find_learning, find_purity, pooled
from wherewhat_lab.multihop.study import MultihopRun
from wherewhat_lab.study import filled_table
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask

if TYPE_CHECKING:
    from wherewhat.cli.tables import Table


def summary_table(runs: Sequence[MultihopRun]) -> Table:
    """Return one row per training: accuracy of the last and the best checkpoint, and order of learning."""

    def row(run: MultihopRun) -> list[str]:
        learning = find_learning(run.records())
        passed = int(learning.overall[learning.index(0.99)])
        return [
            run.setup.name,
            str(run.seed),
            f"{run.test().overall:.4f}",
            f"{run.test('best').overall:.4f}" if "best" in run.checkpoints else "none",
            f"{run.best_step:,}",
            "never" if passed < 0 else f"{passed:,}",
            " ".join("never" if step < 0 else str(step) for step in learning.at(0.9).values()),
            f"{run.size() / 1e6:.1f}",
        ]

    return filled_table(
        "trained models: accuracy and order of learning",
        ("task", "seed", "test accuracy", "of the best", "best step", "0.99 at step", "hops at 0.9", "MB"),
        map(row, runs),
        caption="Best: the first checkpoint with the largest accuracy on held-out sequences.",
    )


def purity_table(runs: Sequence[MultihopRun]) -> Table:
    """Return the layers whose heads are pure now, at the last record, and those whose heads ever were, at two γ."""
    rows = []
    for run in runs:
        purity = find_purity(run.records())
        for gamma in purity.gammas:
            pure = (heads_text(purity.pure(kind, gamma, ever=ever)) for kind in PURE for ever in (False, True))
            rows.append([run.setup.name, str(run.seed), f"{gamma:g}", *pure])
    return filled_table(
        "layers with pure heads: now (last record) and ever (any record)",
        ("task", "seed", "γ", *(f"{kind} {when}" for kind in PURE for when in ("now", "ever"))),
        rows,
        caption="One score is at least 1 - γ and the other at most γ. Scores are of all swaps at the last token of "
        "held-out sequences. Random weights have no pure heads: both scores start near 1. Figures of arXiv 2605.31558 "
        "count heads that ever were pure, so that their curves never fall.",
    )


def heads_table(run: MultihopRun) -> Table:
    """Return the scores and the frequency use of every head at the last record."""
    records = run.records()
    columns = {
        "s_pos": records["s_pos"],
        "s_sym": records["s_sym"],
        "effective swaps": records.values.get("effective_swaps"),
        "entropy": records["entropy"],
        "mean frequency ID": frequency_ids(run),
        "linear": records["mean_frequency"],
    }
    return filled_table(
        f"{run.setup.name} task, seed {run.seed}: heads at the last record",
        ("layer", "head", *columns),
        [
            [
                *map(str, at),
                *("none" if values is None else f"{float(values[-1][at]):.3g}" for values in columns.values()),
            ]
            for at in product(*map(range, records["s_pos"].shape[1:]))
        ],
        caption="Effective swaps: exponential of the entropy of the swap weights, mean over sequences. Mean frequency "
        "ID: 1 is the fastest plane; weighted by the softmax of each plane's largest logit contribution, and (linear) "
        "by the contribution itself.",
        left=(),
    )


def alignment_table(task: str, runs: Sequence[MultihopRun]) -> Table:
    """Return purity and accuracy over the seeds of one task, with intervals."""
    aligned = pooled([align(run.records()) for run in runs])
    rows: list[tuple[str, Interval | None]] = []
    for kind in PURE:
        rows.append((f"pure {kind} heads", aligned.pure_interval(kind)))
        rows.append((f"steps from accuracy 0.9 to pure {kind}", aligned.lag_interval(kind)))
    rows.append(("correlation of accuracy and number of pure heads", aligned.correlation_interval()))
    title = f"{task} task, {len(runs)} seeds: mean ± 95 % over seeds"
    return filled_table(title, ("", ""), [(name, _interval(value)) for name, value in rows])


def dynamics_table(run: MultihopRun) -> Table:
    """Return accuracy, mean scores and counts of pure heads at 16 or fewer steps, now and ever."""
    records = run.records()
    purity = find_purity(records)

    def row(index: int) -> list[str]:
        means = (records[name][index].nanmean() for name in ("s_pos", "s_sym", "entropy", "r"))
        counts = zip(SCORE_LABELS, purity.counts[0, index].tolist(), purity.ever[0, index].tolist(), strict=True)
        return [
            f"{int(records.steps[index]):,}",
            *(f"{share:.3f}" for share in records["accuracy"][index].tolist()),
            *(f"{float(mean):.2f}" for mean in means),
            *(f"{now} ({ever})" if kind in PURE else str(now) for kind, now, ever in counts),
        ]

    names = [f"{hops}-hop" for hops in records["hops"].tolist()]
    return filled_table(
        f"{run.setup.name} task, seed {run.seed}: accuracy, mean scores, and heads of each label (γ = 0.1)",
        ("step", *names, "s_pos", "s_sym", "entropy", "r", *SCORE_LABELS),
        map(row, sorted({round(x) for x in torch.linspace(0, len(records) - 1, 16).tolist()})),
        caption="In brackets: heads that were pure at that step or an earlier one. Labels are over all keys, as in the "
        "paper; sinks are among them.",
        left=(),
    )


def roles_table(run: MultihopRun, count: int) -> Table:
    """Return the role of each head on solved inputs, and the effects of its ablation and patching."""
    model, task = run.model(), run.setup.task
    sequences = task.sample(count, seed=3)
    roles = find_roles(model, task, sequences)
    lost = ablate_heads(model, sequences).mean(-1)
    patched = patch_heads(model, sequences, other_sequences(sequences))
    rows = []
    for role in roles.heads:
        at = (role.layer, role.head)
        on_next, on_self = (float(weight[at][1:].nanmean()) for weight in (roles.on_next, roles.on_self))
        follows = float(patched[at].nanmean())
        effects = (f"{on_next:.2f}", f"{on_self:.2f}", f"{float(lost[at]):+.2f}", f"{follows:.2f}")
        rows.append([*map(str, at), role.role, *effects])
    return filled_table(
        f"{run.setup.name} task, seed {run.seed}: heads on the solved inputs, {roles.solved:.0%} of {count}",
        ("layer", "head", "role", "on next hop", "on itself", "without", "patched"),
        rows,
        caption=f"Attention at the source tokens of hops: on the next hop ({roles.function}), or on the token itself "
        "(Reflexive). Without: change of accuracy with the head's output replaced by its mean. Patched: share of "
        "answers that follow an output taken from another input. Heads can be redundant.",
        left=(2,),
    )


def extra_table(columns: Mapping[str, dict[int, Accuracy]]) -> Table:
    """Return accuracy by number of extra tokens, one column per checkpoint, with 95 % intervals over sequences."""

    def cell(accuracy: Accuracy) -> str:
        low, high = accuracy.overall_interval
        return f"{accuracy.overall:.3f} ({low:.2f}-{high:.2f})"

    return filled_table(
        "accuracy on longer inputs that ask the same questions (95 % over sequences)",
        ("extra tokens", *columns),
        [
            [f"{added:,}", *(cell(accuracies[added]) for accuracies in columns.values())]
            for added in next(iter(columns.values()))
        ],
        caption="Extra tokens are added to those of the task.",
        left=(),
    )


def prediction_table(
    runs: Sequence[MultihopRun], measured: Sequence[dict[int, Accuracy]], heads: Sequence[list[HopHead]]
) -> Table:
    """Return the predicted share of one-hop inputs on which heads still work, and the measured accuracy."""
    columns, rows = ["extra tokens"], [[f"{added:,}"] for added in measured[0]]
    for run, accuracies, listed in zip(runs, measured, heads, strict=True):
        columns += [f"{run.setup.name} {run.seed}", *(f"head {head.layer}.{head.head}" for head in listed)]
        for index, (row, accuracy) in enumerate(zip(rows, accuracies.values(), strict=True)):
            shares = (accuracy.shares[0], *(head.surviving[index] for head in listed))
            row += [f"{float(share):.2f}" for share in shares]
    return filled_table(
        "one hop: measured accuracy, and the predicted share of inputs on which each hop head still works",
        columns,
        rows,
        caption="Predicted from the head's frequencies and contents on inputs 48 tokens longer than the training "
        "sequences. A redundant head may fail earlier than the model.",
        left=(),
    )


_LONGEST_FOURIER = 1024
"""Most tokens of a Fourier head, whose width they determine."""


def _fourier_table(n: int) -> Table:
    """Return r of heads with given functions of a token and a distance as logits, beside that of noise."""
    rows = []
    for name, function in (("random", random_function), ("Index", index_function), ("additive", additive_function)):
        for side in ("query", "key"):
            model = fourier_transformer(function(n, n), side=side)
            attention = model.attention(distinct_tokens(model, n))[0]
            fit, swaps = fit_layer(attention), layer_swaps(attention, [n - 1], sink_tokens=1)
            shown = (fit.r, fit.noise_floor, *(getattr(swaps, score) for score in SCORES))
            rows.append([name, side, *(f"{float(value):.3f}" for value in shown)])
    return filled_table(
        f"constructed RoPE heads with any function of token and distance, {n} different tokens",
        ("function", "of the", "r", "r of noise", *SCORES),
        rows,
        caption="r: correlation with the best sum of a distance, a query and a key term; near that of noise for "
        "functions that are not additive, 1 for additive ones. Scores are of all swaps at the last token, and without "
        "those of the first key (no sink).",
        left=(0, 1),
    )


def construction_tables(kind: str, longest: int, *, progress: Progress | None = None) -> list[Table]:
    """Return the correctness of a constructed transformer and its discrepancy by length, or r of Fourier heads."""
    if kind not in ("index", "retrieval", "fourier"):
        raise ConfigError(f"there is no construction '{kind}': known: index, retrieval, fourier")
    if longest < 4:
        raise ConfigError(f"--longest is {longest}: at least 4 tokens are needed")
    if longest > LONGEST:
        raise ConfigError(f"--longest is {longest}: inputs of at most {LONGEST} tokens can be checked")
    if kind == "fourier":
        return [_fourier_table(min(longest, _LONGEST_FOURIER))]
    task: IndexTask | RetrievalTask
    if kind == "index":
        task, theta = IndexTask(target=min(16, longest - 1)), INDEX_ANGLE
        model = index_transformer(task, theta=theta, longest=longest)
        discrepancy, bound, query = partial(index_discrepancy, theta=theta), partial(index_bound, theta=theta), 0
    else:
        task = RetrievalTask(target=min(8, longest - 1))
        omega = letter_angle(task)
        theta = min(RETRIEVAL_ANGLE, 0.9 * omega / (2 * longest))
        model = retrieval_transformer(task, theta=theta, longest=longest)
        discrepancy = partial(retrieval_discrepancy, theta=theta, omega=omega)
        bound = partial(retrieval_bound, theta=theta, omega=omega)
        query = 1  # of the largest distance: n tokens have distances up to n - 1
    checked = check_randomly(model, task, longest=longest, progress=progress)
    gaps = {n: (discrepancy(n, at="worst"), bound(n - query), discrepancy(n)) for n in (2**i for i in range(2, 11))}
    correct = filled_table(
        f"{kind}, θ = {theta:.4g}, constructed for up to {longest} tokens",
        ("inputs", "wrong", "smallest margin"),
        [(f"{checked.inputs:,}", str(checked.wrong), f"{checked.margin:.3g}")],
        left=(),
    )
    gap = filled_table(
        "discrepancy: largest minus second largest logit",
        ("tokens", "worst input", "its bound", "best input"),
        [[f"{n:,}", *(f"{value:.3g}" for value in values)] for n, values in gaps.items()],
        caption="The theorem bounds the worst input. Below 0 another key has the largest logit.",
        left=(),
    )
    return [correct, gap]


def heads_text(pure: Sequence[tuple[int, int]]) -> str:
    """Return the layers of pure heads, with consecutive ones as ranges; layer.head where layers have several heads."""
    if any(head for _, head in pure):
        return f"{len(pure)}: " + " ".join(f"{layer}.{head}" for layer, head in pure)
    ranges: list[list[int]] = []
    for layer, _ in pure:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    shown = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{len(pure)}: {shown}" if pure else "0"


def _interval(value: Interval | None) -> str:
    return "none" if value is None else in_words(value)
