"""Positional and symbolic scores from all swaps of two keys, by operations that follow from shapes alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measures.swaps import TAU, scores
from wherewhat.measures.swaps.logits import QueryLogits, block_logits, on_device, to_real
from wherewhat.measures.swaps.scores import Blocks, SwapScores, cosine_parts, swap_entropy

_ENTRIES = {"cpu": 2**18, "cuda": 2**24}
"""Swaps computed at a time, to fit into a processor's cache or a GPU's memory."""

_HELD = 32
"""Bytes of intermediate results for each logit of a content at a position."""

_SIDE = {"cpu": 128, "cuda": 256}
"""Largest side, in blocks, of tiles of which half is not used; larger on a GPU, where each has a launch overhead."""

_ALIKE = 0.9
"""Queries are computed together if the fewest keys of them are at least this share of the most."""

_DENSE = 1024
"""Keys up to which all swaps are computed on a GPU: to find out which of them have a weight would take longer."""


_NEGLIGIBLE = 50.0
"""Negative logarithm of factors of α that count as 0, so that products with cosines are never subnormal, which is slow."""


def takes_all(counts: tuple[int, ...], taus: tuple[float, ...], device: torch.device) -> bool:
    """Return whether to compute all swaps of queries with some numbers of keys, without a look at their weights.

    So it is on a GPU for short texts, and at a temperature at which no difference of attention is negligible.
    """
    return (device.type == "cuda" and max(counts) <= _DENSE) or max(taus) * math.log(2 / scores.LEFT_OUT) >= 1


def dense_constants(
    counts: tuple[int, ...], taus: tuple[float, ...], block: int, device: torch.device
) -> list[Tensor]:
    """Return the tensors that :func:`score_all_swaps` keeps for queries with some numbers of keys."""
    chosen = [tuple(rows) for rows, _ in _alike([count // block for count in counts])]
    return [*(on_device(rows, device) for rows in chosen), *(_inverse(x, device) for x in _temperatures(taus))]


def dense_memory(queries: int, keys: int, device: torch.device) -> int:
    """Return an upper bound on the bytes of intermediate results of :func:`score_all_swaps`."""
    entries = 4 * _ENTRIES.get(device.type, _ENTRIES["cpu"])
    return _HELD * max(keys**2, min(entries, queries * keys**2))


@torch.no_grad()
def score_all_swaps(
    query: QueryLogits, *, taus: tuple[float, ...] = (TAU,), block: int = 1
) -> tuple[SwapScores, Tensor]:
    """Return exact scores from all swaps of two blocks of keys in O(n²), without synchronisation.

    Arguments and scores are those of :func:`~wherewhat.measures.swaps.scores.score_swaps`.

    Returns:
        Scores, and the two scores at the first temperature from the swaps that leave the keys of the sink in place,
        ``(groups, rows, 2)``.
    """
    rows, sink = query.q.shape[1], query.sink if block == 1 else 0  # longer blocks begin elsewhere without the sink
    number = len(taus) + bool(sink)
    shape = (*query.q.shape[:2], 2 * number + 1)
    columns = torch.full(shape, torch.nan, dtype=torch.float64, device=query.k.device)
    blocks = Blocks.of(query, block)
    for chosen, most in _alike([count // block for count in query.counts]):
        index = slice(None) if len(chosen) == rows else on_device(tuple(chosen), columns.device)
        columns[:, index] = _columns(blocks, index, most, taus, sink)
    s_pos, s_sym, effective = columns.split([number, number, 1], -1)
    if query.sink and not sink:
        later, _ = score_all_swaps(query.without_sink(), taus=taus[:1], block=block)
        without = torch.cat([later.s_pos, later.s_sym], -1)
    else:
        last = -1 if sink else 0
        without = torch.stack([s_pos[..., last], s_sym[..., last]], -1)
    effective = effective[..., 0]
    nothing = torch.zeros_like(effective).masked_fill(effective.isnan(), torch.nan)  # NaN with fewer than two blocks
    return SwapScores(s_pos[..., : len(taus)], s_sym[..., : len(taus)], nothing, nothing + 1, effective), without


def _alike(counts: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield indices of queries with similar numbers of blocks, of at least two, and the largest of these numbers."""
    order = sorted((index for index, count in enumerate(counts) if count > 1), key=lambda index: -counts[index])
    while order:
        most = counts[order[0]]
        chosen = [index for index in order if counts[index] >= _ALIKE * most]
        order = order[len(chosen) :]
        yield sorted(chosen), most


