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
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.frequencies.planes import mean_frequency, mean_frequency_softmax
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.logits import QueryLogits
from wherewhat.measures.swaps.scores import score_swaps
from wherewhat.runs.records import Axes, Recorder, Records, TensorTable
from wherewhat.scores import Column
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.accuracy import Accuracy, count_hits, judge, map_batches, split_rows
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
class QueriesAndKeys:
    """Queries and keys of all layers on some sequences.

    Attributes:
        rot_q: Queries after rotation, ``(layers, count, heads, n, d)``.
        rot_k: Keys after rotation, the same shape.
        bias: Bias on the logits, ``(layers, heads, n, n)``; None if there is none.
        scale: Factor on the dot products.
        rotation: Rotation of queries and keys; None if there is none.
        logits: Logits of the last token, ``(count, vocabulary)``.
    """

    rot_q: Tensor
    rot_k: Tensor
    bias: Tensor | None
    scale: float
    rotation: Rotation | None
    logits: Tensor


@torch.no_grad()
def queries_and_keys(model: LabModel, tokens: Tensor) -> QueriesAndKeys:
    """Run a model on ``tokens`` ``(count, n)``."""
    layers: list[LayerAttention] = []
    logits = model(tokens, edit_attention=layers.append)
    biases = [bias for layer in layers for bias in layer.mask.added]
    return QueriesAndKeys(
        rot_q=torch.stack([layer.rot_q for layer in layers]),
        rot_k=torch.stack([layer.rot_k for layer in layers]),
        bias=torch.stack(biases) if biases else None,
        scale=layers[0].scale,
        rotation=model.rotation,
        logits=logits,
    )


@dataclass(frozen=True)
class QueryScores:
    """Scores of heads at one query of each sequence.

    Attributes:
        s_pos: Positional score, ``(layers, count, heads)`` float64.
        s_sym: Symbolic score, the same shape.
        s_pos_no_sink: Positional score without swaps of the first key, the same shape; NaN unless requested.
        s_sym_no_sink: Symbolic score without them, the same shape.
        sink_mass: Attention weight of the first key, the same shape.
        effective: Effective number of swaps of both scores, the same shape.
        entropy: Entropy of the attention weights, the query's own key included, in nats, the same shape.
        use: Largest absolute contribution of each rotated plane to the logits of the keys before the query,
            ``(layers, count, heads, planes)``; no planes where nothing is rotated.
    """

    s_pos: Tensor
    s_sym: Tensor
    s_pos_no_sink: Tensor
    s_sym_no_sink: Tensor
    sink_mass: Tensor
    effective: Tensor
    entropy: Tensor
    use: Tensor


def score_query(
    given: QueriesAndKeys, query: int, rows: Tensor | None = None, *, tau: float = TAU, no_sink: bool = False
) -> QueryScores:
    """Return the scores at the token ``query``, from all swaps of two keys before it.

    Args:
        given: Queries and keys.
        query: Position of the query; two keys must come before it.
        rows: Index of sequences ``(rows,)``; all by default.
        tau: Temperature of the weights of swaps.
        no_sink: Also score without swaps of the first key; two others must come before the query.
    """
    q, k = given.rot_q[..., query, :], given.rot_k[..., : query + 1, :]
    if rows is not None:
        q, k = q[:, rows], k[:, rows]
    shape, scale, rotation = q.shape[:3], given.scale, given.rotation
    q, k = q.flatten(0, 2), k.flatten(0, 2)  # (pairs, d) and (pairs, query + 1, d)
    # In float64: weights enter an exponential divided by τ, and τ is small.
    logits = (k.double() @ q.double()[..., None])[..., 0] * scale
    bias: Tensor | None = None
    if given.bias is not None:
        bias = given.bias[:, None, :, query, : query + 1].expand(*shape, -1).flatten(0, 2)
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
    scores = score_swaps(swapped, taus=(tau,))
    both = [torch.full_like(weights[:, 0], torch.nan)] * 2
    if no_sink:
        without = score_swaps(swapped.without_sink(), taus=(tau,))
        both = [without.s_pos[:, 0, 0], without.s_sym[:, 0, 0]]
    # The laboratory's rotations pair neighbouring dimensions, from the first on.
    turned = 0 if rotation is None else 2 * rotation.planes
    products = q[:, None, :turned] * before[..., :turned]
    use = (products[..., 0::2] + products[..., 1::2]).abs_().amax(1) * scale
    entropy = torch.special.entr(weights).sum(-1)
    found = (scores.s_pos[:, 0, 0], scores.s_sym[:, 0, 0], *both, weights[:, 0], scores.effective[:, 0])
    return QueryScores(*(x.unflatten(0, shape) for x in (*found, entropy, use)))


