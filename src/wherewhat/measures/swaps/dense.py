"""Positional and symbolic scores from all swaps of two keys, by operations that follow from shapes alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wherewhat.measures.swaps import TAU, scores
from wherewhat.measures.swaps.logits import QueryLogits, block_logits, to_real
from wherewhat.measures.swaps.scores import Blocks, SwapScores, cosine_parts, swap_entropy
from wherewhat.numerics import constant_tensor, has_triton

_PANEL = {"cpu": 512, "cuda": 8192}
"""Side of the largest matrix of logits, and of a square with the logits of several queries that are held at a time."""

_HELD = 32
"""Bytes of intermediate results for each logit of a content at a position."""

_FACTORS = 64
"""Bytes of intermediate results for each key of a query, and as many for each temperature."""

_PLACED = 64
"""Bytes of intermediate results for each entry of a key, of queries at the positions of their keys and the like."""

_SIDE = {"cpu": 128, "cuda": 256}
"""Largest side, in blocks, of tiles of which half is not used; larger on a GPU, where each has a launch overhead."""

_ALIKE = 0.9
"""Queries are computed together if the fewest keys of them are at least this share of the most."""

_DENSE = 1024
"""Keys up to which all swaps are computed on a GPU: to find out which of them have a weight would take longer."""

_NEGLIGIBLE = 50.0
"""Factors of α below ``e^-50`` count as 0: products with cosines are then never subnormal numbers, which are slow."""


def takes_all(counts: tuple[int, ...], taus: tuple[float, ...], device: torch.device) -> bool:
    """Return whether to compute all swaps of queries with some numbers of keys, without a look at their weights.

    So it is on a GPU for short texts, and at a temperature at which no difference of attention is negligible.
    """
    return (device.type == "cuda" and max(counts) <= _DENSE) or max(taus) * math.log(2 / scores.LEFT_OUT) >= 1


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are kernels for all swaps of keys of a dtype, without soft-cap and bias."""
    return dtype == torch.float32 and has_triton(device)


def dense_constants(counts: tuple[int, ...], taus: tuple[float, ...], device: torch.device) -> list[Tensor]:
    """Return the tensors that are kept for single keys and blocks of queries with some numbers of keys."""
    temperatures = (*_temperatures(taus), *_temperatures(taus[:1]))
    rows = [constant_tensor(tuple(chosen), device) for chosen, _ in _alike(list(counts))]
    return [*rows, constant_tensor(counts, device), *(_inverse(x, device) for x in temperatures)]


