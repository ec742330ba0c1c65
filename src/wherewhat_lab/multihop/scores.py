"""Scores of all heads on held-out sequences while a model trains, and their records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.frequencies.planes import mean_frequency, mean_frequency_softmax
from wherewhat.measures.swaps.logits import QueryLogits
from wherewhat.measures.swaps.scores import score_swaps
from wherewhat.runs.records import Axes, Recorder, Records, TensorTable
from wherewhat.scores import Column
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import Accuracy, count_hits, judge, map_batches, split_rows
from wherewhat_lab.subject import fold
from wherewhat_lab.tasks.task import Sequences


@dataclass(frozen=True, eq=False)
class HeldOutSequences:
    """Sequences that are not trained on.

    Attributes:
        sequences: All of them; accuracy is measured on these.
        scored: Number of them, from the first on, that heads are scored on.
    """

    sequences: Sequences
    scored: int

    @cached_property
    def fingerprint(self) -> int:
        """A hash of the sequences in their order."""
        digest = hashlib.blake2b(str((self.scored, tuple(self.sequences.tokens.shape))).encode(), digest_size=7)
        for tensor in (self.sequences.tokens, self.sequences.answers):
            digest.update(tensor.cpu().contiguous().numpy().data)
        return int.from_bytes(digest.digest())


def hold_out(sequences: Sequences, *, scored: int = 256, tested: int = 1024) -> HeldOutSequences:
    """Select sequences, with numbers of hops in equal shares.

    Accuracy takes most of the time on a CPU: 1,024 sequences take about as long as five training steps. On a GPU the
    cost is negligible.

    Args:
        sequences: Sequences to select from, such as a task's validation sequences; the first of each number of hops
            are taken.
        scored: Number of sequences to score heads on.
        tested: Number of sequences to measure accuracy on, the scored ones included.
    """
    classes = sequences.hop_numbers
    if not len(classes) <= scored <= tested:
        raise ConfigError(
            f"scored is {scored} and tested {tested}: score at least one sequence of each of {len(classes)} numbers of "
            "hops, and test at least those"
        )
    # Ranks within a number of hops: sorting by rank alternates between numbers of hops.
    rank = torch.empty_like(sequences.hops)
    for hops in classes:
        rows = (sequences.hops == hops).nonzero()[:, 0]
        rank[rows] = torch.arange(len(rows))
    rows = (rank * (int(sequences.hops.max()) + 1) + sequences.hops).argsort(stable=True)[:tested]
    wanted = -(-tested // len(classes))
    if len(rows) < tested or int(rank[rows].max()) >= wanted:
        fewest = min(int((sequences.hops == hops).sum()) for hops in classes)
        raise ConfigError(
            f"tested is {tested}: that takes {wanted} sequences of each number of hops, and of one there are {fewest}; "
            "ask for fewer, or give more"
        )
    return HeldOutSequences(sequences.select(rows), scored)


@dataclass(frozen=True)
class HeadScores:
    """Scores of all heads of a model by the names of :data:`AXES`, on the CPU.

    Attributes:
        by_sequence: Scores at the last token of each sequence, ``(layers, heads, count)`` float64; r is fitted to each
            sequence separately, and NaN where the logits are constant.
        overall: Scores over all sequences, ``(layers, heads)``; ``use`` is ``(layers, heads, planes)``.
        accuracy: Correct answers by number of hops.
    """

    by_sequence: Mapping[str, Tensor]
    overall: Mapping[str, Tensor]
    accuracy: Accuracy


def score_query(
    stack: LayerAttention, shape: tuple[int, int, int], query: int, rows: Tensor | None = None, *, no_sink: bool = False
) -> dict[str, Tensor]:
    """Return the scores at the token ``query`` by name, from all swaps of two keys before it.

    Args:
        stack: All layers and sequences as one layer, see :func:`~wherewhat_lab.subject.fold`.
        shape: Numbers of layers, sequences and heads.
        query: Position of the query; two keys must come before it.
        rows: Index of sequences ``(rows,)``; all by default.
        no_sink: Also score without swaps of the first key; two others must come before the query.

    Returns:
        Scores ``(layers, rows, heads)`` float64, and ``use`` ``(layers, rows, heads, planes)``, which has no planes
        where nothing is rotated.
    """

    def chosen(values: Tensor) -> Tensor:
        return values if rows is None else torch.unflatten(values, 0, shape)[:, rows].flatten(0, 2)

    scale, rotation = stack.scale, stack.rotation
    q, k = chosen(stack.rot_q[0, :, query]), chosen(stack.rot_k[0, :, : query + 1])  # (pairs, d), (pairs, query + 1, d)
    # In float64: weights enter an exponential divided by τ, and τ is small.
    logits = (k.double() @ q.double()[..., None])[..., 0] * scale
    bias: Tensor | None = None
    for added in stack.mask.added:  # ALiBi, the only bias
        bias = chosen(added[0, :, query, : query + 1])
        logits = logits + bias.double()
    weights = logits.softmax(-1)
    before = k[:, :query]
    positions = torch.arange(query, device=k.device)
    swapped = QueryLogits.of(
        q[:, None] * scale,
        before if rotation is None else rotation.unrotate(before, positions),
        rotation,
        positions,
        counts=(query,),
        logits=logits[:, None, :query],
        weights=weights[:, None, :query],
        bias=None if bias is None else bias[:, None, :query],
        sink=1,
    )
    swaps = score_swaps(swapped)
    scores = {"s_pos": swaps.s_pos[:, 0, 0], "s_sym": swaps.s_sym[:, 0, 0]}
    if no_sink:
        without = score_swaps(swapped.without_sink())
        scores |= {"s_pos_no_sink": without.s_pos[:, 0, 0], "s_sym_no_sink": without.s_sym[:, 0, 0]}
    # The laboratory's rotations pair neighbouring dimensions, from the first on.
    turned = 0 if rotation is None else 2 * rotation.planes
    products = q[:, None, :turned] * before[..., :turned]
    scores |= {
        "sink_excess": weights[:, 0] - 1 / (query + 1),
        "effective_swaps": swaps.effective[:, 0],
        "entropy": torch.special.entr(weights).sum(-1),
        "use": (products[..., 0::2] + products[..., 1::2]).abs_().amax(1) * scale,
    }
    return {name: torch.unflatten(value, 0, (shape[0], -1, shape[2])) for name, value in scores.items()}


def score_model(model: LabModel, held_out: HeldOutSequences) -> HeadScores:
    """Score every head of a model and count its correct answers.

    Scores are those of ``layer_swaps``, ``frequency_use`` and ``fit_layer`` at the last token of each sequence, for all
    sequences and layers together.
    """
    sequences, scored = held_out.sequences, held_out.scored
    device, n = model.embedding.device, sequences.tokens.shape[1]
    if n < 4:
        raise MeasureError(f"sequences of {n} tokens are too short to score heads on: at least 4 are needed")

    def run(rows: slice) -> tuple[_BatchScores | None, Tensor]:
        layers: list[LayerAttention] = []
        scoring = rows.start < scored
        logits = model(sequences.tokens[rows].to(device), edit_attention=layers.append if scoring else None)
        scores = _score(layers, sequences.path[rows]) if scoring else None
        return scores, judge(logits, sequences.answers[rows])

    rest = split_rows(len(sequences) - scored, n, device)
    batches = split_rows(scored, n, device) + [slice(scored + r.start, scored + r.stop) for r in rest]
    results = map_batches(run, batches, n, model)
    each = [scores for scores, _ in results if scores is not None]
    by_sequence = {name: torch.cat([scores[0][name] for scores in each], -1).cpu() for name in each[0][0]}
    sums = {name: torch.stack([scores[1][name] for scores in each]).sum(0).cpu() for name in each[0][1]}
    use = sums["use"] / scored
    linear = by_softmax = torch.full_like(sums["sse"], torch.nan)
    if model.rotation is not None:
        linear, by_softmax = (
            mean(use.flatten(0, 1), model.rotation.inv_freq).view_as(linear)
            for mean in (mean_frequency, mean_frequency_softmax)
        )
    overall = {
        "r_pooled": (1 - sums["sse"] / sums["tss"]).clamp(0, 1).sqrt(),
        "use": use,
        "mean_frequency": linear,
        "mean_frequency_softmax": by_softmax,
        "s_pos_path": sums["s_pos"] / sums["tokens"],
        "s_sym_path": sums["s_sym"] / sums["tokens"],
    }
    judged = torch.cat([judged for _, judged in results], 1).cpu()
    return HeadScores(by_sequence, overall, count_hits(judged, sequences.hops, sequences.hop_numbers))


_BatchScores = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Scores of a batch by sequence, ``(layers, heads, count)``, and sums over its sequences, ``(layers, heads, …)``."""