@dataclass(frozen=True)
class HeadScores:
    """Scores of all heads of a model, on the CPU.

    Attributes:
        s_pos: Positional score at the last token of each sequence, ``(layers, heads, count)`` float64.
        s_sym: Symbolic score, the same shape.
        s_pos_no_sink: Positional score without swaps of the first key, the same shape.
        s_sym_no_sink: Symbolic score without them, the same shape.
        sink_excess: Attention weight of the first key minus that of uniform attention, the same shape.
        effective: Effective number of swaps of both scores, the same shape.
        entropy: Entropy of the attention weights at the last token in nats, the same shape.
        r: Correlation of the logits with a sum of a distance, a query and a key term, fitted to each sequence
            separately, the same shape; NaN where the logits are constant.
        r_pooled: √(1 - ΣSSE / ΣTSS) over the sequences, ``(layers, heads)``: sequences with more variance count more.
        use: Largest absolute logit contribution of each rotated plane at the last token, mean over sequences,
            ``(layers, heads, planes)``.
        mean_frequency: Mean frequency ID, weighted by use, ``(layers, heads)``; 1 is the fastest, NaN without planes.
        mean_frequency_softmax: Mean frequency ID, weighted by the softmax of use, the same shape.
        s_pos_path: Positional score at the source tokens of hops, mean over all of them, ``(layers, heads)``; NaN
            unless requested.
        s_sym_path: Symbolic score, the same shape.
        accuracy: Correct answers by number of hops.
    """

    s_pos: Tensor
    s_sym: Tensor
    s_pos_no_sink: Tensor
    s_sym_no_sink: Tensor
    sink_excess: Tensor
    effective: Tensor
    entropy: Tensor
    r: Tensor
    r_pooled: Tensor
    use: Tensor
    mean_frequency: Tensor
    mean_frequency_softmax: Tensor
    s_pos_path: Tensor
    s_sym_path: Tensor
    accuracy: Accuracy


@dataclass(frozen=True)
class _BatchScores:
    """Scores of a batch of sequences, ``(layers, heads, ...)``."""

    by_sequence: Tensor  # (8, layers, heads, count): four scores, sink mass, effective number of swaps, entropy, r
    errors: Tensor  # (2, layers, heads): SSE and TSS
    use: Tensor
    path: Tensor  # (3, layers, heads): sums of both scores, and number of tokens


def score_model(model: LabModel, held_out: HeldOutSequences, *, path: bool = False, tau: float = TAU) -> HeadScores:
    """Score every head of a model and count its correct answers.

    Scores are those of ``layer_swaps``, ``frequency_use`` and ``fit_layer`` at the last token of each sequence, for all
    sequences and layers together.

    Args:
        model: The model.
        held_out: The sequences.
        path: Also score the other source tokens of hops.
        tau: Temperature of the weights of swaps.
    """
    sequences, scored = held_out.sequences, held_out.scored
    device, n = model.embedding.device, sequences.tokens.shape[1]
    if n < 4:
        raise MeasureError(f"sequences of {n} tokens are too short to score heads on: at least 4 are needed")

    def run(rows: slice) -> tuple[_BatchScores | None, Tensor]:
        tokens = sequences.tokens[rows].to(device)
        if rows.start >= scored:
            return None, judge(model(tokens), sequences.answers[rows])
        given = queries_and_keys(model, tokens)
        return _score(given, sequences.path[rows], path, tau), judge(given.logits, sequences.answers[rows])

    rest = split_rows(len(sequences) - scored, n, device)
    batches = split_rows(scored, n, device) + [slice(scored + r.start, scored + r.stop) for r in rest]
    found = map_batches(run, batches, n, model)
    each = [part for part, _ in found if part is not None]
    s_pos, s_sym, *no_sink, sink, effective, entropy, r = torch.cat([part.by_sequence for part in each], -1).cpu()
    sse, tss = torch.stack([part.errors for part in each]).sum(0).cpu()
    use = torch.stack([part.use for part in each]).sum(0).cpu() / scored
    along = torch.stack([part.path for part in each]).sum(0).cpu()
    linear = by_softmax = torch.full_like(sse, torch.nan)
    if model.rotation is not None:
        linear, by_softmax = (
            mean(use.flatten(0, 1), model.rotation.inv_freq).view_as(sse)
            for mean in (mean_frequency, mean_frequency_softmax)
        )
    return HeadScores(
        s_pos=s_pos,
        s_sym=s_sym,
        s_pos_no_sink=no_sink[0],
        s_sym_no_sink=no_sink[1],
        sink_excess=sink - 1 / n,
        effective=effective,
        entropy=entropy,
        r=r,
        r_pooled=(1 - sse / tss).clamp(0, 1).sqrt(),
        use=use,
        mean_frequency=linear,
        mean_frequency_softmax=by_softmax,
        s_pos_path=along[0] / along[2],
        s_sym_path=along[1] / along[2],
        accuracy=count_hits(torch.cat([judged for _, judged in found], 1).cpu(), sequences.hops, sequences.hop_numbers),
    )