def dense_memory(queries: int, keys: int, width: int, columns: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return an upper bound on the bytes of intermediate results of :func:`score_all_swaps`.

    Args:
        queries: Number of queries.
        keys: Number of their keys.
        width: Dimension of keys.
        columns: Number of temperatures, with that of swaps without the sink.
        device: Device of the keys.
        dtype: Their dtype.
    """
    factors = _FACTORS * queries * keys * (1 + columns)
    if has_kernels(device, dtype):
        return factors
    panel = _PANEL.get(device.type, _PANEL["cpu"])
    side = min(panel, keys)
    together = min(queries, (panel // side) ** 2)
    return factors + together * (_HELD * side**2 + _PLACED * keys * width)


@torch.no_grad()
def score_all_swaps(
    query: QueryLogits, *, taus: tuple[float, ...] = (TAU,), block: int = 1
) -> tuple[SwapScores, Tensor]:
    """Return exact scores from all swaps of two blocks of keys in O(n²), without synchronisation.

    Arguments and scores are those of :func:`~wherewhat.measures.swaps.scores.score_swaps`. Kernels leave out swaps that
    weigh less together than the rounding of a score in float32.

    Returns:
        Scores, and the two scores at the first temperature from the swaps that leave the keys of the sink in place,
        ``(groups, rows, 2)``.
    """
    rows, sink = query.q.shape[1], query.sink if block == 1 else 0  # longer blocks begin elsewhere without the sink
    number = len(taus) + bool(sink)
    blocks = Blocks.of(query, block)
    if _is_plain(query):
        columns = _kernel_columns(blocks, taus, sink)
    else:
        columns = _nothing(query, 2 * number + 1)
        for chosen, most in _alike([count // block for count in query.counts]):
            index = slice(None) if len(chosen) == rows else constant_tensor(tuple(chosen), columns.device)
            columns[:, index] = _columns(blocks, index, most, taus, sink)
    s_pos, s_sym, effective = torch.split(columns, [number, number, 1], -1)
    if query.sink and not sink:
        later, _ = score_all_swaps(query.without_sink(), taus=taus[:1], block=block)
        without = torch.cat([later.s_pos, later.s_sym], -1)
    else:
        last = -1 if sink else 0
        without = torch.stack([s_pos[..., last], s_sym[..., last]], -1)
    effective = effective[..., 0]
    nothing = torch.zeros_like(effective).masked_fill(effective.isnan(), torch.nan)  # NaN with fewer than two blocks
    return SwapScores(s_pos[..., : len(taus)], s_sym[..., : len(taus)], nothing, nothing + 1, effective), without


@torch.no_grad()
def score_softmax_swaps(query: QueryLogits, tau: float) -> Tensor:
    """Return both scores from all swaps, then both from those of keys after the sink, ``(groups, rows, 4)``.

    Weights are the softmax of the logits, over all keys and over those after the sink. Needs :func:`has_kernels`.
    """
    columns = _kernel_columns(Blocks.of(query, 1), (tau,), query.sink, softmax=True)[..., :-1]
    number = columns.shape[-1] // 2
    return torch.stack([columns[..., x] for x in (0, number, number - 1, -1)], -1)


@torch.no_grad()
def score_block_sizes(query: QueryLogits, tau: float, sizes: tuple[int, ...]) -> Tensor:
    """Return both scores from all swaps of blocks of several sizes, ``(groups, rows, 2, sizes)``.

    Sizes are ascending: logits of blocks follow from those of smaller ones whose size is a divisor.
    """
    if _is_plain(query):
        return torch.stack([_kernel_columns(Blocks.of(query, size), (tau,), 0)[..., :2] for size in sizes], -1)
    rows, columns = query.q.shape[1], _nothing(query, 2 * len(sizes))
    by_size = {size: Blocks.of(query, size) for size in sizes}
    for chosen, most in _alike(list(query.counts)):
        index = slice(None) if len(chosen) == rows else constant_tensor(tuple(chosen), columns.device)
        possible = [size for size in sizes if most >= 2 * size]
        if not possible:
            continue
        orders = [_Order.of(by_size[size], index, most // size, (tau,), 0) for size in possible]
        sums: list[list[Tensor]] = [[] for _ in possible]
        panel, side = (by_size[sizes[0]].limit(x) for x in (_PANEL, _SIDE))
        for part, k, placed, bias in _parts(query, index, most, panel):
            known: dict[int, Tensor] = {}
            for size, order, of_size in zip(possible, orders, sums, strict=True):
                smaller = [x for x in known if size % x == 0]
                known[size] = (
                    _in_larger_blocks(known[smaller[-1]], size // smaller[-1])
                    if smaller
                    else block_logits(_split(k, size), _split(placed, size), _split_bias(bias, size), query.softcap)
                )
                own = order[part]
                logits = _in_order(known[size], own.order).mul_(0.5)
                of_size.append(_sums(partial(_part_of, logits), own, panel, side))
        for size, order, of_size in zip(possible, orders, sums, strict=True):
            column = sizes.index(size)
            scores = torch.unflatten(
                _scores(torch.cat(of_size, 1), order.total), 0, (len(query.k), -1)
            )  # (groups, rows, 2)
            columns[:, index, column :: len(sizes)] = scores
    return torch.unflatten(columns, -1, (2, -1))


def _nothing(query: QueryLogits, columns: int) -> Tensor:
    """Return NaN for all queries, ``(groups, rows, columns)`` float64."""
    return torch.full((*query.q.shape[:2], columns), torch.nan, dtype=torch.float64, device=query.k.device)


def _split(x: Tensor, size: int) -> Tensor:
    """Return ``(queries, keys, d)`` as blocks, ``(queries, size, blocks, d)``."""
    used = x.shape[1] // size * size
    return torch.unflatten(x[:, :used], 1, (-1, size)).transpose(1, 2)


def _split_bias(bias: Tensor | None, size: int) -> Tensor | None:
    """Return the bias of positions ``(queries, 1, keys)`` as blocks, ``(queries, size, 1, blocks)``."""
    return None if bias is None else _split(bias.mT, size).mT


def _in_larger_blocks(matrix: Tensor, number: int) -> Tensor:
    """Return logits of blocks of ``number`` blocks, from those of the smaller ones, ``(queries, blocks, blocks)``."""
    used = matrix.shape[-1] // number * number
    return torch.stack([matrix[:, x:used:number, x:used:number] for x in range(number)], 1).logsumexp(1)


def _part_of(matrix: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return some rows and columns of ``matrix`` ``(queries, blocks, blocks)``."""
    return matrix[:, rows, columns]


def _in_order(matrix: Tensor, order: Tensor) -> Tensor:
    """Return ``matrix`` ``(queries, blocks, blocks)`` with rows and columns in an order ``(queries, blocks)``."""
    rows = matrix.gather(1, order[:, :, None].expand_as(matrix))
    return rows.gather(2, order[:, None].expand_as(matrix))


def _alike(counts: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yield indices of queries with similar numbers of blocks, of at least two, and the largest of these numbers."""
    order = sorted((index for index, count in enumerate(counts) if count > 1), key=lambda index: -counts[index])
    while order:
        most = counts[order[0]]
        chosen = [index for index in order if counts[index] >= _ALIKE * most]
        order = order[len(chosen) :]
        yield sorted(chosen), most


@dataclass(frozen=True)
class _Order:
    """Blocks of some queries in ascending order of their weights.

    α of a swap of i < j is a product of one factor of each. Blocks that are not seen come last.

    Attributes:
        order: Index of the blocks, ``(queries, blocks)``.
        logits: Half their logits, centred, ``(queries, blocks)``.
        rise: Factors of the larger weights, ``(queries, temperatures, blocks)``.
        fall: Factors of the smaller weights.
        total: Sum of α over all swaps, ``(queries, temperatures)`` float64.
        effective: Effective number of swaps at the first temperature, ``(queries,)`` float64.
    """

    order: Tensor
    logits: Tensor
    rise: Tensor
    fall: Tensor
    total: Tensor
    effective: Tensor

    @classmethod
    def of(cls, blocks: Blocks, rows: slice | Tensor, most: int, taus: tuple[float, ...], sink: int) -> _Order:
        """Return the order of some rows with at most ``most`` blocks; see :func:`_columns`."""
        groups, device, dtype = len(blocks.logits), blocks.logits.device, blocks.query.k.real.dtype
        logits, weights = (x[:, rows, :most].flatten(0, 1) for x in (blocks.logits, blocks.weights))
        seen = blocks.seen[rows, :most].repeat(groups, 1)
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
        total = (rise[..., 1:] * fall.cumsum(-1)[..., :-1]).sum(-1)
        logits = logits.gather(-1, order).masked_fill_(~seen, 0)
        logits = (logits - logits.mean(-1, keepdim=True)) / 2  # centred: the logits may be large
        # With one block or none there is no swap.
        effective = effective.masked_fill(seen.sum(-1) < 2, torch.nan)
        logits, rise, fall = (x.to(dtype) for x in (logits, rise, fall))
        return cls(order, logits, rise, fall, total, effective)

    def __getitem__(self, queries: slice) -> _Order:
        """Return some of the queries."""
        return _Order(**{name: x[queries] for name, x in vars(self).items()})


def _scores(sums: Tensor, total: Tensor) -> Tensor:
    """Return positional scores by temperature, then symbolic ones, from :func:`_sums`, ``(queries, columns)``."""
    middle, apart = sums / total
    return torch.cat([middle + apart, middle - apart], -1).clamp_(0, 1)


def _columns(blocks: Blocks, rows: slice | Tensor, most: int, taus: tuple[float, ...], sink: int) -> Tensor:
    """Return both scores by temperature, then the effective number of swaps, of some rows, ``(groups, rows, columns)``.

    Args:
        blocks: Keys of queries in blocks.
        rows: Index of the rows.
        most: Largest number of their blocks.
        taus: Temperatures; the first one again without the sink, if there is one.
        sink: Number of first blocks that are the sink.
    """
    query, size = blocks.query, blocks.size
    order = _Order.of(blocks, rows, most, taus, sink)
    keys = blocks.keys(order.order).transpose(1, 2)  # (queries, size, blocks)
    panel, side = (blocks.limit(x) for x in (_PANEL, _SIDE))
    sums = []
    for part, k, placed, bias in _parts(query, rows, most * size, panel, most):
        tokens = _Tokens(
            _rows(k, keys[part]),
            _rows(placed, keys[part]),
            None if bias is None else _rows(bias.mT, keys[part]).mT,
            query.softcap,
        )
        sums.append(_sums(tokens.logits, order[part], panel, side))
    scores = _scores(torch.cat(sums, 1), order.total)
    return torch.unflatten(torch.cat([scores, order.effective[:, None]], -1), 0, (len(query.k), -1))


def _is_plain(query: QueryLogits) -> bool:
    """Return whether logits are products alone, of a precision and on a device that the kernels are written for."""
    plain = query.bias is None and query.softcap is None
    return plain and has_kernels(query.k.device, query.k.dtype.to_real())


def _kernel_columns(blocks: Blocks, taus: tuple[float, ...], sink: int, *, softmax: bool = False) -> Tensor:
    """Return the same as :func:`_columns` of all rows, without matrices of logits.

    Args:
        blocks: Keys of queries in blocks.
        taus: Temperatures; the first one again without the sink, if there is one.
        sink: Number of first blocks that are the sink.
        softmax: Whether weights are the softmax of the logits, without the sink of the other logits alone.
    """
    from wherewhat.measures.swaps.dense_cuda import Factors, swap_sums

    query = blocks.query
    factors = Factors.of(
        None if softmax else blocks.weights,
        blocks.logits,
        blocks.counts,
        _inverse(_temperatures(taus)[bool(sink)], query.k.device),
        sink,
        _NEGLIGIBLE,
    )
    sums = swap_sums(query.q, query.k, query.turns, blocks.counts, factors, blocks.size)
    columns = torch.cat([*(sums / factors.total).clamp_(0, 1), factors.effective[:, None]], -1)
    return torch.unflatten(columns, 0, (len(query.k), -1))


def _parts(
    query: QueryLogits, rows: slice | Tensor, keys: int, panel: int, width: int | None = None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Yield some queries at a time: their index, contents, the queries at all positions, and bias.

    Contents and placed queries are ``(queries, keys, d)``, bias is ``(queries, 1, keys)``.

    Args:
        query: Queries and their keys.
        rows: Index of the rows.
        keys: Number of keys.
        panel: Side of the largest matrix of logits of one query.
        width: Side of the matrix of each query; ``keys`` by default.
    """
    q, device = query.q[:, rows].flatten(0, 1), query.k.device
    bias = None if query.bias is None else query.bias[:, rows, None, :keys].flatten(0, 1)
    group = torch.arange(len(query.k), device=device).repeat_interleave(len(q) // len(query.k))
    k, turns = to_real(query.k[:, :keys]), query.turns[:, :keys].conj()
    step = max(1, (panel // min(panel, width or keys)) ** 2)
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        placed = to_real(q[part, None] * (turns if len(turns) == 1 else turns[group[part]]))
        yield part, k[group[part]], placed, None if bias is None else bias[part]


def _rows(x: Tensor, keys: Tensor) -> Tensor:
    """Return rows ``keys`` ``(queries, size, blocks)`` of ``x`` ``(queries, n, d)``, ``(queries, size, blocks, d)``."""
    first = torch.arange(len(x), device=x.device)[:, None, None] * x.shape[1]
    return x.reshape(-1, x.shape[-1]).index_select(0, (keys + first).flatten()).view(*keys.shape, -1)


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


def _sums(logits: Callable[[slice, slice], Tensor], order: _Order, panel: int, side: int) -> Tensor:
    """Return sums of α times both :func:`cosine_parts`, ``(2, queries, temperatures)`` float64.

    Args:
        logits: Function that returns half the logits of contents of some blocks at positions of others, ``(queries,
            contents, positions)``.
        order: The blocks.
        panel: Blocks whose logits at each other's positions are held at a time.
        side: Side of the tiles along the diagonal.
    """
    rise, fall, before, count = order.rise, order.fall, order.logits, order.logits.shape[1]
    sums = torch.zeros(2, *rise.shape[:2], dtype=torch.float64, device=rise.device)
    once = torch.ones(side, side, dtype=rise.dtype, device=rise.device).tril_(-1)
    panels = [slice(start, min(start + panel, count)) for start in range(0, count, panel)]

    def add(j: slice, i: slice, there: Tensor, here: Tensor) -> None:
        """Add swaps of blocks j and i, from half the logits of contents of j at positions of i, and of i at j."""
        counted = once[: there.shape[1], : there.shape[1]] if i == j else None
        both = cosine_parts(before[:, None, i] - before[:, j, None], there - here.mT, counted)
        for total, cosines in zip(sums, both, strict=True):
            total += (rise[..., j] @ cosines).mul_(fall[..., i]).sum(-1, dtype=torch.float64)

    for j, i in itertools.combinations(reversed(panels), 2):
        add(j, i, logits(j, i), logits(i, j))
    for own in panels:
        matrix = logits(own, own)
        for j, i in _tiles(own.stop - own.start, side):
            add(_moved(j, own.start), _moved(i, own.start), matrix[:, j, i], matrix[:, i, j])
    return sums


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


@functools.cache
def _tiles(count: int, side: int) -> list[tuple[slice, slice]]:
    """Return tiles of all pairs i < j of ``count`` blocks: halves with each other, and small parts with themselves."""
    if count <= side:
        return [(slice(0, count), slice(0, count))]
    half = (count + 1) // 2
    later = [(_moved(j, half), _moved(i, half)) for j, i in _tiles(count - half, side)]
    return [(slice(half, count), slice(0, half)), *_tiles(half, side), *later]
