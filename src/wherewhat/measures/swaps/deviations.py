"""Deviations of logits from a positional and from a symbolic head, over all keys at all positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wherewhat.measures.swaps.logits import QueryLogits, block_logits, in_blocks, to_real
from wherewhat.options import short_repr


@dataclass(frozen=True)
class Deviations:
    """Mean squared deviations of the logits M[c, p] of keys c at positions p, where ``L_p = M[p, p]``.

    Attributes:
        variance: Variance of the actual logits over positions, ``(groups, rows)``.
        positional: Mean over keys c and positions p of ``(M[c, p] - L_p)²``, ``(groups, rows)``: zero for a positional
            head.
        symbolic: Mean of ``(M[c, p] - L_c)²``, ``(groups, rows)``: zero for a symbolic head.
    """

    variance: Tensor
    positional: Tensor
    symbolic: Tensor

    __repr__ = short_repr

    @property
    def exclusion(self) -> Tensor:
        """``(positional + symbolic) / variance``, ``(groups, rows)``: at least 1, infinite for constant logits.

        ``(L_c - L_p)² ≤ 2 (M - L_p)² + 2 (M - L_c)²``, averaged over all c and p.
        """
        return torch.where(self.variance > 0, (self.positional + self.symbolic) / self.variance, torch.inf)


def logit_deviations(query: QueryLogits, *, block: int = 1) -> Deviations:
    """Return deviations of single keys if ``block`` is 1, of the logarithm of block sums otherwise.

    Single keys without soft-cap take O(n d²) in closed form. Soft-cap and blocks, which are not linear, take O(n² d).

    Args:
        query: Queries and their keys.
        block: Keys per block. Keys left over at the end are not used.
    """
    if block == 1 and query.softcap is None:
        return _closed_form(query)
    return _all_pairs(query, block)


_ROUNDING = 1e-13
"""Deviations of logits in float64, relative to |q| |k|, that are rounding: the logits are constant."""

_PIECE = 1024
"""Vectors per product in sums of squares; a GPU needs many products to be busy."""


@dataclass(frozen=True)
class _Moments:
    """First and second moments of the first vectors of lists ``(lists, n, d)`` of complex vectors x.

    Attributes:
        mean: Means over the first ``counts`` vectors, ``(lists, counts, d)``.
        conjugate: Sums of ``conj(x - mean) (x - mean)ᵀ``, ``(lists, counts, d, d)``.
        plain: Sums of ``(x - mean) (x - mean)ᵀ``, ``(lists, counts, d, d)``.
    """

    mean: Tensor
    conjugate: Tensor
    plain: Tensor

    @classmethod
    def of(cls, x: Tensor, pieces: Pieces) -> _Moments:
        """Return the moments of the first vectors, from sums over pieces."""
        middle = x.mean(1, keepdim=True)  # avoids cancellation of large means
        centred = torch.cat([x.real, x.imag], -1) - torch.cat([middle.real, middle.imag], -1)
        part = torch.nn.functional.pad(centred, (0, 0, 0, 1))[:, pieces.index]  # (lists, pieces, vectors, 2d)
        first, second = (sums.cumsum(1)[:, pieces.last] for sums in (part.sum(2), part.mT @ part))
        mean = first / pieces.counts[:, None]
        second = torch.addcmul(second, first[..., :, None], mean[..., None, :], value=-1)
        upper, lower = second.chunk(2, -2)
        (real, across), (back, imaginary) = upper.chunk(2, -1), lower.chunk(2, -1)
        conjugate = torch.complex(real + imaginary, across - back)
        plain = torch.complex(real - imaginary, across + back)
        return cls(torch.complex(*mean.chunk(2, -1)) + middle, conjugate, plain)


@dataclass(frozen=True)
class Pieces:
    """Vectors in pieces of equal length, whose sums give the sums of the first vectors.

    Attributes:
        index: Index of the vectors of each piece, ``(pieces, vectors)``; n for none.
        counts: Numbers of first vectors, ascending, ``(counts,)``.
        last: Last piece of each number of first vectors, ``(counts,)``; a slice if each has a single piece.
        where: Index into them for each row, ``(rows,)``.
        rows: Rows of each number of first vectors, some of them again where they are fewer, ``(counts, most)``.
        place: Index into the flat ``rows`` for each row, ``(rows,)``.
    """

    index: Tensor
    counts: Tensor
    last: Tensor | slice
    where: Tensor
    rows: Tensor
    place: Tensor

    @staticmethod
    @lru_cache(maxsize=16)
    @torch.inference_mode(False)
    def of(rows: tuple[int, ...], n: int, device: torch.device) -> Pieces:
        """Return pieces of ``n`` vectors for the numbers of first vectors of all rows."""
        by_count: dict[int, list[int]] = {count: [] for count in sorted(set(rows))}
        for row, count in enumerate(rows):
            by_count[count].append(row)
        counts, most = list(by_count), max(map(len, by_count.values()))
        parts = list(zip([0, *counts[:-1]], counts, strict=True))
        length = min(_PIECE, max(end - start for start, end in parts))
        pieces = [(first, end) for start, end in parts for first in range(start, end, length)]
        starts, ends = torch.tensor(pieces).T
        index = starts[:, None] + torch.arange(length)
        where, place = torch.empty(2, len(rows), dtype=torch.int64)
        for number, own in enumerate(by_count.values()):
            where[own] = number
            place[own] = number * most + torch.arange(len(own))
        last = (ends <= torch.tensor(counts)[:, None]).sum(1) - 1
        return Pieces(
            index=torch.where(index < ends[:, None], index, n).to(device),
            counts=torch.tensor(counts, device=device),
            last=slice(None) if last.tolist() == list(range(len(pieces))) else last.to(device),
            where=where.to(device),
            rows=torch.tensor([own + own[:1] * (most - len(own)) for own in by_count.values()], device=device),
            place=place.to(device),
        )


def _closed_form(query: QueryLogits) -> Deviations:
    """Return deviations of single keys from moments of keys and of positions.

    As in a two-way analysis of variance, M[c, p] = k_c · u_p + b_p splits into parts that are orthogonal over c and p,
    with means k̄, ū and b̄ over the keys of a query:

        positional = mean ((k_c - k̄) · (u_p - ū))² + var (k_c · ū) + mean (k̄ · u_p + b_p - L_p)²
        symbolic = mean ((k_c - k̄) · (u_p - ū))² + var (k̄ · u_p + b_p) + mean (k_c · ū + b̄ - L_c)²

    ``k · u = Re x`` with ``x = Σ conj(q) k t`` and the rotation t of a position, and ``2 (Re x)² = |x|² + Re x²``.
    Summed over c and p, both are quadratic forms of q: with products, entry by entry, of second moments of k and of t.
    """
    pieces = Pieces.of(query.counts, query.k.shape[1], query.k.device)
    where = pieces.where
    size = pieces.counts[where].double()[:, None]  # (rows, 1)
    seen = torch.arange(query.k.shape[1], device=query.k.device) < size  # (rows, n)
    q, logits = query.q.to(torch.complex128), query.logits
    contents, places = (_Moments.of(x.to(torch.complex128), pieces) for x in (query.k, query.turns))

    def mean(x: Tensor) -> Tensor:
        """Return means over the keys of each query, ``(groups, rows, 1)``."""
        return x.masked_fill(~seen, 0).sum(-1, keepdim=True) / size

    def variance(x: Tensor) -> Tensor:
        return mean((x - mean(x)).square())

    own = q[:, pieces.rows]  # (groups, counts, most, planes)
    forms = own @ (contents.conjugate * places.conjugate) + own.conj() @ (contents.plain * places.plain)
    both = (forms * own.conj()).sum(-1).real.flatten(1)[:, pieces.place, None] / 2 / size**2
    at_place, of_content = (  # k̄ · u_p + b_p and k_c · ū + b̄, (groups, rows, n), in the precision of the keys
        block_logits(
            to_real((q * moments.mean[:, where].conj()).to(other.dtype))[:, None], in_blocks(other, 1), None, None
        )
        for moments, other in ((contents, query.turns), (places, query.k))
    )
    at_place, of_content = at_place.double(), of_content.double()
    if query.bias is not None:
        at_place, of_content = at_place + query.bias, of_content + mean(query.bias.double())
    positional = both + variance(of_content) + mean((at_place - logits).square())
    symbolic = both + variance(at_place) + mean((of_content - logits).square())
    largest = query.k.abs().double().square().sum(-1).amax(-1)[:, None, None]
    actual = variance(logits)
    constant = actual <= _ROUNDING**2 * q.abs().square().sum(-1, keepdim=True) * largest
    sums = (actual.masked_fill(constant, 0), positional.clamp_min(0), symbolic.clamp_min(0))
    return Deviations(*(x[..., 0] for x in sums))


_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Pairs of keys and positions computed at a time."""


