"""Keys with the largest content of all keys beyond a window, found exactly on a GPU.

The content of a query and a key is their product after rotations. Most dimensions contribute little to it: averaged
over distances, fast planes vanish. A sketch has the dimensions with the most energy and one more, the norm of the
others, so that a product of two sketches is an upper bound (Cauchy-Schwarz) of the content minus that of the mean key.
Dimensions are scaled first so that queries and keys have the same variance in each, which makes the bound tight.

Upper bounds of all pairs, of which only the maxima over blocks of keys are stored, tell each query in which order to
search. It computes the contents of keys until no other key can be among its best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.caches.kernels import kernel_available
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.numerics import constant_tensor, has_triton

_CHUNK = 4096
"""Most queries whose block maxima are in memory at the same time; a multiple of 128."""

_CHUNK_BYTES = 2**30
"""Most memory for these maxima, except where 128 queries need more."""

_SAMPLE = 1024
"""Tokens from which energies of dimensions are estimated."""

_LOOSE = 0.3
"""Largest expected residual of a sketch, in standard deviations of the content: it doubles the blocks searched."""

_MOST = 64
"""Largest number of keys to choose."""

_NARROWEST = 16
"""Fewest dimensions that tensor cores multiply."""


def can_search(attention: LayerAttention, window: int, top: int) -> bool:
    """Return whether the kernels support a layer; it must have a causal mask and nothing else."""
    q = attention.rot_q
    half = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] >= _NARROWEST
    return half and top <= _MOST and has_triton(q.device) and kernel_available(attention, window)


@dataclass(frozen=True)
class PlaneFactors:
    """A complex factor on each plane of queries, by dimension.

    Attributes:
        real: Real part, ``(d,)`` float32; 1 for dimensions that do not rotate.
        imag: Imaginary part, negative in the first dimension of each plane.
    """

    real: Tensor
    imag: Tensor


@dataclass(frozen=True)
class Turns:
    """Rotations back to position 0, by dimension.

    Attributes:
        cos: Cosine of the angle at each token, ``(batch or 1, n or 1, d)`` float32.
        sin: Its sine, negative in the first dimension of each plane.
        partner: The other dimension of each plane, ``(d,)`` int32.
    """

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def apply(self, x: Tensor, tokens: slice, factors: PlaneFactors) -> Tensor:
        """Return ``x`` ``(batch, heads, c, d)`` of some tokens, rotated back and multiplied, in float32."""
        x = x.float()
        cos, sin = (t[:, None] if t.shape[1] == 1 else t[:, None, tokens] for t in (self.cos, self.sin))
        real, imag = factors.real, factors.imag
        return x * (real * cos + imag * sin) + x[..., self.partner.long()] * (imag * cos - real * sin)


def turns(attention: LayerAttention) -> Turns:
    """Return the rotations that undo those of a layer's queries and keys."""
    rotation, device, d = attention.rotation, attention.rot_q.device, attention.rot_q.shape[-1]
    partner = torch.arange(d, dtype=torch.int32, device=device)
    if rotation is None:
        return Turns(torch.ones(1, 1, d, device=device), torch.zeros(1, 1, d, device=device), partner)
    left, right = rotation.halves
    partner[left], partner[right] = partner[right].clone(), partner[left].clone()
    theta = rotation.angles(attention.positions.to(device))
    theta = theta[None] if theta.ndim == 2 else theta
    return Turns(*_by_dimension(theta.cos(), theta.sin(), rotation, d), partner)


def plane_factors(rotation: Rotation | None, distances: Tensor, d: int) -> PlaneFactors:
    """Return the mean over some distances ``(c,)`` of the factors that rotate queries by them."""
    if rotation is None:
        return PlaneFactors(torch.ones(d, device=distances.device), torch.zeros(d, device=distances.device))
    theta = rotation.angles(distances).double()
    return PlaneFactors(*_by_dimension(theta.cos().mean(0).float(), theta.sin().mean(0).float(), rotation, d))


