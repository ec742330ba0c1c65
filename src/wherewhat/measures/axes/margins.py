"""Sums of logits along distances, queries and keys: in linear time, or in blocks for any logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.measures.axes.solver import Band, Margins
from wherewhat.measures.tensors import fft_length
from wherewhat.numerics import has_triton

Logits = Callable[[int, int, int, int], Tensor]
"""``logits(i0, i1, j0, j1)`` returns rows i0…i1 and columns j0…j1 of the matrix, ``(heads, …, …)``, a new tensor."""


def blocked_margins(logits: Logits, heads: int, band: Band, *, block: int) -> Margins:
    """Return the margins of a matrix that is computed a block of rows at a time.

    Args:
        logits: Computes a block.
        heads: Number of matrices.
        band: Pairs to sum over.
        block: Rows of a block.
    """
    n, width = band.n, band.width
    if width == n <= block and has_triton(band.device):
        from wherewhat.measures.axes.margins_cuda import square_margins

        return Margins(band, *square_margins(logits(0, n, 0, n).contiguous()))
    sums = torch.zeros(heads, sum(band.sizes), dtype=torch.float64, device=band.device)
    by_distance, by_query, by_key = band.unpack(sums)
    squares = torch.zeros(heads, dtype=torch.float64, device=band.device)
    for i0 in range(0, n, block):
        i1 = min(n, i0 + block)
        j0 = max(0, i0 - width + 1)
        w = logits(i0, i1, j0, i1).contiguous()
        w[..., i0 - j0 :].tril_()  # the other columns are keys before all of these queries
        if i1 - j0 > width:
            w.triu_(i0 - j0 - width + 1)
        by_query[:, i0:i1] = w.sum(-1)
        by_key[:, j0:i1] += w.sum(-2)
        by_distance[:, : min(width, i1 - j0)] += _distance_sums(w)[:, :width]
        if w.dtype == torch.float64:  # a norm reads the matrix once, but adds up less precisely
            squares += torch.linalg.vector_norm(w, dim=(-1, -2)).square()
        else:
            squares += w.square_().sum((-1, -2))
    return Margins(band, sums, squares)


def _distance_sums(w: Tensor) -> Tensor:
    """Return sums at distances 0, 1, … of ``w`` ``(heads, rows, columns)``, whose last row ends at distance 0.

    Entries at negative distances are zero. In steps of one entry more than a row has, memory is read along diagonals,
    and where a diagonal ends, zeros of the row above it are read.
    """
    heads, rows, columns = w.shape
    first = columns - rows  # distance of the first entry
    below = w.as_strided((heads, rows - 1, columns), (rows * columns, columns + 1, 1), w.storage_offset() + first + 2)
    sums = below.sum(1)  # from the largest distance to 0
    sums[:, rows - 1 :] += w[:, 0, : first + 1]
    return sums.flip(-1)


_SLICE = {"cpu": 2**21, "cuda": 2**27}
"""Entries of q processed at a time: limited by caches on a CPU, by memory on a GPU."""

_SPECTRUM = {"cpu": 2**19, "cuda": 2**28}
"""Complex entries of Fourier transforms held at a time, likewise."""


def bilinear_margins(q: Tensor, k: Tensor, width: int, *, dtype: torch.dtype) -> tuple[Margins, Tensor, Tensor]:
    """Return the margins of ``q_i · k_j`` on a causal band, around the means of queries and keys.

    ``q_i · k_j = (q_i - q̄) · (k_j - k̄) + q_i · k̄ + q̄ · (k_j - k̄)``: the last two are a query and a key term, known
    exactly. Keeping them separate avoids cancellation in the sums of squares, which is severe in trained models.

    Args:
        q: Queries, ``(heads, n, d)``.
        k: Keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        width: Number of distances.
        dtype: Type to multiply in, float32 or float64. Sums are kept in float64.

    Returns:
        Margins of the centred product over ``heads``, the query terms and the key terms, both ``(heads, n)``.
        Time O(n d (d + log n)), memory O(n d).
    """
    heads, n, d = q.shape
    groups = heads // k.shape[0]
    band = Band(n, width, q.device)
    if width == n and has_kernels(q):
        from wherewhat.measures.axes.margins_cuda import triangle_margins

        sums, squares, rows, columns = triangle_margins(q, k)
        return Margins(band, sums, squares), rows, columns
    step = max(1, _SLICE.get(q.device.type, 2**24) // (groups * n * d))
    margins = []
    for start in range(0, k.shape[0], step):
        some_k = k[start : start + step].to(dtype).contiguous()
        some_q = q[start * groups : (start + step) * groups].to(dtype).contiguous().view(-1, groups, n, d)
        margins.append(_centred_margins(some_q, some_k, width))
    sums, squares, rows, columns = (torch.cat(parts) for parts in zip(*margins, strict=True))
    return Margins(band, sums, squares), rows, columns


def has_kernels(q: Tensor) -> bool:
    """Whether ``q`` is on a GPU, supported by the kernels, and long enough for them to be faster."""
    most = 2**16 - 1  # a GPU's limit to the programs that differ in the head
    if q.numel() < 2**22 or q.shape[0] > most or not has_triton(q.device):
        return False
    from wherewhat.measures.axes.margins_cuda import applies

    return applies(q)


def _centred_margins(q: Tensor, k: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed sums, sum of squares, query and key terms of ``(kv, groups, n, d)`` and ``(kv, n, d)``."""
    kv, groups, n, _ = q.shape
    q, k, query_terms, key_terms = centre(q, k)
    rows, columns, squares = _triangle(q, k)
    if width < n:
        # A band is the triangle minus the smaller triangle of the far pairs.
        far_rows, far_columns, far_squares = _triangle(q[:, :, width:], k[:, : n - width])
        rows[..., width:] -= far_rows
        columns[..., : n - width] -= far_columns
        squares = squares - far_squares
    sums = Band.pack(diagonal_sums(q, k, width), rows, columns)
    return sums.view(kv * groups, -1), squares.view(-1), query_terms, key_terms