def _all_pairs(query: QueryLogits, block: int) -> Deviations:
    """Return deviations from the logits of all blocks at all positions, some queries and blocks at a time."""
    deviations = torch.full((3, *query.q.shape[:2]), torch.nan, dtype=torch.float64, device=query.k.device)
    entries = _ENTRIES.get(query.k.device.type, _ENTRIES["cpu"])
    turns = query.turns.expand(len(query.k), -1, -1)
    for keys in sorted(set(query.counts)):
        count, used = keys // block, keys // block * block
        if count == 0:
            continue
        chosen = torch.tensor([x == keys for x in query.counts], device=query.k.device).expand(deviations.shape[1:])
        queries = max(1, entries // (used * min(count, 64)))
        for group, row in zip(*(torch.split(x, queries) for x in chosen.nonzero(as_tuple=True)), strict=True):
            contents = in_blocks(query.k[group, :used], block)
            placed = in_blocks(query.q[group, row][:, None] * turns[group, :used].conj(), block)
            bias = None if query.bias is None else torch.unflatten(query.bias[group, row, :used], -1, (count, block))
            logits = torch.unflatten(query.logits[group, row, :used], -1, (count, block)).logsumexp(-1)
            middle = logits.mean(-1, keepdim=True)  # avoids cancellation of large logits in float32
            centred, shift = (logits - middle).to(placed.dtype), middle[..., None].to(placed.dtype)
            sums = torch.zeros(2, len(group), dtype=torch.float64, device=logits.device)
            step = max(1, entries // (used * len(group)))
            for part in torch.split(torch.arange(count, device=logits.device), step):
                placed_bias = None if bias is None else bias.mT[:, :, None]
                there = block_logits(contents[:, :, part], placed, placed_bias, query.softcap).sub_(shift)
                for index, expected in enumerate((centred[:, None], centred[:, part, None])):
                    sums[index] += (there - expected).square_().sum((-1, -2), dtype=torch.float64)
            deviations[:, group, row] = torch.stack([logits.var(-1, correction=0), *(sums / count**2)])
    return Deviations(*deviations)