def _by_dimension(cos: Tensor, sin: Tensor, rotation: Rotation, d: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of planes ``(..., planes)`` by dimension of a head, ``(..., d)``.

    Sines are negative in the first dimension of each plane. Dimensions that do not rotate have 1 and 0.
    """
    left, right = rotation.halves
    wide = (*cos.shape[:-1], d)
    real, imag = cos.new_ones(wide), sin.new_zeros(wide)
    real[..., left] = real[..., right] = cos
    imag[..., left], imag[..., right] = -sin, sin
    return real, imag


@dataclass(frozen=True)
class SketchPlan:
    """How queries and keys of a layer are sketched.

    Attributes:
        width: Dimensions of a sketch, a power of two; its last entry bounds what the others leave out.
        order: Dimensions in descending order of their energy, ``(batch * kv_heads, d)`` int32.
        mean: Mean key, ``(batch * kv_heads, d)``; it may be approximate.
        of_queries: Factor on each dimension of queries, ``(batch * kv_heads, d)``.
        of_keys: Factor on each dimension of keys.
        key_units: Product of both factors, ``(batch * kv_heads,)``.
    """

    width: int
    order: Tensor
    mean: Tensor
    of_queries: Tensor
    of_keys: Tensor
    key_units: Tensor


def sketch_plan(q: Tensor, k: Tensor, kv_heads: Tensor, *, width: int | None = None) -> SketchPlan:
    """Choose the sketches of a layer from a sample of its tokens.

    Args:
        q: Queries as they are compared, ``(batch, heads, c, d)`` float32.
        k: Keys as they are compared, ``(batch, all key heads, c, d)`` float32.
        kv_heads: Key head of each query head, ``(heads,)``.
        width: Dimensions of the sketches; by default as few as leave a small residual.
    """
    d = q.shape[-1]
    mean = k.mean(2)
    of_keys = (k - mean[:, :, None]).square().mean(2)
    of_queries = torch.zeros_like(of_keys).index_add_(1, kv_heads, q.square().mean(2))
    of_keys, of_queries = (x + 1e-9 * x.amax(-1, keepdim=True) + 1e-30 for x in (of_keys, of_queries))
    balance = (of_keys / of_queries) ** 0.25
    energy = (of_keys * of_queries).sqrt()
    sorted_energy, order = energy.sort(-1, descending=True)
    if width is None:
        spread = energy.square().sum(-1)
        residual = sorted_energy.flip(-1).cumsum(-1).flip(-1) / spread.sqrt()[..., None]
        share = residual[:, kv_heads].mean((0, 1)).tolist()
        most = 1 << (d - 1).bit_length()
        width = next((w for w in (32, 64, 128) if w < most and share[w - 1] <= _LOOSE), most)
    # The norm of a key's sketch is 8 on average.
    unit = 8 / (of_keys / balance.square()).sum(-1).sqrt()
    return SketchPlan(
        width,
        order.to(torch.int32).flatten(0, 1).contiguous(),
        mean.flatten(0, 1).contiguous(),
        balance.flatten(0, 1).contiguous(),
        (unit[..., None] / balance).flatten(0, 1).contiguous(),
        unit.flatten(),
    )


def add_far_keys(
    attention: LayerAttention,
    output: Tensor,
    lse: Tensor,
    *,
    heads: tuple[int, ...],
    first: int,
    window: int,
    top: int,
    chosen: PlaneFactors,
    seen: PlaneFactors,
) -> None:
    """Add to the output of some heads the far keys with the largest content, in place.

    Args:
        attention: One layer with a causal mask and nothing else.
        output: Output ``(batch, heads, n, d)`` of the layer over other keys.
        lse: Its log-sum-exp, ``(batch, heads, n)`` float32.
        heads: Heads that see far keys.
        first: First key that can be far.
        window: Distance from which on a key is far.
        top: Number of far keys that a query sees.
        chosen: Factors on queries for the content by which keys are chosen.
        seen: Factors on queries for the logits of these keys.
    """
    from wherewhat.lengths.selection_cuda import LEVELS, Search, Turned, add_best, sketches

    q, k = attention.rot_q, attention.rot_k
    device, d = q.device, q.shape[-1]
    count = attention.n - window - first
    if count <= 0:
        return
    kv_heads, group = attention.kv_heads, attention.heads // attention.kv_heads
    back, still = turns(attention), plane_factors(None, torch.zeros(1, device=device), d)
    listed, of_kv = (constant_tensor(x, device) for x in (heads, tuple(head // group for head in heads)))
    step = max(1, count // _SAMPLE)
    of_queries, of_keys = slice(first + window, attention.n, step), slice(first, first + count, step)
    plan = sketch_plan(
        back.apply(q[:, :, of_queries].index_select(1, listed), of_queries, chosen),
        back.apply(k[:, :, of_keys], of_keys, still),
        of_kv,
    )
    turned_q = Turned(q, back.cos, back.sin, chosen.real, chosen.imag, back.partner)
    turned_k = Turned(k, back.cos, back.sin, still.real, still.imag, back.partner)
    listed = listed.to(torch.int32)
    query_parts, _ = sketches(
        turned_q, heads=listed, group=group, order=plan.order, factor=plan.of_queries,
        start=first + window, count=count, width=plan.width,
    )  # fmt: skip
    key_parts, keys = sketches(
        turned_k, heads=torch.arange(kv_heads, dtype=torch.int32, device=device), group=1, order=plan.order,
        factor=plan.of_keys, start=first, count=count, width=plan.width, shift=plan.mean,
    )  # fmt: skip
    # No product of two sketches is larger than that of their norms; those of queries are 8, and at most 1 % more.
    steps = LEVELS / (8.1 * key_parts.size.amax(-1))
    key_rests = key_parts.parts[..., -1].amax(-1).float()
    search = Search(
        turned_q, (seen.real, seen.imag), attention.value, listed, first, window, top, attention.scale,
        query_parts, key_parts, keys, plan.mean, plan.key_units, key_rests, steps,
    )  # fmt: skip
    row_bytes = max(1, len(heads) * q.shape[0] * count // 8)
    chunk = min(_CHUNK, max(1, _CHUNK_BYTES // row_bytes // 128) * 128)
    for start in range(0, count, chunk):
        add_best(search, output, lse, start=start, rows=min(chunk, count - start))