def _score(layers: list[LayerAttention], path: Tensor) -> _BatchScores:
    stack, shape = fold(layers), (len(layers), *layers[0].rot_q.shape[:2])
    scores = score_query(stack, shape, stack.n - 1, no_sink=True)
    use = scores.pop("use")
    # ALiBi, the only bias, depends on the distance alone.
    by_distance = next((added[0, :, -1].flip(-1) for added in stack.mask.added), None)
    fit = fit_axes(stack.rot_q[0], stack.rot_k[0], scale=stack.scale, distance_bias=by_distance)
    scores["r"], sse, tss = (x.view(shape) for x in (fit.r, fit.sse, fit.tss))
    sums = {"sse": sse.sum(1), "tss": tss.sum(1), "use": use.double().sum(1)}
    sums |= {name: torch.zeros_like(sums["sse"]) for name in ("s_pos", "s_sym", "tokens")}
    for query, rows in _sources(path):
        at_query = score_query(stack, shape, query, rows.to(use.device))
        for name in ("s_pos", "s_sym"):
            sums[name] += at_query[name].sum(1)
        sums["tokens"] += len(rows)
    return {name: value.mT for name, value in scores.items()}, sums


def _sources(path: Tensor) -> list[tuple[int, Tensor]]:
    """Return the source positions of hops that have two keys before them, each with the rows of its sequences."""
    sources = path.scatter(1, (path >= 0).sum(1, keepdim=True) - 1, -1)  # the answer is not the source of a hop
    positions: set[int] = set(sources[sources >= 2].tolist())
    return [(position, (sources == position).any(1).nonzero()[:, 0]) for position in sorted(positions)]


