"""Margins of bilinear logits on a GPU, in as few passes over memory as they need.

The same sums as in :mod:`wherewhat.measure.axes.margins`, with three kernels in place of chains of tensor operations:
``_spread`` centres and lays tokens out for the FFT, ``_correlate`` multiplies and adds up spectra, and ``_chunks`` does
all that happens inside a chunk and between it and the chunks before. Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wherewhat.measure.axes.region import Band

CHUNK = 64
"""Tokens of a chunk: with 128, three-term products do not fit into a multiprocessor's shared memory."""

WARPS = 4
"""Warps that share a chunk."""


@triton.jit
def _spread(x, mean, out, n, length, stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Row r of ``x`` (rows, n, D), centred, as complex planes (rows, D/2, length); dimensions 2p, 2p+1 are plane p."""
    row = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plane = tl.arange(0, D // 2)
    source = x + row * stride + token[None, :].to(tl.int64) * D + 2 * plane[:, None]
    inside = (token < n)[None, :]
    real = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    real -= tl.load(mean + row * D + 2 * plane)[:, None]
    imaginary = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    imaginary -= tl.load(mean + row * D + 2 * plane + 1)[:, None]
    both = tl.interleave(real, imaginary)  # (planes, 2 * BLOCK)
    position = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    target = out + (row * (D // 2) + plane[:, None]).to(tl.int64) * (2 * length) + position[None, :]
    tl.store(target, both, mask=(position < 2 * n)[None, :])


@triton.jit
def _correlate(q, k, out, length, PLANES: tl.constexpr, BLOCK: tl.constexpr):
    """Σ_p q[row, p] · conj(k[p]) of spectra (rows, PLANES, length) and (PLANES, length)."""
    row = tl.program_id(1)
    position = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    inside = position < 2 * length
    real = tl.zeros((BLOCK,), tl.float32)
    imaginary = tl.zeros((BLOCK,), tl.float32)
    for plane in range(PLANES):
        place = position + tl.cast(plane, tl.int64) * (2 * length)
        a = tl.load(q + tl.cast(row, tl.int64) * (2 * length * PLANES) + place, mask=inside, other=0.0)
        b = tl.load(k + place, mask=inside, other=0.0)
        a_real, a_imaginary = tl.split(tl.reshape(a, (BLOCK, 2)))
        b_real, b_imaginary = tl.split(tl.reshape(b, (BLOCK, 2)))
        real += a_real * b_real + a_imaginary * b_imaginary
        imaginary += a_imaginary * b_real - a_real * b_imaginary
    target = out + tl.cast(row, tl.int64) * (2 * length) + position
    tl.store(target, tl.interleave(real, imaginary), mask=inside)


@triton.jit
def _chunks(
    q, k, mean_q, mean_k, before, after, gram, rows, columns, terms, squares,
    n, chunks, stride, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Row sums, column sums, query terms and squares of one chunk of one query head.

    Products in three tf32 terms: plain tf32 truncates, and squares would be low by 7e-4.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    token = chunk * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, D)
    inside = (token < n)[:, None]
    place = token[:, None].to(tl.int64) * D + d[None, :]
    raw = tl.load(q + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    average = tl.load(mean_k + d)
    tl.store(terms + row * n + token, tl.sum(raw * average[None, :], 1), mask=token < n)
    x = tl.where(inside, raw - tl.load(mean_q + row * D + d)[None, :], 0.0)
    y = tl.where(inside, tl.load(k + place, mask=inside, other=0.0).to(tl.float32) - average[None, :], 0.0)
    w = tl.dot(x, tl.trans(y), input_precision="tf32x3")
    w = tl.where(tl.arange(0, SIZE)[:, None] >= tl.arange(0, SIZE)[None, :], w, 0.0)
    earlier = tl.load(before + chunk * D + d)
    later = tl.load(after + (row * chunks + chunk) * D + d)
    tl.store(rows + row * n + token, tl.sum(w, 1) + tl.sum(x * earlier[None, :], 1), mask=token < n)
    tl.store(columns + row * n + token, tl.sum(w, 0) + tl.sum(y * later[None, :], 1), mask=token < n)
    g = tl.load(gram + tl.cast(chunk, tl.int64) * (D * D) + d[:, None] * D + d[None, :])
    z = tl.dot(x, g, input_precision="tf32x3")
    tl.store(squares + row * chunks + chunk, tl.sum(tl.sum(w * w, 1), 0) + tl.sum(tl.sum(z * x, 1), 0))


def applies(q: Tensor) -> bool:
    """Whether the kernels can take ``q`` ``(heads, n, d)``: not float64, d a power of two from 16 to 128.

    GPUs older than Hopper have less shared memory than a chunk needs.
    """
    newer = torch.cuda.get_device_capability(q.device) >= (9, 0)
    return newer and q.dtype != torch.float64 and q.shape[-1] in (16, 32, 64, 128)


def triangle_margins(q: Tensor, k: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed sums, sums of squares, query terms and key terms of the whole triangle.

    Args:
        q: Queries of the heads that read one key head, ``(groups, n, d)``, contiguous.
        k: Keys, ``(n, d)``, contiguous.
        length: Length of the FFT, 2n - 1 at least.

    Returns:
        ``(groups, 3n)``, ``(groups,)``, ``(groups, n)``, ``(groups, n)``, all float64.
    """
    groups, n, d = q.shape
    chunks = -(-n // CHUNK)
    queries = _chunk_sums(q, chunks)  # (groups, chunks, d)
    mean_q, mean_k = (queries.sum(1) / n).float(), k.mean(0, dtype=torch.float32)
    counts = torch.full((chunks, 1), float(CHUNK), dtype=torch.float64, device=q.device)
    counts[-1] = n - (chunks - 1) * CHUNK
    queries -= counts * mean_q[:, None]
    # Sums over the last dimension run in parallel over the others; over the first they would not.
    after = queries.sum(1, keepdim=True) - queries.mT.cumsum(-1).mT
    centred = torch.zeros(chunks * CHUNK, d, dtype=torch.float32, device=k.device)
    torch.sub(k, mean_k, out=centred[:n])
    centred = centred.view(chunks, CHUNK, d)
    keys = centred.sum(1).double()
    before = keys.mT.cumsum(-1).mT - keys
    gram = _exclusive_sum(centred.mT @ centred)
    rows, columns, terms = (torch.empty(groups, n, dtype=torch.float32, device=q.device) for _ in range(3))
    squares = torch.empty(groups, chunks, dtype=torch.float32, device=q.device)
    _chunks[(chunks, groups)](
        q, k, mean_q, mean_k, before.float().contiguous(), after.float().contiguous(), gram,
        rows, columns, terms, squares, n, chunks, n * d, D=d, SIZE=CHUNK, num_warps=WARPS,
    )  # fmt: skip
    key_terms = (centred.view(-1, d)[:n] @ mean_q.T).T
    sums = Band.pack(_diagonals(q, k, mean_q, mean_k, length), rows.double(), columns.double())
    return sums, squares.double().sum(-1), terms.double(), key_terms.double()


def _chunk_sums(q: Tensor, chunks: int) -> Tensor:
    """Sum of the queries ``(groups, n, d)`` of each chunk, ``(groups, chunks, d)`` float64."""
    groups, n, d = q.shape
    full = n // CHUNK
    sums = torch.zeros(groups, chunks, d, dtype=torch.float64, device=q.device)
    sums[:, :full] = q[:, : full * CHUNK].view(groups, full, CHUNK, d).sum(2, dtype=torch.float32)
    if full < chunks:
        sums[:, full] = q[:, full * CHUNK :].sum(1, dtype=torch.float32)
    return sums


def _exclusive_sum(x: Tensor, group: int = 32) -> Tensor:
    """Sum of everything before along the first dimension of ``(count, …)``, in two levels for parallelism."""
    count = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -count % group)).view(-1, group, *x.shape[1:])
    inside = padded.cumsum(1)
    totals = inside[:, -1].clone()
    inside -= padded
    inside += (totals.cumsum(0) - totals)[:, None]
    return inside.view(-1, *x.shape[1:])[:count]


def _diagonals(q: Tensor, k: Tensor, mean_q: Tensor, mean_k: Tensor, length: int) -> Tensor:
    """``Σ_j q[j + d] · k[j]`` for every distance, centred, ``(groups, n)`` float64."""
    groups, n, d = q.shape

    def spectrum(x: Tensor, mean: Tensor) -> Tensor:
        planes = torch.zeros(x.shape[0], d // 2, length, dtype=torch.complex64, device=x.device)
        grid = (-(-n // 64), x.shape[0])
        _spread[grid](x, mean, torch.view_as_real(planes), n, length, n * d, D=d, BLOCK=64, num_warps=4)
        found: Tensor = torch.fft.fft(planes)
        return found

    spectrum_q, spectrum_k = spectrum(q, mean_q), spectrum(k[None], mean_k[None])
    product = torch.empty(groups, length, dtype=torch.complex64, device=q.device)
    arguments: list[Any] = [torch.view_as_real(x) for x in (spectrum_q, spectrum_k, product)]
    _correlate[(-(-length // 512), groups)](*arguments, length, PLANES=d // 2, BLOCK=512, num_warps=4)
    sums: Tensor = torch.fft.ifft(product)[:, :n].real.double()
    return sums
