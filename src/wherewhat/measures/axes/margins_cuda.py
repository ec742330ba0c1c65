"""Triton kernels of the sums of a three-axis fit; imported only where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wherewhat.measures.tensors import fft_length

CHUNK = 64
"""Tokens of a chunk."""

SPAN = 16
"""Chunks that one program processes when it sums Gram matrices."""

_PART, _PARTS = 4096, 32
"""Tokens of a part of the text, whose FFT reads and writes memory once, and the largest number of parts."""

_SPECTRA = 2**29
"""Bytes of Fourier transforms held at a time (twice: before and after)."""


@triton.jit
def _two(x):
    """A float32 tensor as the sum of two bfloat16 ones."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(a_high, a_low, b_high, b_low, total):
    """``total`` plus the product of two such sums, with a relative error of 2⁻¹⁸."""
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def _values(x, strides, row, first, d, n, SIZE: tl.constexpr):
    """SIZE tokens and dimensions ``d`` of row ``row`` of ``x`` (rows, n, D) with strides of rows and tokens."""
    x += row.to(tl.int64) * strides[0] + first.to(tl.int64) * strides[1]
    token = tl.arange(0, SIZE)
    inside = (first + token < n)[:, None]
    return tl.load(x + token[:, None] * strides[1] + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _centred(x, strides, mean, row, first, d, n, D: tl.constexpr, SIZE: tl.constexpr):
    """The same minus the mean of the row, zero beyond the text."""
    values = _values(x, strides, row, first, d, n, SIZE) - tl.load(mean + row * D + d)[None, :]
    return tl.where((first + tl.arange(0, SIZE) < n)[:, None], values, 0.0)


@triton.jit
def _sums(x, strides, out, n, chunks, D: tl.constexpr, SIZE: tl.constexpr):
    """Sum of each chunk of ``x`` (rows, n, D), laid out (rows, chunks, D)."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    total = tl.sum(_values(x, strides, row, chunk * SIZE, d, n, SIZE), 0)
    tl.store(out + (row.to(tl.int64) * chunks + chunk) * D + d, total)


@triton.jit
def _around(
    sums, mean, around, n, chunks,
    D: tl.constexpr, SOME: tl.constexpr, SIZE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean of n tokens from some dimensions of ``sums`` (rows, chunks, D), and centred sums before or after chunks."""
    row = tl.program_id(1)
    d = tl.program_id(0) * SOME + tl.arange(0, SOME)
    sums += row.to(tl.int64) * chunks * D
    around += row.to(tl.int64) * chunks * D
    total = tl.zeros((BLOCK, SOME), tl.float64)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)[:, None]
        total += tl.load(sums + chunk * D + d[None, :], mask=chunk < chunks, other=0.0).to(tl.float64)
    whole = tl.sum(total, 0)
    rounded = (whole / n).to(tl.float32)
    tl.store(mean + row * D + d, rounded)
    average = rounded.to(tl.float64)
    whole -= average * n
    earlier = tl.zeros((SOME,), tl.float64)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)[:, None]
        inside = chunk < chunks
        values = tl.load(sums + chunk * D + d[None, :], mask=inside, other=0.0).to(tl.float64)
        values = tl.where(inside, values - average[None, :] * tl.minimum(n - chunk * SIZE, SIZE), 0.0)
        through = tl.cumsum(values, 0) + earlier[None, :]
        earlier += tl.sum(values, 0)
        partial_sums = whole[None, :] - through if AFTER else through - values
        tl.store(around + chunk * D + d[None, :], partial_sums.to(tl.float32), mask=inside)


