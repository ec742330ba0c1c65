"""Tables of the multi-hop study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from wherewhat.cli.terminal import Table
from wherewhat.errors import ConfigError

if TYPE_CHECKING:
    from wherewhat.lab.constructions.discrepancy import HopHead
    from wherewhat.lab.multihop.accuracy import Accuracy
    from wherewhat.lab.multihop.study import MultihopRun
    from wherewhat.measures.statistics import Interval
    from wherewhat.progress import Progress


def summary_table(runs: Sequence[MultihopRun]) -> Table:
    """Return one row per training: accuracy of the last and the best checkpoint, and order of learning."""
    from wherewhat.lab.multihop.purity import find_learning

    table = Table(
        title="trained models: accuracy and order of learning",
        title_justify="left",
        caption="Best: the first checkpoint with the largest accuracy on held-out sequences.",
        caption_justify="left",
    )
    for name in ("task", "seed", "test accuracy", "of the best", "best step", "0.99 at step", "hops at 0.9", "MB"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for run in runs:
        learning = find_learning(run.records())
        passed = int(learning.overall[learning.index(0.99)])
        table.add_row(
            run.setup.name,
            str(run.seed),
            f"{run.test().overall:.4f}",
            f"{run.test('best').overall:.4f}" if "best" in run.checkpoints else "none",
            f"{run.best_step:,}",
            "never" if passed < 0 else f"{passed:,}",
            " ".join("never" if step < 0 else str(step) for step in learning.at(0.9).values()),
            f"{run.size() / 1e6:.1f}",
        )
    return table


def purity_table(runs: Sequence[MultihopRun]) -> Table:
    """Return the layers whose heads are pure now, at the last record, and those whose heads ever were, at two γ."""
    from wherewhat.lab.multihop.purity import PURE, find_purity

    table = Table(
        title="layers with pure heads: now (last record) and ever (any record)",
        title_justify="left",
        caption="One score is at least 1 - γ and the other at most γ. Scores are of all swaps at the last token of "
        "held-out sequences. Random weights have no pure heads: both scores start near 1. Figures of arXiv 2605.31558 "
        "count heads that ever were pure, so that their curves never fall.",
        caption_justify="left",
    )
    for name in ("task", "seed", "γ", *(f"{kind} {when}" for kind in PURE for when in ("now", "ever"))):
        table.add_column(name, justify="left" if name == "task" else "right")
    for run in runs:
        purity = find_purity(run.records())
        for gamma in purity.gammas:
            pure = (heads_text(purity.pure(kind, gamma, ever=ever)) for kind in PURE for ever in (False, True))
            table.add_row(run.setup.name, str(run.seed), f"{gamma:g}", *pure)
    return table


def heads_table(run: MultihopRun) -> Table:
    """Return the scores and the frequency use of every head at the last record."""
    from wherewhat.lab.multihop.figures import frequency_ids

    records = run.records()
    columns = {
        "s_pos": records["s_pos"],
        "s_sym": records["s_sym"],
        "effective swaps": records.values.get("effective_swaps"),
        "entropy": records["entropy"],
        "mean frequency ID": frequency_ids(run),
        "linear": records["mean_frequency"],
    }
    table = Table(
        title=f"{run.setup.name} task, seed {run.seed}: heads at the last record",
        title_justify="left",
        caption="Effective swaps: exponential of the entropy of the swap weights, mean over sequences. Mean frequency "
        "ID: 1 is the fastest plane; weighted by the softmax of each plane's largest logit contribution, and (linear) "
        "by the contribution itself.",
        caption_justify="left",
    )
    for name in ("layer", "head", *columns):
        table.add_column(name, justify="right")
    layers, heads = records["s_pos"].shape[1:]
    for layer in range(layers):
        for head in range(heads):
            values = ("none" if one is None else f"{float(one[-1, layer, head]):.3g}" for one in columns.values())
            table.add_row(str(layer), str(head), *values)
    return table


def alignment_table(task: str, runs: Sequence[MultihopRun]) -> Table:
    """Return purity and accuracy over the seeds of one task, with intervals."""
    from wherewhat.lab.multihop.purity import align

    found = align([run.records() for run in runs])
    table = Table(title=f"{task} task, {len(runs)} seeds: mean ± 95 % over seeds", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for kind in ("positional", "symbolic"):
        table.add_row(f"pure {kind} heads", _interval(found.pure_interval(kind)))
        table.add_row(f"steps from accuracy 0.9 to pure {kind}", _interval(found.lag_interval(kind)))
    table.add_row("correlation of accuracy and number of pure heads", _interval(found.correlation_interval()))
    return table


def dynamics_table(run: MultihopRun, *, rows: int = 16) -> Table:
    """Return accuracy, mean scores and counts of pure heads by step, now and ever."""
    import torch

    from wherewhat.lab.multihop.purity import PURE, find_purity
    from wherewhat.measures.swaps import LABELS

    records = run.records()
    purity = find_purity(records)
    table = Table(
        title=f"{run.setup.name} task, seed {run.seed}: accuracy, mean scores, and heads of each label (γ = 0.1)",
        title_justify="left",
        caption="In brackets: heads that were pure at that step or an earlier one.",
        caption_justify="left",
    )
    names = [f"{hops}-hop" for hops in records["hops"].tolist()]
    for name in ("step", *names, "s_pos", "s_sym", "entropy", "r", *LABELS):
        table.add_column(name, justify="right")
    for index in sorted({round(x) for x in torch.linspace(0, len(records) - 1, rows).tolist()}):
        means = (records[name][index].nanmean() for name in ("s_pos", "s_sym", "entropy", "r"))
        table.add_row(
            f"{int(records.steps[index]):,}",
            *(f"{share:.3f}" for share in records["accuracy"][index].tolist()),
            *(f"{float(mean):.2f}" for mean in means),
            *(
                f"{now} ({ever})" if kind in PURE else str(now)
                for kind, now, ever in zip(
                    LABELS, purity.counts[0, index].tolist(), purity.ever[0, index].tolist(), strict=True
                )
            ),
        )
    return table


def roles_table(run: MultihopRun, count: int) -> Table:
    """Return the role of each head on solved inputs, and the effects of its ablation and patching."""
    from wherewhat.lab.multihop.functions import find_roles
    from wherewhat.lab.multihop.interventions import ablate_heads, other_sequences, patch_heads

    model, task = run.model(), run.setup.task
    sequences = task.sample(count, seed=3)
    found = find_roles(model, task, sequences)
    lost = ablate_heads(model, sequences).change.mean(-1)
    patched = patch_heads(model, sequences, other_sequences(sequences))
    table = Table(
        title=f"{run.setup.name} task, seed {run.seed}: heads on the solved inputs, {found.solved:.0%} of {count}",
        title_justify="left",
        caption=f"Attention at the source tokens of hops: on the next hop ({found.function}), or on the token itself "
        "(Reflexive). Without: change of accuracy with the head's output replaced by its mean. Patched: share of "
        "answers that follow an output taken from another input. Heads can be redundant.",
        caption_justify="left",
    )
    for name in ("layer", "head", "role", "on next hop", "on itself", "without", "patched"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for role in found.heads:
        at = (role.layer, role.head)
        table.add_row(
            str(role.layer),
            str(role.head),
            role.role,
            f"{float(found.on_next[at][1:].nanmean()):.2f}",
            f"{float(found.on_self[at][1:].nanmean()):.2f}",
            f"{float(lost[at]):+.2f}",
            f"{float(patched.shares[at].nanmean()):.2f}",
        )
    return table


def extra_table(found: Mapping[str, dict[int, Accuracy]]) -> Table:
    """Return accuracy by number of extra tokens, one column per checkpoint, with 95 % intervals over sequences."""
    table = Table(
        title="accuracy on longer inputs that ask the same questions (95 % over sequences)",
        title_justify="left",
        caption="Extra tokens are added to those of the task.",
        caption_justify="left",
    )
    for name in ("extra tokens", *found):
        table.add_column(name, justify="right")
    for added in next(iter(found.values())):
        cells = []
        for one in found.values():
            low, high = one[added].overall_interval
            cells.append(f"{one[added].overall:.3f} ({low:.2f}-{high:.2f})")
        table.add_row(f"{added:,}", *cells)
    return table


def prediction_table(
    runs: Sequence[MultihopRun], found: Sequence[dict[int, Accuracy]], heads: Sequence[list[HopHead]]
) -> Table:
    """Return the predicted share of one-hop inputs on which heads still work, and the measured accuracy."""
    table = Table(
        title="one hop: measured accuracy, and the predicted share of inputs on which each hop head still works",
        title_justify="left",
        caption="Predicted from the head's frequencies and contents on inputs 48 tokens longer than the training "
        "sequences. A redundant head may fail earlier than the model.",
        caption_justify="left",
    )
    table.add_column("extra tokens", justify="right")
    for run, listed in zip(runs, heads, strict=True):
        table.add_column(f"{run.setup.name} {run.seed}", justify="right")
        for head in listed:
            table.add_column(f"head {head.layer}.{head.head}", justify="right")
    for row, added in enumerate(found[0]):
        cells = []
        for one, listed in zip(found, heads, strict=True):
            cells.append(f"{float(one[added].shares[0]):.2f}")
            cells += [f"{float(head.surviving[row]):.2f}" for head in listed]
        table.add_row(f"{added:,}", *cells)
    return table


_LONGEST_FOURIER = 1024
"""Most tokens of a Fourier head, whose width they determine."""


def _fourier_table(n: int) -> Table:
    """Return r of heads with given functions of a token and a distance as logits, beside that of noise."""
    from wherewhat.lab.constructions.transformers import (
        additive_function,
        distinct_tokens,
        fourier_transformer,
        index_function,
        random_function,
    )
    from wherewhat.measures.axes.layer import fit_layer
    from wherewhat.measures.swaps.layer import layer_swaps

    table = Table(
        title=f"constructed RoPE heads with any function of token and distance, {n} different tokens",
        title_justify="left",
        caption="r: correlation with the best sum of a distance, a query and a key term; near that of noise for "
        "functions that are not additive, 1 for additive ones. Scores are of all swaps at the last token.",
        caption_justify="left",
    )
    for name in ("function", "of the", "r", "r of noise", "s_pos", "s_sym"):
        table.add_column(name, justify="left" if name in ("function", "of the") else "right")
    for name, function in (("random", random_function), ("Index", index_function), ("additive", additive_function)):
        for side in ("query", "key"):
            model = fourier_transformer(function(n, n), side=side)
            attention = model.attention(distinct_tokens(model, n))[0]
            fit, swaps = fit_layer(attention), layer_swaps(attention, [n - 1])
            shown = (float(x) for x in (fit.r, fit.noise_floor, swaps.s_pos, swaps.s_sym))
            table.add_row(name, side, *(f"{value:.3f}" for value in shown))
    return table


def construction_tables(kind: str, longest: int, *, progress: Progress | None = None) -> list[Table]:
    """Return the correctness of a constructed transformer and its discrepancy by length, or r of Fourier heads."""
    from wherewhat.lab.constructions.checks import LONGEST, check_randomly
    from wherewhat.lab.constructions.discrepancy import (
        index_bound,
        index_discrepancy,
        retrieval_bound,
        retrieval_discrepancy,
    )
    from wherewhat.lab.constructions.transformers import index_transformer, letter_angle, retrieval_transformer
    from wherewhat.lab.tasks.one_hop import IndexTask, RetrievalTask

    if kind not in ("index", "retrieval", "fourier"):
        raise ConfigError(f"there is no construction '{kind}': known: index, retrieval, fourier")
    if longest < 4:
        raise ConfigError(f"--longest is {longest}: at least 4 tokens are needed")
    if longest > LONGEST:
        raise ConfigError(f"--longest is {longest}: inputs of at most {LONGEST} tokens can be checked")
    if kind == "fourier":
        return [_fourier_table(min(longest, _LONGEST_FOURIER))]
    if kind == "index":
        theta, omega = 0.866, 0.0
        index = IndexTask(target=min(16, longest - 1))
        model = index_transformer(index, theta=theta, longest=longest)
        checked = check_randomly(model, index, longest=longest, progress=progress)
    else:
        retrieval = RetrievalTask(target=min(8, longest - 1))
        omega = letter_angle(retrieval)
        theta = min(0.0027, 0.9 * omega / (2 * longest))
        model = retrieval_transformer(retrieval, theta=theta, longest=longest)
        checked = check_randomly(model, retrieval, longest=longest, progress=progress)
    correct = Table(title=f"{kind}, θ = {theta:.4g}, constructed for up to {longest} tokens", title_justify="left")
    for name in ("inputs", "wrong", "smallest margin"):
        correct.add_column(name, justify="right")
    correct.add_row(f"{checked.inputs:,}", str(checked.wrong), f"{checked.margin:.3g}")
    gap = Table(
        title="discrepancy: largest minus second largest logit",
        title_justify="left",
        caption="The theorem bounds the worst input. Below 0 another key has the largest logit.",
        caption_justify="left",
    )
    for name in ("tokens", "worst input", "its bound", "best input"):
        gap.add_column(name, justify="right")
    for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if kind == "index":
            worst, best = (index_discrepancy(n, theta, at=at) for at in ("worst", "best"))
            bound = index_bound(n, theta)
        else:
            worst, best = (retrieval_discrepancy(n, theta, omega, at=at) for at in ("worst", "best"))
            bound = retrieval_bound(n - 1, theta, omega)
        gap.add_row(f"{n:,}", *(f"{value:.3g}" for value in (worst, bound, best)))
    return [correct, gap]


def heads_text(pure: Sequence[tuple[int, int]]) -> str:
    """Return the layers of pure heads, with consecutive ones as ranges; layer.head where layers have several heads."""
    if any(head for _, head in pure):
        return f"{len(pure)}: " + " ".join(f"{layer}.{head}" for layer, head in pure)
    layers = [layer for layer, _ in pure]
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    shown = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{len(pure)}: {shown}" if pure else "0"


def _interval(value: Interval | None) -> str:
    if value is None:
        return "none"
    if value.high is None or math.isnan(value.mean):
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} ± {value.high - value.mean:.2g}"
