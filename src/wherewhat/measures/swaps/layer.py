"""Swap scores of a captured layer, or of query and key tensors, over chosen queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.graphs import has_graphs, launched
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.dense import (
    dense_constants,
    dense_memory,
    score_all_swaps,
    score_block_sizes,
    takes_all,
)
from wherewhat.measures.swaps.deviations import Pieces, logit_deviations
from wherewhat.measures.swaps.logits import (
    QueryLogits,
    choose_queries,
    keys_before,
    queries_at_once,
    query_logits,
)
from wherewhat.measures.swaps.scores import Pivots, SwapScores, score_swaps
from wherewhat.measures.tensors import check_finite, check_heads, over_documents
from wherewhat.numerics import constant_tensor
from wherewhat.options import short_repr

_HELD = 128
"""Bytes of intermediate results for each logit of a query, without those of swaps."""

_PIVOTS = 384
"""Bytes of intermediate results of the first swaps for each logit of a query."""

_FORMS = 80
"""Bytes of intermediate results for each pair of planes of a query."""


@dataclass(frozen=True)
class Swaps:
    """Swap scores of one layer on one text.

    Attributes:
        queries: Positions of the queries.
        s_pos: Positional score of each head at each query, ``(heads, queries)``.
        s_sym: Symbolic score, ``(heads, queries)``.
        s_pos_no_sink: Positional score from the swaps that leave the sink in place, ``(heads, queries)``: those of keys
            after the first ``sink_tokens``. NaN for queries with fewer than two blocks of them.
        s_sym_no_sink: Symbolic score from the same swaps, ``(heads, queries)``.
        s_pos_logits: Positional score from logits, ``(heads, queries)``: 1 minus the mean squared positional deviation
            relative to that of a symbolic head.
        s_sym_logits: Symbolic score from logits, ``(heads, queries)``.
        exclusion: ``(positional + symbolic deviation) / variance`` of logits, ``(heads, queries)``: at least 1.
        bound: Upper bound on the error of ``s_pos`` and ``s_sym``, ``(heads, queries)``: the total weight of the swaps
            that were not computed, at most 1e-7.
        kept: Share of the swaps that were computed, ``(heads, queries)``; large where attention is nearly uniform.
        effective: Effective number of swaps, ``(heads, queries)``: exponential of the entropy of the swap weights.
        taus: Temperatures of ``by_tau``.
        by_tau: Mean positional and symbolic score at other temperatures, ``(2, heads, taus)``.
        blocks: Block sizes of ``by_block``.
        by_block: Mean scores with other block sizes, ``(2, heads, blocks)``; NaN where no query has two such blocks.
    """

    queries: tuple[int, ...]
    s_pos: Tensor
    s_sym: Tensor
    s_pos_no_sink: Tensor
    s_sym_no_sink: Tensor
    s_pos_logits: Tensor
    s_sym_logits: Tensor
    exclusion: Tensor
    bound: Tensor
    kept: Tensor
    effective: Tensor
    taus: tuple[float, ...]
    by_tau: Tensor
    blocks: tuple[int, ...]
    by_block: Tensor

    __repr__ = short_repr

    def cpu(self) -> Swaps:
        """Return the same on the CPU."""
        tensors: dict[str, Any] = {name: x.cpu() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def intervals(self) -> tuple[Tensor, Tensor]:
        """Return 95 % Student intervals over queries of the mean positional and symbolic score, ``(heads, 2)`` each.

        They apply to this one text; NaN if it has a single query.
        """
        positional, symbolic = (over_documents(x[:, None]).clamp(0, 1) for x in (self.s_pos, self.s_sym))
        return positional, symbolic


@torch.no_grad()
def layer_swaps(
    attention: LayerAttention,
    queries: Sequence[int],
    *,
    tau: float = TAU,
    block: int = 1,
    skip: int = 0,
    sink_tokens: int = 0,
    taus: tuple[float, ...] = (),
    blocks: tuple[int, ...] = (),
    from_logits: bool = True,
) -> Swaps:
    """Return swap scores of every head of a captured layer whose keys each depend on one token.

    The layer is one of a pass over one text without cache; the options are those of :func:`swap_scores`. The scores
    stay on its device. Unless they are wanted, exclusion and scores ``from_logits`` are NaN.
    """
    if tau <= 0 or any(t <= 0 for t in taus):
        raise MeasureError(f"tau={min((tau, *taus))} must be positive: it divides weight differences")
    if block < 1 or any(b < 1 for b in blocks):
        raise MeasureError(f"block={min((block, *blocks))} must be 1 token or more")
    heads, taus = attention.heads, (tau, *taus)
    every = torch.empty(
        heads, len(queries), 2 * len(taus) + 8 + 2 * len(blocks), dtype=torch.float64, device=attention.rot_q.device
    )
    for columns, values in _scored(attention, queries, skip, sink_tokens, taus, block, blocks, from_logits):
        index = slice(None) if len(columns) == len(queries) else constant_tensor(tuple(columns), every.device)
        every[:, index] = values.reshape(heads, len(columns), -1)
    s_pos, s_sym, others, by_block = torch.split(every, [len(taus), len(taus), 8, 2 * len(blocks)], -1)
    bound, kept, effective, exclusion, s_pos_logits, s_sym_logits, *no_sink = others.unbind(-1)
    return Swaps(
        queries=tuple(queries),
        s_pos=s_pos[..., 0],
        s_sym=s_sym[..., 0],
        s_pos_no_sink=no_sink[0],
        s_sym_no_sink=no_sink[1],
        s_pos_logits=s_pos_logits,
        s_sym_logits=s_sym_logits,
        exclusion=exclusion,
        bound=bound,
        kept=kept,
        effective=effective,
        taus=taus,
        by_tau=torch.stack([s_pos.mean(1), s_sym.mean(1)]),
        blocks=blocks,
        by_block=torch.unflatten(by_block.nanmean(1), -1, (2, len(blocks))).transpose(0, 1),
    )


def check_exclusion(layer: int, smallest: float) -> None:
    """Raise an error if the smallest ``exclusion`` of a layer is below 1, beyond rounding."""
    if smallest < 1 - 1e-3:
        raise MeasureError(
            f"layer {layer} violates the exclusion bound ({smallest:.4f} < 1), which is impossible: its logits are "
            "wrong"
        )


def _scored(
    attention: LayerAttention,
    queries: Sequence[int],
    skip: int,
    sink_tokens: int,
    taus: tuple[float, ...],
    block: int,
    blocks: tuple[int, ...],
    from_logits: bool,
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield indices into ``queries``, and their columns ``(groups, rows, columns)``, see :func:`_every_column`."""
    simple = attention.mask.only_causal and attention.sinks is None and attention.softcap is None and block == 1
    device, rotation = attention.rot_q.device, attention.rotation
    simple = simple and len(queries) <= queries_at_once(attention) and max(queries) >= sink_tokens + 2
    if rotation is None or not has_graphs(device) or not simple:
        for columns, logits in query_logits(attention, queries, skip=skip, sink_tokens=sink_tokens):
            for column, keys in zip(columns, logits.counts, strict=False):
                if keys < 2 * block:
                    raise MeasureError(
                        f"block={block} is too long: the query at position {queries[column]} sees {keys} keys before "
                        f"it, two blocks need {2 * block}; use smaller blocks or later queries"
                    )
            yield columns, _every_column(logits, taus, block, blocks, from_logits)
        return
    counts = tuple(len(keys) for keys in keys_before(attention, queries, skip=skip)) * (
        attention.heads // attention.kv_heads
    )
    later = tuple(max(0, count - max(0, sink_tokens - skip)) for count in counts)
    dense = takes_all(counts, taus, device)
    # With the first temperature alone, in long texts, it is read from the GPU which swaps of blocks have a weight.
    recorded_blocks = blocks if dense and takes_all(counts, taus[:1], device) else ()

    def logits_of(rot_q: Tensor, rot_k: Tensor, positions: Tensor, inv_freq: Tensor) -> QueryLogits:
        turned = replace(rotation, inv_freq=inv_freq)
        layer = replace(attention, rot_q=rot_q, rot_k=rot_k, positions=positions, rotation=turned)
        ((_, logits),) = query_logits(layer, queries, skip=skip, sink_tokens=sink_tokens)
        return logits

    def recorded(*tensors: Tensor) -> tuple[Tensor]:
        logits = logits_of(*tensors)
        if dense:
            return (_every_column(logits, taus, 1, recorded_blocks, from_logits),)
        return (_first_columns(logits, taus, from_logits),)

    def kept() -> tuple[object, ...]:
        """Return the constants that the recorded kernels read."""
        constants = [constant_tensor(x, device) for x in (tuple(queries), counts, later)]
        if dense:
            constants += dense_constants(counts, taus, device)
        return *constants, Pieces.of(counts, max(counts), device)

    tensors = attention.rot_q, attention.rot_k, attention.positions.to(device), rotation.frequencies(device)
    number, width = attention.heads * len(queries), attention.rot_q.shape[-1]
    held = number * (_HELD * attention.m + _FORMS * (width // 2) ** 2)
    if dense:
        dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
        held += dense_memory(number, attention.m, width, len(taus) + bool(sink_tokens), device, dtype)
    else:
        held += _PIVOTS * number * attention.m
    (values,) = launched(
        recorded,
        *tensors,
        key=(
            *("swaps", tuple(queries), skip, sink_tokens, taus, recorded_blocks, from_logits),
            *(attention.scale, rotation.pairing, rotation.offset, rotation.scaling),
        ),
        held=held,
        kept=kept,
    )
    complete = dense
    if not dense:
        complete, values = bool(values[0, 0, -1]), values[..., :-1]  # waits for the GPU
    if not complete or blocks != recorded_blocks:
        logits = logits_of(*tensors)
        values = values if complete else _every_column(logits, taus, 1, (), from_logits)
        values = torch.cat([values, *_block_columns(logits, values, taus, 1, blocks)], -1)
    yield list(range(len(queries))), values


def _first_columns(logits: QueryLogits, taus: tuple[float, ...], from_logits: bool) -> Tensor:
    """Return columns without those of other block sizes, and a last one: 1 if all swaps with a weight are in them.

    Takes no synchronisation.
    """
    scores, complete = Pivots.of(logits, taus, 1).first_scores()
    columns = [_columns(scores), _deviation_columns(logits, 1, from_logits)]
    if logits.sink:
        without, also = Pivots.of(logits.without_sink(), taus[:1], 1).first_scores(effective=False)
        columns += [without.s_pos, without.s_sym]
        complete = complete & also
    else:
        columns.append(columns[0][..., : 2 * len(taus) : len(taus)])
    return torch.cat([*columns, complete.double().expand_as(columns[0][..., :1])], -1)


def _every_column(
    logits: QueryLogits, taus: tuple[float, ...], block: int, blocks: tuple[int, ...], from_logits: bool
) -> Tensor:
    """Return all results of queries, ``(groups, rows, columns)``.

    Columns are ``s_pos`` and ``s_sym`` by temperature, bound, kept, effective, exclusion, both scores from logits, both
    without the sink, and both for each other block size.
    """
    if takes_all(logits.counts, taus, logits.k.device):
        scores, without = score_all_swaps(logits, taus=taus, block=block)
        columns = _columns(scores)
    else:
        columns = _columns(score_swaps(logits, taus=taus, block=block))
        without = _no_sink_columns(logits, columns, taus, block)
    first = [columns, _deviation_columns(logits, block, from_logits), without]
    return torch.cat([*first, *_block_columns(logits, columns, taus, block, blocks)], -1)


def _block_columns(
    logits: QueryLogits, columns: Tensor, taus: tuple[float, ...], block: int, blocks: tuple[int, ...]
) -> list[Tensor]:
    """Return both scores at the first temperature with other block sizes, ``(groups, rows, sizes)`` each."""
    if not blocks:
        return []
    own = columns[..., : 2 * len(taus) : len(taus)]  # both scores of all results
    others = tuple(sorted({size for size in blocks if size != block and 2 * size <= max(logits.counts)}))
    by_size = dict.fromkeys(blocks, torch.full_like(own, torch.nan)) | {block: own}
    if others and takes_all(logits.counts, taus[:1], logits.k.device):
        by_size |= dict(zip(others, score_block_sizes(logits, taus[0], others).unbind(-1), strict=True))
    else:
        for size in others:
            scores = score_swaps(logits, taus=taus[:1], block=size, effective=False)
            by_size[size] = torch.cat([scores.s_pos, scores.s_sym], -1)
    return [torch.stack([by_size[size][..., index] for size in blocks], -1) for index in range(2)]


def _no_sink_columns(logits: QueryLogits, scores: Tensor, taus: tuple[float, ...], block: int) -> Tensor:
    """Return positional and symbolic score without the sink at the first temperature, ``(groups, rows, 2)``.

    Where no key of the sink is seen, as in a sliding window, they are those of all keys, the columns ``scores``.
    """
    if not logits.sink:
        return scores[..., : 2 * len(taus) : len(taus)]
    without = logits.without_sink()
    if max(without.counts) < 2 * block:
        return torch.full_like(scores[..., :2], torch.nan)
    without_sink = score_swaps(without, taus=taus[:1], block=block, effective=False)
    return torch.cat([without_sink.s_pos, without_sink.s_sym], -1)


def _columns(scores: SwapScores) -> Tensor:
    """Return swap scores, ``(groups, rows, 2 taus + 3)``."""
    others = torch.stack([scores.bound, scores.kept, scores.effective], -1)
    return torch.cat([scores.s_pos, scores.s_sym, others], -1)


def _deviation_columns(logits: QueryLogits, block: int, wanted: bool) -> Tensor:
    """Return exclusion, positional and symbolic score from logits, ``(groups, rows, 3)``; NaN unless wanted."""
    if not wanted:
        return logits.weights.new_full((*logits.q.shape[:2], 3), torch.nan)
    deviations = logit_deviations(logits, block=block)
    reach = 2 * deviations.variance.clamp_min(1e-300)
    scores = (
        torch.where(deviations.variance > 0, 1 - deviation / reach, 1.0).clamp(0, 1)
        for deviation in (deviations.positional, deviations.symbolic)
    )
    return torch.stack([deviations.exclusion, *scores], -1)


def swap_scores(
    q: Tensor,
    k: Tensor,
    *,
    rotation: Rotation | None = None,
    queries: Literal["last", "all"] | Sequence[int] = "last",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    positions: Tensor | None = None,
    tau: float = TAU,
    block: int = 1,
    skip: int = 0,
    sink_tokens: int = 0,
    taus: tuple[float, ...] = (),
    blocks: tuple[int, ...] = (),
) -> Swaps:
    """Return positional and symbolic scores of heads from all swaps of their keys.

    Takes tensors: soft-cap, bias, sinks and window are ignored unless they are given, and other masks always.
    :func:`wherewhat.swaps` takes a layer and uses its own.

    Args:
        q: Queries before rotation, ``(heads, n, d)``.
        k: Keys before rotation, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        rotation: Rotation of both; None for none.
        queries: ``last``, ``all`` (with at least two keys before them), or positions in any order.
        scale: Factor on the dot product; 1/√d by default.
        softcap: ``softcap · tanh(logit / softcap)``, if given.
        bias: Added to the logits, broadcastable to ``(heads, n, n)``; it stays with positions when keys are swapped.
        sinks: Logit of the sink column of each head, ``(heads,)``.
        window: Sliding window: only smaller distances are visible.
        positions: Position of every token, ``(n,)``; 0, 1, … by default.
        tau: Temperature of the swap weights.
        block: Tokens per swapped block.
        skip: Number of first keys that are never swapped.
        sink_tokens: Number of first keys that ``s_pos_no_sink`` and ``s_sym_no_sink`` do not swap; with 0 they are
            ``s_pos`` and ``s_sym``.
        taus: Other temperatures, for the sensitivity.
        blocks: Other block sizes, for the sensitivity.
    """
    check_heads(q, k)
    if q.shape[1:] != k.shape[1:]:
        raise MeasureError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in tokens and dimension")
    check_finite(q, k)
    heads, n, d = q.shape
    positions = torch.arange(n, device=q.device) if positions is None else positions
    added = () if bias is None else (bias.expand(heads, n, n)[None],)
    attention = LayerAttention(
        layer=0,
        name="tensors",
        rot_q=(q if rotation is None else rotation.rotate(q, positions))[None],
        rot_k=(k if rotation is None else rotation.rotate(k, positions))[None],
        value=k.new_zeros(1, k.shape[0], n, 0),
        output=q.new_zeros(1, n, heads, 0),
        scale=d**-0.5 if scale is None else scale,
        mask=Mask(causal=True, added=added, window=window, device=q.device),
        rotation=rotation,
        positions=positions,
        softcap=softcap,
        sinks=sinks,
    )
    if isinstance(queries, str):
        if queries not in ("last", "all"):
            raise MeasureError(f"queries={queries!r} must be 'last', 'all' or positions")
        chosen = choose_queries(n, count=1 if queries == "last" else 0)
    else:
        if not queries:
            raise MeasureError("queries is empty: give 'last', 'all' or positions")
        chosen = choose_queries(n, count=1, positions=queries)
    swaps = layer_swaps(
        attention, chosen, tau=tau, block=block, skip=skip, sink_tokens=sink_tokens, taus=taus, blocks=blocks
    ).cpu()
    check_exclusion(0, float(swaps.exclusion.amin()))
    return swaps


Swap = Callable[[int, int], LayerAttention]
"""``swap(i, j)`` returns the layer's attention with two blocks of input tokens, starting at i and j, swapped."""


def reference_scores(
    attention: LayerAttention,
    swap: Swap,
    queries: Sequence[int],
    *,
    tau: float = TAU,
    block: int = 1,
    skip: int = 0,
    sink_tokens: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the scores of heads by definition, ``(heads, queries)`` each.

    Runs the layer once per swap. Used for layers whose keys depend on several tokens, and as reference in tests of
    :func:`layer_swaps`, whose arguments it takes.

    Returns:
        Positional and symbolic score, the effective number of swaps, and both scores without the sink.
    """
    scores, weights = (_rows(f, queries) for f in (attention.attn_scores, attention.pattern))
    keys = keys_before(attention, queries, skip=skip)
    versions = [  # the blocks that are swapped, by query
        {q: _starts(x[x >= first], block) for q, x in zip(queries, keys, strict=True)} for first in (0, sink_tokens)
    ]
    listed = [keys for starts in versions for keys in starts.values()]
    pairs = sorted({(i, j) for keys in listed for a, i in enumerate(keys) for j in keys[a + 1 :]})
    exponents = torch.empty(len(pairs), *scores.shape[:2], dtype=torch.float64)
    same, reverse = torch.zeros_like(exponents), torch.zeros_like(exponents)
    for index, (i, j) in enumerate(pairs):
        after = _rows(swap(i, j).attn_scores, queries)
        v, w = (_direction(x, i, j, block) for x in (scores, after))
        same[index] = (v * w).sum(0)
        reverse[index] = (v.flip(0) * w).sum(0)
        first, second = (weights[..., start : start + block].mean(-1) for start in (i, j))
        exponents[index] = (first - second).abs() / tau
    swapped = [[[i in starts[q] and j in starts[q] for q in queries] for i, j in pairs] for starts in versions]
    alpha, no_sink = (exponents.masked_fill(~torch.tensor(taken)[:, None], -torch.inf).softmax(0) for taken in swapped)
    effective = torch.special.entr(alpha).sum(0).exp()
    s_pos, s_sym, *others = ((x * cosines).sum(0) for x in (alpha, no_sink) for cosines in (same, reverse))
    return s_pos, s_sym, effective, others[0], others[1]


def _rows(compute: Callable[[slice], Tensor], queries: Sequence[int]) -> Tensor:
    """Return the logits or attention weights of some queries, ``(heads, queries, m)`` float64."""
    return torch.cat([compute(slice(q, q + 1))[0].double().cpu() for q in queries], 1)


def _direction(scores: Tensor, i: int, j: int, block: int) -> Tensor:
    """Return the direction of the weights of two blocks, ``(2, heads, queries)``, without underflow."""
    both = torch.stack([scores[..., start : start + block].logsumexp(-1) for start in (i, j)])
    return torch.nn.functional.normalize((both - both.amax(0)).exp(), dim=0)


def _starts(keys: Tensor, block: int) -> list[int]:
    """Return the first tokens of the complete blocks among consecutive keys."""
    return [int(start) for start in keys[: len(keys) // block * block : block]]