@triton.jit
def _spread(x, strides, mean, out, n, size, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Row r of ``x`` (rows, n, D), centred, as the start of complex planes (rows, parts, D/2, length).

    Dimensions 2p and 2p+1 are plane p; a part has ``size`` tokens, zero after the text.
    """
    block, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    plane = tl.arange(0, D // 2)
    values = _centred(x, strides, mean, row, part * size + block * BLOCK, tl.arange(0, D), n, D, BLOCK)
    planes = tl.reshape(values, (BLOCK, D // 2, 2))
    both = tl.reshape(tl.permute(planes, (1, 0, 2)), (D // 2, 2 * BLOCK))
    position = block * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    first = (row * tl.num_programs(1) + part) * (D // 2)
    target = out + (first + plane[:, None]).to(tl.int64) * (2 * length) + position[None, :]
    tl.store(target, both, mask=(position < 2 * size)[None, :])


@triton.jit
def _complex(x, inside, BLOCK: tl.constexpr):
    """Real and imaginary parts of BLOCK complex numbers."""
    return tl.split(tl.reshape(tl.load(x, mask=inside, other=0.0), (BLOCK, 2)))


@triton.jit
def _correlate(
    q, k, out, length, PARTS: tl.constexpr, GROUPS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Σ_j Σ_p q[row, j + apart, p] · conj(k[row // GROUPS, j, p]) of spectra (rows, PARTS, PLANES, length).

    The result is (rows, PARTS, length): one spectrum for each number of parts that query and key are apart.
    """
    row = tl.program_id(1)
    position = tl.program_id(0) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    inside = position < 2 * length
    step = tl.cast(2 * length, tl.int64) * PLANES
    q += row * PARTS * step + position
    k += (row // GROUPS) * PARTS * step + position
    # Sums and numbers of all parts stay in registers: tuples, of which Triton unrolls the loops.
    real = (tl.zeros((BLOCK,), tl.float32),)
    for _ in tl.static_range(1, PARTS):
        real = real + (tl.zeros((BLOCK,), tl.float32),)  # type: ignore[assignment]
    imaginary = real
    for plane in range(PLANES):
        here = tl.cast(plane, tl.int64) * (2 * length)
        a = (_complex(q + here, inside, BLOCK),)
        b = (_complex(k + here, inside, BLOCK),)
        for part in tl.static_range(1, PARTS):
            a = a + (_complex(q + here + part * step, inside, BLOCK),)  # type: ignore[assignment]
            b = b + (_complex(k + here + part * step, inside, BLOCK),)  # type: ignore[assignment]
        reals, imaginaries = real, imaginary
        for apart in tl.static_range(PARTS):
            total_real, total_imaginary = reals[apart], imaginaries[apart]
            for part in tl.static_range(PARTS - apart):
                a_real, a_imaginary = a[part + apart]
                b_real, b_imaginary = b[part]
                total_real += a_real * b_real
                total_real += a_imaginary * b_imaginary
                total_imaginary += a_imaginary * b_real
                total_imaginary -= a_real * b_imaginary
            real = real[1:] + (total_real,)
            imaginary = imaginary[1:] + (total_imaginary,)
    out += tl.cast(row, tl.int64) * PARTS * (2 * length) + position
    for apart in tl.static_range(PARTS):
        both = tl.interleave(real[apart], imaginary[apart])
        tl.store(out + tl.cast(apart, tl.int64) * (2 * length), both, mask=inside)


@triton.jit
def _grams(
    k, strides, mean, start, total, high, low, n, chunks, spans,
    D: tl.constexpr, SIZE: tl.constexpr, SPAN: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Gram matrices of the centred keys (rows, n, D), by chunk, up to an antisymmetric part of 2⁻⁹.

    With TOTAL the sum over a span of chunks; else, for every chunk, the sum over all before it, which for a span's
    first chunk is given as ``start``, as two bfloat16 matrices.
    """
    span, row = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    square = d[:, None] * D + d[None, :]
    here = (row * spans + span).to(tl.int64) * (D * D)
    gram = tl.zeros((D, D), tl.float32) if TOTAL else tl.load(start + here + square)
    for step in range(SPAN):
        chunk = span * SPAN + step
        if not TOTAL and chunk < chunks:
            place = (row * chunks + chunk).to(tl.int64) * (D * D) + square
            gram_high, gram_low = _two(gram)
            tl.store(high + place, gram_high)
            tl.store(low + place, gram_low)
        y_high, y_low = _two(_centred(k, strides, mean, row, chunk * SIZE, d, n, D, SIZE))
        # One product with the low part, twice: quadratic forms are the same as with its transpose.
        gram = tl.dot(tl.trans(y_high), y_low * 2, gram)
        gram = tl.dot(tl.trans(y_high), y_high, gram)
    if TOTAL:
        tl.store(total + here + square, gram)


@triton.jit
def _chunks(
    q, k, q_strides, k_strides, mean_q, mean_k, before, after, high, low, sums, query_terms, key_terms, squares,
    n, chunks, GROUPS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Row sums, column sums, query terms, key terms and squares of one chunk of one query head."""
    group, chunk, kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = kv * GROUPS + group
    token = chunk * SIZE + tl.arange(0, SIZE)
    d = tl.arange(0, D)
    inside = token < n
    average_q = tl.load(mean_q + row * D + d)
    average_k = tl.load(mean_k + kv * D + d)
    here = row.to(tl.int64) * n + token
    # Queries first, keys after them: both at once need more registers than there are.
    x = _centred(q, q_strides, mean_q, row, chunk * SIZE, d, n, D, SIZE)
    tl.store(query_terms + here, tl.sum((x + average_q[None, :]) * average_k[None, :], 1), mask=inside)
    earlier = tl.load(before + (kv.to(tl.int64) * chunks + chunk) * D + d)
    from_earlier = tl.sum(x * earlier[None, :], 1)
    x_high, x_low = _two(x)
    gram = (kv * chunks + chunk).to(tl.int64) * (D * D) + d[:, None] * D
    total = tl.zeros((SIZE,), tl.float32)
    for first in range(0, D, SOME):  # some columns at a time: the whole matrix needs more registers than there are
        columns = first + tl.arange(0, SOME)
        gram_high, gram_low = tl.load(high + gram + columns[None, :]), tl.load(low + gram + columns[None, :])
        z = _product(x_high, x_low, gram_high, gram_low, tl.zeros((SIZE, SOME), tl.float32))
        total += tl.sum(z * _centred(q, q_strides, mean_q, row, chunk * SIZE, columns, n, D, SIZE), 1)
    y = _centred(k, k_strides, mean_k, kv, chunk * SIZE, d, n, D, SIZE)
    tl.store(key_terms + here, tl.sum(y * average_q[None, :], 1), mask=inside)
    later = tl.load(after + (row.to(tl.int64) * chunks + chunk) * D + d)
    from_later = tl.sum(y * later[None, :], 1)
    y_high, y_low = _two(y)
    w = _product(x_high, x_low, tl.trans(y_high), tl.trans(y_low), tl.zeros((SIZE, SIZE), tl.float32))
    w = tl.where(tl.arange(0, SIZE)[:, None] >= tl.arange(0, SIZE)[None, :], w, 0.0)
    margin = row.to(tl.int64) * (3 * n) + token
    tl.store(sums + margin + n, (tl.sum(w, 1) + from_earlier).to(tl.float64), mask=inside)
    tl.store(sums + margin + 2 * n, (tl.sum(w, 0) + from_later).to(tl.float64), mask=inside)
    tl.store(squares + row * chunks + chunk, tl.sum(tl.sum(w * w, 1) + total, 0))


@triton.jit
def _query_sums(w, sums, squares, n, BLOCK: tl.constexpr, SOME: tl.constexpr):
    """Sums and sums of squares of a block of rows of one causal triangle."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(2).to(tl.int64)
    here = first + tl.arange(0, BLOCK)
    row = here[:, None]
    total = tl.zeros((BLOCK, SOME), tl.float64)
    square = tl.zeros((BLOCK, SOME), tl.float64)
    for start in range(0, tl.minimum(first + BLOCK, n), SOME):
        key = start + tl.arange(0, SOME)[None, :]
        place = head * n * n + row.to(tl.int64) * n + key
        x = tl.load(w + place, mask=(key <= row) & (row < n), other=0.0).to(tl.float64)
        total += x
        square += x * x
    tl.store(sums + (head * 3 + 1) * n + here, tl.sum(total, 1), mask=here < n)
    tl.store(squares + head * n + here, tl.sum(square, 1), mask=here < n)


@triton.jit
def _other_sums(w, sums, n, axis, BLOCK: tl.constexpr, SOME: tl.constexpr):
    """Sums of a block of distances (axis 0) or keys (axis 2), whose numbers are neighbours in memory, over all rows."""
    first, head = tl.program_id(0) * BLOCK, tl.program_id(2).to(tl.int64)
    here = first + tl.arange(0, BLOCK)
    value = here[None, :]
    total = tl.zeros((SOME, BLOCK), tl.float64)
    for start in range(first, n, SOME):
        row = start + tl.arange(0, SOME)[:, None]
        place = head * n * n + row.to(tl.int64) * n + tl.where(axis == 0, row - value, value)
        total += tl.load(w + place, mask=(row >= value) & (row < n), other=0.0).to(tl.float64)
    tl.store(sums + (head * 3 + axis) * n + here, tl.sum(total, 0), mask=here < n)


@triton.jit
def _axis_sums(w, sums, squares, n, BLOCK: tl.constexpr, SOME: tl.constexpr):
    """Sums of a causal triangle along one axis for a block of its values."""
    axis = tl.program_id(1)
    if axis == 1:
        _query_sums(w, sums, squares, n, BLOCK, SOME)
    else:
        _other_sums(w, sums, n, axis, BLOCK, SOME)


def square_margins(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed sums ``(heads, 3n)`` and sums of squares ``(heads,)`` of the lower triangles of ``w``.

    Args:
        w: Contiguous matrices ``(heads, n, n)``; what is above the diagonal is not read.
    """
    heads, n, _ = w.shape
    sums = torch.empty(heads, 3 * n, dtype=torch.float64, device=w.device)
    squares = torch.empty(heads, n, dtype=torch.float64, device=w.device)
    _axis_sums[(-(-n // 64), 3, heads)](w, sums, squares, n, BLOCK=64, SOME=32, num_warps=4)
    return sums, squares.sum(-1)


def applies(q: Tensor) -> bool:
    """Whether the kernels support ``q`` ``(heads, n, d)``: not float64, d a power of two from 16 to 128.

    GPUs older than Hopper have less shared memory than a chunk needs.
    """
    newer = torch.cuda.get_device_capability(q.device) >= (9, 0)
    return newer and q.dtype != torch.float64 and q.shape[-1] in (16, 32, 64, 128)


def triangle_margins(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed sums, sums of squares, query terms and key terms of the whole triangle.

    Args:
        q: Queries, ``(heads, n, d)``.
        k: Keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.

    Returns:
        ``(heads, 3n)`` and ``(heads,)`` float64, ``(heads, n)`` and ``(heads, n)`` float32.
    """
    heads, n, d = q.shape
    kv, chunks = len(k), -(-n // CHUNK)
    groups = heads // kv
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    mean_q, after = _chunk_sums(q, chunks, after=True)
    mean_k, before = _chunk_sums(k, chunks, after=False)
    diagonals = _diagonals(q, k, mean_q, mean_k)  # first: while it runs, all other kernels are launched
    high, low = _gram_matrices(k, mean_k, chunks)
    sums = torch.empty(heads, 3 * n, dtype=torch.float64, device=q.device)
    query_terms, key_terms = (torch.empty(heads, n, dtype=torch.float32, device=q.device) for _ in range(2))
    squares = torch.empty(heads, chunks, dtype=torch.float32, device=q.device)
    _chunks[(groups, chunks, kv)](
        q, k, q.stride()[:2], k.stride()[:2], mean_q, mean_k, before, after, high, low,
        sums, query_terms, key_terms, squares, n, chunks, GROUPS=groups, D=d, SIZE=CHUNK, SOME=min(d, 32),
        num_warps=4, num_stages=2, maxnreg=168,
    )  # fmt: skip
    sums[:, :n] = diagonals
    return sums, squares.sum(-1, dtype=torch.float64), query_terms, key_terms


def _chunk_sums(x: Tensor, chunks: int, *, after: bool) -> tuple[Tensor, Tensor]:
    """Return the mean of ``x`` ``(rows, n, d)``, and the centred sum after (or before) each chunk.

    Returns:
        ``(rows, d)`` and ``(rows, chunks, d)``, float32.
    """
    rows, n, d = x.shape
    sums, around = torch.empty(2, rows, chunks, d, dtype=torch.float32, device=x.device)
    mean = torch.empty(rows, d, dtype=torch.float32, device=x.device)
    _sums[(chunks, rows)](x, x.stride()[:2], sums, n, chunks, D=d, SIZE=CHUNK, num_warps=4)
    shape: dict[str, Any] = {"D": d, "SOME": 16, "SIZE": CHUNK, "BLOCK": min(256, triton.next_power_of_2(chunks))}
    _around[(d // 16, rows)](sums, mean, around, n, chunks, AFTER=after, **shape, num_warps=8)
    return mean, around


def _gram_matrices(k: Tensor, mean: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the Gram matrix of the centred keys before each chunk, as two bfloat16 ``(kv, chunks, d, d)``."""
    kv, n, d = k.shape
    spans = -(-chunks // SPAN)
    totals = torch.empty(kv, spans, d, d, dtype=torch.float32, device=k.device)
    high, low = (torch.empty(kv, chunks, d, d, dtype=torch.bfloat16, device=k.device) for _ in range(2))
    shape: dict[str, Any] = {"D": d, "SIZE": CHUNK, "SPAN": SPAN, "num_warps": 8}
    _grams[(spans, kv)](k, k.stride()[:2], mean, totals, totals, high, low, n, chunks, spans, TOTAL=True, **shape)
    start = (totals.cumsum(1, dtype=torch.float64) - totals).float()
    _grams[(spans, kv)](k, k.stride()[:2], mean, start, totals, high, low, n, chunks, spans, TOTAL=False, **shape)
    return high, low


def _diagonals(q: Tensor, k: Tensor, mean_q: Tensor, mean_k: Tensor) -> Tensor:
    """Return ``Σ_j q[j + d] · k[j]`` for every distance, centred, ``(heads, n)`` float32.

    A long text is transformed in parts, which a kernel reads and writes once; parts of equal distance are summed as
    spectra.
    """
    heads, n, d = q.shape
    groups = heads // k.shape[0]
    parts = min(_PARTS, triton.next_power_of_2(-(-n // _PART)))  # the kernel is compiled for each number of parts
    size = -(-n // parts)
    length = fft_length(2 * size)
    step = min(len(k), max(1, _SPECTRA // ((groups + 1) * parts * (d // 2) * length * 8)))
    planes = torch.empty((groups + 1) * step, parts, d // 2, length, dtype=torch.complex64, device=q.device)
    planes[..., size:] = 0  # once: no round writes there
    product = torch.empty(heads, parts, length, dtype=torch.complex64, device=q.device)
    shape: dict[str, Any] = {"PARTS": parts, "GROUPS": groups, "PLANES": d // 2}
    block = 256 if parts <= 8 else 128  # two frequencies a thread, as long as there are registers for all parts
    for first in range(0, len(k), step):
        of_k = slice(first, first + step)
        of_q = slice(first * groups, (first + step) * groups)
        count, filled = len(q[of_q]), 0
        for x, mean in ((q[of_q], mean_q[of_q]), (k[of_k], mean_k[of_k])):
            out = torch.view_as_real(planes[filled:])
            grid = (-(-size // 64), parts, len(x))
            _spread[grid](x, x.stride()[:2], mean, out, n, size, length, D=d, BLOCK=64, num_warps=4)
            filled += len(x)
        spectra: Tensor = torch.fft.fft(planes[:filled])
        arguments: list[Any] = [torch.view_as_real(x) for x in (spectra[:count], spectra[count:], product[of_q])]
        _correlate[(-(-length // block), count)](*arguments, length, **shape, BLOCK=block, num_warps=4)
    del planes, spectra
    values: Tensor = torch.fft.ifft(product).real
    sums = values[..., :size].contiguous()
    sums[:, :-1] += values[:, 1:, length - size :]  # distances below zero between parts that are one further apart
    return sums.view(heads, -1)[:, :n]