_HEAD = ("layer", "head")
AXES: Axes = {
    "accuracy": ("hop",),  # share of correct answers
    "loss": ("hop",),  # mean cross-entropy of the answers
    "s_pos": _HEAD,  # positional score at the last token, mean over sequences
    "s_sym": _HEAD,  # symbolic score
    "s_pos_no_sink": _HEAD,  # positional score without swaps of the first key
    "s_sym_no_sink": _HEAD,  # symbolic score without them
    "sink_excess": _HEAD,  # attention on the first key minus that of uniform attention, mean over sequences
    "s_pos_spread": _HEAD,  # standard deviation over sequences
    "s_sym_spread": _HEAD,
    "s_pos_path": _HEAD,  # positional score over the source tokens of all hops
    "s_sym_path": _HEAD,
    "effective_swaps": _HEAD,  # effective number of swaps, mean over sequences
    "entropy": _HEAD,  # entropy of attention at the last token in nats, mean over sequences
    "mean_frequency": _HEAD,  # mean frequency ID, weighted by use
    "mean_frequency_softmax": _HEAD,  # mean frequency ID, weighted by the softmax of use
    "r": _HEAD,  # correlation with three additive axes, mean over sequences
    "r_pooled": _HEAD,  # the same from the errors of all sequences together
    "use": (*_HEAD, "plane"),  # largest absolute logit contribution of each plane
}
"""Dimensions of each score of a record.

Constants of the records are ``hops``, the numbers of hops; ``counts``, the questions of each; and ``about``: a hash
of the recording, the number of sequences that heads are scored on, and their number of tokens. All are int64. Records
of earlier versions have neither ``effective_swaps`` nor ``mean_frequency_softmax``, nor scores without the first key.
"""


def record_scores(scores: HeadScores) -> dict[str, Tensor]:
    """Return the scores of a record, float32, in the shapes of :data:`AXES`."""
    values = {name: value.mean(-1) for name, value in scores.by_sequence.items()}
    values |= {f"{name}_spread": scores.by_sequence[name].std(-1, correction=0) for name in ("s_pos", "s_sym")}
    values |= {"r": scores.by_sequence["r"].nanmean(-1), **scores.overall}
    values |= {"accuracy": scores.accuracy.shares, "loss": scores.accuracy.loss}
    return {name: values[name].float() for name in AXES}


def multihop_recorder(held_out: HeldOutSequences, *, path: Path | None = None, identity: str = "") -> Recorder:
    """Return a recorder of head scores and accuracy.

    Args:
        held_out: Sequences to score the model on.
        path: File of the records, which is continued if it exists; None keeps them in memory only.
        identity: Text that identifies the training; records of another one are refused.
    """
    digest = hashlib.blake2b(repr((identity, held_out.fingerprint, True)).encode(), digest_size=7)
    about = [int.from_bytes(digest.digest()), held_out.scored, held_out.sequences.tokens.shape[1]]
    hops = torch.tensor(held_out.sequences.hop_numbers)
    constants: TensorTable = {
        "hops": Column(hops, ("hop",)),
        "counts": Column((held_out.sequences.hops[:, None] == hops).sum(0), ("hop",)),
        "about": Column(torch.tensor(about), ("number",)),
    }
    return Recorder(lambda model: record_scores(score_model(model, held_out)), AXES, constants=constants, path=path)


def overall_accuracy(records: Records) -> Tensor:
    """Return the share of correct answers over all numbers of hops, ``(records,)`` float64."""
    counts = records["counts"]
    return (records["accuracy"].double() * counts).sum(-1) / counts.sum()


def best_step(records: Records) -> int:
    """Return the step of the best checkpoint: the first record with the largest accuracy on held-out sequences."""
    hits = (records["accuracy"].double() * records["counts"]).round().sum(-1)  # whole numbers, so that equal is equal
    return int(records.steps[hits.argmax()])


def noise_level(records: Records) -> float:
    """Return the r of logits that are pure noise, the reference for the recorded ``r``."""
    n = int(records["about"][2])
    return float(min(1.0, (3 * n - 4) / (n * (n + 1) / 2 - 1)) ** 0.5)
