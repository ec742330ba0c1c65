"""Swap scores of a captured layer, or of query and key tensors, over chosen queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.deviations import logit_deviations
from wherewhat.measures.swaps.placement import choose_queries, query_logits
from wherewhat.measures.swaps.scores import score_swaps
from wherewhat.measures.tensors import check_finite, check_heads, over_documents
from wherewhat.options import short_repr


@dataclass(frozen=True)
class Swaps:
    """Swap scores of one layer on one text.

    Attributes:
        queries: Positions of the queries.
        s_pos: Positional score of each head at each query, ``(heads, queries)``.
        s_sym: Symbolic score, ``(heads, queries)``.
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
    taus: tuple[float, ...] = (),
    blocks: tuple[int, ...] = (),
) -> Swaps:
    """Return swap scores of every head of a captured layer whose keys each depend on one token.

    Args:
        attention: One layer of a pass over one text without cache.
        queries: Positions of the queries.
        tau: Temperature of the swap weights.
        block: Tokens per swapped block.
        skip: Number of first keys that are never swapped.
        taus: Other temperatures, for the sensitivity.
        blocks: Other block sizes, for the sensitivity.
    """
    if tau <= 0 or any(t <= 0 for t in taus):
        raise MeasureError(f"tau={min((tau, *taus))} must be positive: it divides weight differences")
    if block < 1 or any(b < 1 for b in blocks):
        raise MeasureError(f"block={min((block, *blocks))} must be 1 token or more")
    heads, count = attention.heads, len(queries)
    s_pos, s_sym = torch.empty(2, heads, count, 1 + len(taus), dtype=torch.float64)
    s_pos_logits, s_sym_logits, exclusion, bound, kept, effective = torch.empty(6, heads, count, dtype=torch.float64)
    by_block = torch.full((2, heads, count, len(blocks)), torch.nan, dtype=torch.float64)
    for columns, logits in query_logits(attention, queries, skip=skip):

        def by_head(x: Tensor, columns: list[int] = columns) -> Tensor:
            """Return ``(heads, queries, ...)`` on the CPU."""
            return x.reshape(heads, len(columns), *x.shape[2:]).cpu()

        for column, keys in zip(columns, logits.counts, strict=False):
            if keys < 2 * block:
                raise MeasureError(
                    f"block={block} is too long: the query at position {queries[column]} sees {keys} keys before it, "
                    f"two blocks need {2 * block}; use smaller blocks or later queries"
                )
        scores = score_swaps(logits, taus=(tau, *taus), block=block)
        s_pos[:, columns], s_sym[:, columns] = by_head(scores.s_pos), by_head(scores.s_sym)
        bound[:, columns], kept[:, columns] = by_head(scores.bound), by_head(scores.kept)
        effective[:, columns] = by_head(scores.effective)
        deviations = logit_deviations(logits, block=block)
        exclusion[:, columns] = by_head(deviations.exclusion)
        reach = 2 * deviations.variance.clamp_min(1e-300)
        for values, deviation in ((s_pos_logits, deviations.positional), (s_sym_logits, deviations.symbolic)):
            score = torch.where(deviations.variance > 0, 1 - deviation / reach, 1.0).clamp(0, 1)
            values[:, columns] = by_head(score)
        for index, size in enumerate(blocks):
            if max(logits.counts) < 2 * size:
                continue
            again = scores if size == block else score_swaps(logits, taus=(tau,), block=size)
            by_block[:, :, columns, index] = torch.stack([by_head(x[..., 0]) for x in (again.s_pos, again.s_sym)])
    if bool((exclusion < 1 - 1e-3).any()):
        query = queries[int(exclusion.amin(0).argmin())]
        raise MeasureError(
            f"layer {attention.layer} violates the exclusion bound at token {query} "
            f"({float(exclusion.min()):.4f} < 1), which is impossible: its logits are wrong"
        )
    return Swaps(
        queries=tuple(queries),
        s_pos=s_pos[..., 0],
        s_sym=s_sym[..., 0],
        s_pos_logits=s_pos_logits,
        s_sym_logits=s_sym_logits,
        exclusion=exclusion,
        bound=bound,
        kept=kept,
        effective=effective,
        taus=(tau, *taus),
        by_tau=torch.stack([s_pos.mean(1), s_sym.mean(1)]),
        blocks=blocks,
        by_block=by_block.nanmean(2),
    )


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
        queries: ``last``, ``all`` (with at least two keys before them), or positions.
        scale: Factor on the dot product; 1/√d by default.
        softcap: ``softcap · tanh(logit / softcap)``, if given.
        bias: Added to the logits, broadcastable to ``(heads, n, n)``; it stays with positions when keys are swapped.
        sinks: Logit of the sink column of each head, ``(heads,)``.
        window: Sliding window: only smaller distances are visible.
        positions: Position of every token, ``(n,)``; 0, 1, … by default.
        tau: Temperature of the swap weights.
        block: Tokens per swapped block.
        skip: Number of first keys that are never swapped.
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
        chosen = choose_queries(n, count=1, positions=queries)
    return layer_swaps(attention, chosen, tau=tau, block=block, skip=skip, taus=taus, blocks=blocks)