def _columns(blocks: Blocks, rows: slice | Tensor, most: int, taus: tuple[float, ...], sink: int) -> Tensor:
    """Return both scores by temperature, then the effective number of swaps, of some rows, ``(groups, rows, columns)``.

    Args:
        blocks: Keys of queries in blocks.
        rows: Index of the rows.
        most: Largest number of their blocks.
        taus: Temperatures; the first one again without the sink, if there is one.
        sink: Number of first blocks that are the sink.
    """
    query, groups, device, dtype = blocks.query, len(blocks.logits), blocks.logits.device, blocks.query.k.real.dtype
    logits, weights = (x[:, rows, :most].flatten(0, 1) for x in (blocks.logits, blocks.weights))  # (queries, blocks)
    seen = blocks.seen[rows, :most].repeat(groups, 1)
    # In ascending order of weights, α of a swap of i < j is a product of one factor of each. Blocks that are not seen
    # come last.
    weights, order = weights.masked_fill(~seen, torch.inf).sort()
    taken = seen[:, None].expand(-1, len(taus), -1)
    plain, repeated = _temperatures(taus)
    if sink:
        taken = torch.cat([taken, (seen & (order >= sink))[:, None]], 1)
    weights = weights[:, None]
    highest = weights.masked_fill(~taken, -torch.inf).amax(-1, keepdim=True)
    lowest = weights.masked_fill(~taken, torch.inf).amin(-1, keepdim=True)
    scale = _inverse(repeated if sink else plain, device)
    exponents = [(x * scale).clamp_(-_NEGLIGIBLE, 0) for x in (weights - highest, lowest - weights)]
    rise, fall = (x.exp().masked_fill_(~taken | (x <= -_NEGLIGIBLE), 0.0) for x in exponents)
    effective = swap_entropy(*(x[:, 0] for x in (*exponents, rise, fall))).exp()
    total = (rise[..., 1:] * fall.cumsum(-1)[..., :-1]).sum(-1)  # (queries, temperatures)
    logits = logits.gather(-1, order).masked_fill_(~seen, 0)
    logits = (logits - logits.mean(-1, keepdim=True)) / 2  # centred: the logits may be large
    logits, rise, fall = (x.to(dtype) for x in (logits, rise, fall))
    q, bias = query.q[:, rows].flatten(0, 1), None if query.bias is None else query.bias[:, rows].flatten(0, 1)
    group = torch.arange(groups, device=device).repeat_interleave(len(q) // groups)
    keys = blocks.keys(order).transpose(1, 2)  # (queries, size, blocks)
    k, turns = to_real(query.k), query.turns.conj()
    panel = 2 * math.isqrt(blocks.limit(_ENTRIES))
    step = max(1, (panel // min(panel, most)) ** 2)
    sums = []
    for start in range(0, len(order), step):
        part = slice(start, start + step)
        placed = to_real(q[part, None] * (turns if len(turns) == 1 else turns[group[part]]))
        every = torch.arange(len(placed), device=device)
        tokens = _Tokens(
            _rows(k, group[part], keys[part]),
            _rows(placed, every, keys[part]),
            None if bias is None else _rows(bias[part, :, None], every, keys[part]).mT,
            query.softcap,
        )
        sums.append(_sums(tokens, logits[part], rise[part], fall[part], panel, blocks.limit(_SIDE)))
    middle, apart = torch.cat(sums, 1) / total
    both = (x.clamp(0, 1) for x in (middle + apart, middle - apart))
    return torch.cat([*both, effective[:, None]], -1).unflatten(0, (groups, -1))


def _rows(x: Tensor, first: Tensor, keys: Tensor) -> Tensor:
    """Return entries ``keys`` ``(queries, size, blocks)`` of ``x[first]``, ``(queries, size, blocks, d)``."""
    index = keys + first[:, None, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, index.flatten()).view(*keys.shape, -1)


def _temperatures(taus: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the temperatures, and the same with the first one again, for swaps without the sink."""
    return taus, (*taus, taus[0])


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _inverse(taus: tuple[float, ...], device: torch.device) -> Tensor:
    """Return 1 / τ of each temperature, ``(taus, 1)`` float64; kept, because a copy to a GPU waits for it."""
    return torch.tensor([[1 / tau] for tau in taus], dtype=torch.float64, device=device)


@dataclass(frozen=True)
class _Tokens:
    """Keys of queries in blocks, in the order of their weights.

    Attributes:
        contents: Keys, ``(queries, size, blocks, d)``.
        placed: Queries rotated to the positions of the keys, ``(queries, size, blocks, d)``: their products with
            contents are logits.
        bias: Bias of each position, ``(queries, size, 1, blocks)``, if any.
        softcap: Soft-cap, if any.
    """

    contents: Tensor
    placed: Tensor
    bias: Tensor | None
    softcap: float | None

    def logits(self, contents: slice, positions: slice) -> Tensor:
        """Return half the logits of contents of blocks at positions of blocks, ``(queries, contents, positions)``."""
        bias = None if self.bias is None else self.bias[..., positions]
        return block_logits(self.contents[:, :, contents], self.placed[:, :, positions], bias, self.softcap).mul_(0.5)


def _sums(tokens: _Tokens, logits: Tensor, rise: Tensor, fall: Tensor, panel: int, side: int) -> Tensor:
    """Return sums of α times both :func:`cosine_parts`, ``(2, queries, temperatures)`` float64.

    Args:
        tokens: Keys.
        logits: Half the logits of blocks, ``(queries, blocks)``.
        rise: Factors of the larger weights, ``(queries, temperatures, blocks)``.
        fall: Factors of the smaller weights.
        panel: Blocks whose logits at each other's positions are held at a time.
        side: Side of the tiles along the diagonal.
    """
    sums = torch.zeros(2, *rise.shape[:2], dtype=torch.float64, device=rise.device)
    once = torch.ones(side, side, dtype=rise.dtype, device=rise.device).tril_(-1)
    panels = [slice(start, min(start + panel, logits.shape[1])) for start in range(0, logits.shape[1], panel)]

    def add(j: slice, i: slice, there: Tensor, here: Tensor) -> None:
        """Add swaps of blocks j and i, from half the logits of contents of j at positions of i, and of i at j."""
        counted = once[: len(there[0]), : len(there[0])] if i == j else None
        both = cosine_parts(logits[:, None, i] - logits[:, j, None], there - here.mT, counted)
        for total, cosines in zip(sums, both, strict=True):
            total += (rise[..., j] @ cosines).mul_(fall[..., i]).sum(-1, dtype=torch.float64)

    for j, i in itertools.combinations(reversed(panels), 2):
        add(j, i, tokens.logits(j, i), tokens.logits(i, j))
    for own in panels:
        matrix = tokens.logits(own, own)
        for j, i in _tiles(own.stop - own.start, side):
            add(*(slice(own.start + x.start, own.start + x.stop) for x in (j, i)), matrix[:, j, i], matrix[:, i, j])
    return sums


@functools.cache
def _tiles(count: int, side: int) -> list[tuple[slice, slice]]:
    """Return tiles of all pairs i < j of ``count`` blocks: halves with each other, and small parts with themselves."""
    if count <= side:
        return [(slice(0, count), slice(0, count))]
    half = (count + 1) // 2
    later = [tuple(slice(x.start + half, x.stop + half) for x in tile) for tile in _tiles(count - half, side)]
    return [(slice(half, count), slice(0, half)), *_tiles(half, side), *later]