def centre(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Subtract the means of queries ``(kv, groups, n, d)`` and keys ``(kv, n, d)``.

    Returns:
        Centred queries and keys, and the query and key terms removed from the logits, ``(kv · groups, n)`` float64.
    """
    kv, groups, n, d = q.shape
    mean_q, mean_k = q.mean(-2, keepdim=True), k.mean(-2, keepdim=True)
    query_terms = (q.view(kv, -1, d) @ mean_k.mT).view(-1, n)
    q, k = q - mean_q, k - mean_k
    key_terms = (mean_q.view(kv, groups, d) @ k.mT).view(-1, n)
    return q, k, query_terms.double(), key_terms.double()


def _triangle(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row sums, column sums ``(kv, groups, n)`` and sum of squares ``(kv, groups)`` of the causal triangle.

    For ``q`` ``(kv, groups, n, d)`` and ``k`` ``(kv, n, d)``.
    """
    kv, groups, n, d = q.shape
    size = min(n, max(64, d))
    chunks = -(-n // size)
    if spare := chunks * size - n:
        q, k = pad(q, (0, 0, 0, spare)), pad(k, (0, 0, 0, spare))  # zeros do not change the sums
    # Heads that share keys are adjacent, so that no product repeats its keys.
    q = q.view(kv, groups, chunks, size, d).transpose(1, 2).reshape(kv, chunks, groups * size, d)
    k = k.view(kv, chunks, size, d)
    inside = (q @ k.mT).view(kv, chunks, groups, size, size).tril_()
    rows, columns = inside.sum(-1).double(), inside.sum(-2).double()  # (kv, chunks, groups, size)
    squares = _dot(inside, inside)
    del inside
    keys = k.sum(-2).double()
    before = keys.cumsum(1) - keys  # (kv, chunks, d): keys of earlier chunks
    rows += (q @ before.to(q.dtype)[..., None]).view(rows.shape)
    queries = q.view(kv, chunks, groups, size, d).sum(-2).double()
    after = queries.sum(1, keepdim=True) - queries.cumsum(1)  # (kv, chunks, groups, d): queries of later chunks
    columns += (k @ after.to(k.dtype).mT).mT
    gram = k.mT @ k
    gram = gram.cumsum(1) - gram  # (kv, chunks, d, d): Gram matrix of the keys of earlier chunks
    grouped = (kv, chunks, groups, size, d)
    squares = squares + _dot((q @ gram).view(grouped), q.view(grouped))
    flat = (kv, groups, chunks * size)
    rows, columns = (x.transpose(1, 2).reshape(flat)[..., :n] for x in (rows, columns))
    return rows, columns, squares


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of products of ``(kv, chunks, groups, …)``, over chunks in float64, ``(kv, groups)``."""
    products: Tensor = torch.linalg.vecdot(x.flatten(3), y.flatten(3))
    return products.double().sum(1)


def diagonal_sums(q: Tensor, k: Tensor, width: int) -> Tensor:
    """Return ``Σ_j q[j + d] · k[j]`` for every distance d below ``width``, ``(kv, groups, width)`` float64.

    For ``q`` ``(kv, groups, n, d)`` and ``k`` ``(kv, n, d)``. Two real dimensions form one complex one with
    ``Re(z_q z̄_k)`` as dot product: half the transforms.
    """
    kv, groups, n, d = q.shape
    length = fft_length(n + width - 1)
    if d % 2:
        q, k = pad(q, (0, 1)), pad(k, (0, 1))
    step = 2 * max(1, _SPECTRUM.get(q.device.type, 2**24) // (kv * (groups + 1) * length))
    product: Tensor | float = 0.0
    for start in range(0, d, step):
        spectrum_k = _spectrum(k[..., start : start + step], length).conj_physical_()  # (kv, planes, length)
        spectrum_q = _spectrum(q[..., start : start + step], length)  # (kv, groups, planes, length)
        product = product + spectrum_q.mul_(spectrum_k[:, None]).sum(2)
    sums: Tensor = torch.fft.ifft(product)[..., :width].real.double()
    return sums


def _spectrum(x: Tensor, length: int) -> Tensor:
    """Return the Fourier transform over tokens of ``(..., n, d)``, padded to ``length``, ``(..., planes, length)``."""
    n, d = x.shape[-2:]
    dtype = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    padded = torch.zeros(*x.shape[:-2], d // 2, length, dtype=dtype, device=x.device)
    padded[..., :n] = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).transpose(-1, -2)
    spectrum: Tensor = torch.fft.fft(padded)
    return spectrum