def _score(given: QueriesAndKeys, path: Tensor, along: bool, tau: float) -> _BatchScores:
    layers, count, heads, n, _ = given.rot_q.shape
    found = score_query(given, n - 1, tau=tau, no_sink=True)
    by_distance: Tensor | None = None
    if given.bias is not None:  # ALiBi, the only bias, depends on the distance alone
        by_distance = given.bias[:, None, :, -1].flip(-1).expand(-1, count, -1, -1).flatten(0, 2)
    fit = fit_axes(given.rot_q.flatten(0, 2), given.rot_k.flatten(0, 2), scale=given.scale, distance_bias=by_distance)
    r, sse, tss = (x.view(layers, count, heads) for x in (fit.r, fit.sse, fit.tss))
    sums = torch.zeros(3, layers, heads, dtype=torch.float64, device=r.device)
    if along:
        for query, rows in _sources(path):
            some = score_query(given, query, rows.to(r.device), tau=tau)
            sums += torch.stack([some.s_pos.sum(1), some.s_sym.sum(1), torch.full_like(sums[2], len(rows))])
    return _BatchScores(
        by_sequence=torch.stack(
            [
                *(found.s_pos, found.s_sym, found.s_pos_no_sink, found.s_sym_no_sink),
                *(found.sink_mass, found.effective, found.entropy, r),
            ]
        ).mT,
        errors=torch.stack([sse.sum(1), tss.sum(1)]),
        use=found.use.double().sum(1),
        path=sums,
    )


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
    "s_pos_path": _HEAD,  # positional score over the source tokens of all hops; NaN unless requested
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
    found: Mapping[str, Tensor] = {
        "accuracy": scores.accuracy.shares,
        "loss": scores.accuracy.loss,
        "s_pos": scores.s_pos.mean(-1),
        "s_sym": scores.s_sym.mean(-1),
        "s_pos_no_sink": scores.s_pos_no_sink.mean(-1),
        "s_sym_no_sink": scores.s_sym_no_sink.mean(-1),
        "sink_excess": scores.sink_excess.mean(-1),
        "s_pos_spread": scores.s_pos.std(-1, correction=0),
        "s_sym_spread": scores.s_sym.std(-1, correction=0),
        "s_pos_path": scores.s_pos_path,
        "s_sym_path": scores.s_sym_path,
        "effective_swaps": scores.effective.mean(-1),
        "entropy": scores.entropy.mean(-1),
        "mean_frequency": scores.mean_frequency,
        "mean_frequency_softmax": scores.mean_frequency_softmax,
        "r": scores.r.nanmean(-1),
        "r_pooled": scores.r_pooled,
        "use": scores.use,
    }
    return {name: value.float() for name, value in found.items()}


def multihop_recorder(
    held_out: HeldOutSequences, *, path: Path | None = None, identity: str = "", along_path: bool = False
) -> Recorder:
    """Return a recorder of head scores and accuracy.

    Args:
        held_out: Sequences to score the model on.
        path: File of the records, which is continued if it exists; None keeps them in memory only.
        identity: Text that identifies the training; records of another one are refused.
        along_path: Also score the other source tokens of hops.
    """
    digest = hashlib.blake2b(repr((identity, held_out.fingerprint, along_path)).encode(), digest_size=7)
    about = [int.from_bytes(digest.digest()), held_out.scored, held_out.sequences.tokens.shape[1]]
    hops = torch.tensor(held_out.sequences.hop_numbers)
    constants: TensorTable = {
        "hops": Column(hops, ("hop",)),
        "counts": Column((held_out.sequences.hops[:, None] == hops).sum(0), ("hop",)),
        "about": Column(torch.tensor(about), ("number",)),
    }
    return Recorder(
        lambda model: record_scores(score_model(model, held_out, path=along_path)), AXES, constants=constants, path=path
    )


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
