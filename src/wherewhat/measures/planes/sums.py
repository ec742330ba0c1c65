"""Sums of logits and of their parts over a triangle or a band of pairs of tokens, without the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.measures.axes.solver import Band
from wherewhat.measures.tensors import chunk_size, chunked, dots


@dataclass(frozen=True)
class BandSums:
    """Sums over the pairs ``0 ≤ i - j < width`` of logits ``W[i, j] = q_i · k_j`` and of their parts ``q_if k_jf``.

    Attributes:
        rows: Sums of W over each query's keys, ``(..., heads, n)``.
        columns: Sums of W over each key's queries, ``(..., heads, n)``.
        products: Sums of each dimension's part times W, ``(..., heads, d)``; their sum is the sum of squares, which may
            stand in their place, ``(..., heads, 1)``.
        reach: Sum of W² over the whole triangle, ``(..., heads)``: the scale of rounding errors.
    """

    rows: Tensor
    columns: Tensor
    products: Tensor
    reach: Tensor

    @property
    def squares(self) -> Tensor:
        """Sum of W², ``(..., heads)``."""
        return self.products.sum(-1)

    def varies(self, tss: Tensor) -> Tensor:
        """Return whether a sum of squares around the mean exceeds rounding errors."""
        return tss > 1e-12 * self.reach.clamp_min(1e-300)


def _tokens(x: Tensor, n: int) -> Tensor:
    """Return the n tokens of chunks ``(chunks, ..., size, d)``, ``(..., n, d)``."""
    return x.movedim(0, -3).flatten(-3, -2)[..., :n, :]


def band_sums(q: Tensor, k: Tensor, band: Band, *, by_dimension: bool = True) -> BandSums:
    """Return sums of ``q_i · k_j`` for heads that share a key head, in time O(n d²) and memory O(n d).

    Args:
        q: Chunks of queries, ``(chunks, ..., heads, size, d)`` float64.
        k: Chunks of keys, ``(chunks, ..., size, d)``, shared by the heads.
        band: Pairs of tokens.
        by_dimension: Whether to return the products of each dimension; else their sum, in less time.
    """
    n, width = band.n, band.width
    whole = _triangle(q, k, n, by_dimension)
    if width >= n:
        return whole
    # A band is the triangle minus the smaller triangle of the far pairs.
    size = chunk_size(n - width, q.shape[-1])
    far_q, far_k = _tokens(q, n)[..., width:, :], _tokens(k, n)[..., : n - width, :]
    far = _triangle(chunked(far_q, size), chunked(far_k, size), n - width, by_dimension)
    whole.rows[..., width:] -= far.rows
    whole.columns[..., : n - width] -= far.columns
    return BandSums(whole.rows, whole.columns, whole.products - far.products, whole.reach)


def band_totals(q: Tensor, k: Tensor, band: Band) -> Tensor:
    """Return sums of each dimension's part of the logits, ``(..., heads, d)``; arguments as for :func:`band_sums`."""
    n, width = band.n, band.width
    # Sums of the keys before each chunk, and within it by a product: a sum along tokens uses few threads of a GPU.
    of_chunks = k.sum(-2, keepdim=True)
    through = k.new_ones(k.shape[-2], k.shape[-2]).tril() @ k + (of_chunks.cumsum(0) - of_chunks)
    if width < n:
        until = _tokens(through, n)
        until = torch.cat([until[..., :width, :], until[..., width:, :] - until[..., :-width, :]], -2)
        through = chunked(until, q.shape[-2])
    return (q * through[..., None, :, :]).sum((0, -2))


def _triangle(q: Tensor, k: Tensor, n: int, by_dimension: bool) -> BandSums:
    """Return the sums over the triangle of n tokens, of chunks as for :func:`band_sums`."""
    chunks, *lead, heads, size, d = q.shape
    # Heads that share keys are adjacent, so that no product repeats its keys.
    flat, grams = q.view(-1, heads * size, d), k.mT @ k
    grams = grams.cumsum(0)[:-1].view(-1, d, d)  # of all chunks before the second one, the third, …
    later = flat[len(flat) - len(grams) :]
    inside = (flat @ k.view(-1, size, d).mT).view(*q.shape[:-1], size).tril_()
    key_sums, query_sums = k.sum(-2), q.sum(-2)
    before = key_sums.cumsum(0) - key_sums  # (chunks, ..., d): keys of earlier chunks
    after = query_sums.sum(0) - query_sums.cumsum(0)  # (chunks, ..., heads, d): queries of later chunks
    rows = inside.sum(-1) + (flat @ before.view(-1, d, 1)).view(q.shape[:-1])
    columns = inside.sum(-2) + after @ k.mT
    if by_dimension:
        parts = inside.view(len(flat), -1, size) @ k.view(-1, size, d)
        parts[len(flat) - len(grams) :].baddbmm_(later, grams)
        products = parts.mul_(flat).view(q.shape).sum((0, -2))
    else:
        between = dots((later @ grams).view(-1, size, d), later.view(-1, size, d)).view(chunks - 1, *lead, heads).sum(0)
        within = torch.linalg.vector_norm(inside, dim=(-1, -2)).square().sum(0)
        products = (within + between)[..., None]
    return BandSums(
        rows=_tokens(rows[..., None], n)[..., 0],
        columns=_tokens(columns[..., None], n)[..., 0],
        products=products,
        reach=products.sum(-1),
    )
