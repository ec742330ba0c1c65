"""Per-plane contributions to the logits, and an upper bound on the non-additive part, of tensors and of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import band_width, fit_margins
from wherewhat.measures.axes.margins import diagonal_sums
from wherewhat.measures.axes.solver import Band, Margins
from wherewhat.measures.graphs import launched
from wherewhat.measures.planes import PlanesConfig
from wherewhat.measures.planes.coordinates import Planes
from wherewhat.measures.planes.sums import BandSums, band_sums, band_totals
from wherewhat.measures.tensors import (
    check_finite,
    check_heads,
    check_single_text,
    chunk_size,
    chunked,
    on_host,
    scores_by_text,
)
from wherewhat.numerics import has_triton
from wherewhat.options import short_repr
from wherewhat.scores import Column, Scores

_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Entries of q processed at a time."""


@dataclass(frozen=True)
class PlaneStats:
    """Statistics by head and plane; unrotated dimensions together are the last plane.

    Phases are before rotation. The plane's mean distance curve is ``|μ_q| |μ_k| cos(θ d + φ_q - φ_k)``: its maximum is
    where the plane has turned by the difference of the mean directions.

    Attributes:
        q_size: Mean length of the queries in the plane, before rotation, ``(heads, planes)``.
        k_size: The same for the keys that each head reads.
        q_concentration: Mean resultant length of the phases, |E z/|z||: 1 if all phases are equal.
        k_concentration: The same for the keys.
        q_alignment: The same weighted by length, |E z| / E|z|.
        k_alignment: The same for the keys.
        q_direction: Mean direction of the phases in radians; NaN for the unrotated dimensions.
        k_direction: The same for the keys.
        share: Covariance of the plane's logits with the logits, divided by their variance. Sums to 1; negative for a
            plane that counteracts the others; NaN where the logits are constant.
        period: Positions per full turn, ``(planes,)``.
        slow: Whether the period exceeds the number of distances, ``(planes,)``.
    """

    q_size: Tensor
    k_size: Tensor
    q_concentration: Tensor
    k_concentration: Tensor
    q_alignment: Tensor
    k_alignment: Tensor
    q_direction: Tensor
    k_direction: Tensor
    share: Tensor
    period: Tensor
    slow: Tensor

    __repr__ = short_repr

    @property
    def slow_dominance(self) -> Tensor:
        """Share of the logits' variance in planes that turn less than once, ``(heads,)``."""
        return torch.where(self.slow, self.share, 0.0).sum(-1)

    def weighted(self, values: Tensor) -> Tensor:
        """Return the mean over planes of ``values`` ``(heads, planes)``, weighted by positive shares, ``(heads,)``."""
        weight = self.share.clamp_min(0)
        return (values * weight).sum(-1) / weight.sum(-1)


def plane_stats(
    rot_q: Tensor, rot_k: Tensor, planes: Planes, *, positions: Tensor | None = None, window: int | None = None
) -> PlaneStats:
    """Return statistics of every plane, in time O(n d²) per head.

    Takes tensors: a window is ignored unless it is given; other masks, biases, soft-cap and sinks are always ignored.
    :func:`wherewhat.planes` takes a layer and uses its window and positions.

    Args:
        rot_q: Rotated queries, ``(heads, n, d)``.
        rot_k: Rotated keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        planes: Dimensions and angles of the planes.
        positions: Position of each token, ``(n,)``; 0, 1, … by default.
        window: Only distances below this are used.
    """
    width = _check(rot_q, rot_k, window)
    if positions is None:
        positions = torch.arange(rot_q.shape[1], device=rot_q.device)
    return _statistics(_by_key_heads(rot_q, rot_k, planes, positions, width, _of_planes), planes, width)


@dataclass(frozen=True)
class _Heads:
    """Some key heads and the query heads that read them, with arranged dimensions, in chunks of tokens.

    Attributes:
        q: Rotated queries, ``(chunks, kv_heads, groups, size, d)`` float64.
        k: Rotated keys, ``(chunks, kv_heads, size, d)`` float64.
        z_q: Queries before rotation, ``(chunks, kv_heads, groups, size, pairs)`` complex128.
        z_k: Keys before rotation, ``(chunks, kv_heads, size, pairs)`` complex128.
        rotor: The rotation of every token, ``(chunks, 1, size, pairs)`` complex128.
        diagonals: Sums of the logits at each distance, ``(kv_heads, groups, width)``; None if they are not needed.
        sums: Other sums of the logits.
        planes: The planes.
        band: Pairs of tokens that the sums are over.
    """

    q: Tensor
    k: Tensor
    z_q: Tensor
    z_k: Tensor
    rotor: Tensor
    diagonals: Tensor | None
    sums: BandSums
    planes: Planes
    band: Band


def _by_key_heads(
    rot_q: Tensor,
    rot_k: Tensor,
    planes: Planes,
    positions: Tensor,
    width: int,
    *functions: Callable[[_Heads], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Return what functions of key heads return, for all heads; arguments as for :func:`plane_stats`."""
    groups, n, d = rot_q.shape[0] // rot_k.shape[0], *rot_q.shape[1:]
    band, rotor = Band(n, width, rot_q.device), chunked(planes.rotor(positions)[None], chunk_size(n, d))
    back = rotor.conj().resolve_conj()
    # Key heads per batch: few on a CPU, where caches are small.
    step = max(1, _ENTRIES.get(rot_q.device.type, 2**20) // (groups * n * d))
    by_key = torch.unflatten(rot_q, 0, (-1, groups))
    pieces: list[dict[str, Tensor]] = []
    for heads in (slice(h, h + step) for h in range(0, len(rot_k), step)):
        q, k = (chunked(planes.arrange(x[heads]), chunk_size(n, d)) for x in (by_key, rot_k))
        z_q, z_k = planes.to_complex(q) * back[:, None], planes.to_complex(k) * back
        diagonals = None
        if _bounds in functions:
            double_q, double_k = (x[heads].double().contiguous() for x in (by_key, rot_k))
            diagonals = diagonal_sums(double_q, double_k, width)
        of_heads = _Heads(q, k, z_q, z_k, rotor, diagonals, band_sums(q, k, band), planes, band)
        pieces.append({name: x for function in functions for name, x in function(of_heads).items()})
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _statistics(values: Mapping[str, Tensor], planes: Planes, width: int) -> PlaneStats:
    period = planes.period
    by_plane = {field.name: values[field.name] for field in fields(PlaneStats) if field.name in values}
    return PlaneStats(**by_plane, period=period, slow=period > width)


def _of_planes(heads: _Heads) -> dict[str, Tensor]:
    """Return statistics of every plane, ``(heads, planes)`` each."""
    planes, sums, groups = heads.planes, heads.sums, heads.q.shape[2]
    totals = band_totals(heads.q, heads.k, heads.band)
    covariance = sums.products - totals * totals.sum(-1, keepdim=True) / heads.band.pairs
    variance = covariance.sum(-1, keepdim=True)
    share = torch.where(sums.varies(variance[..., 0])[..., None], planes.by_plane(covariance) / variance, torch.nan)
    of_q = _phases(heads.z_q, planes, heads.band.n)
    of_k = {name: x[:, None].expand(-1, groups, -1) for name, x in _phases(heads.z_k, planes, heads.band.n).items()}
    phases = {
        f"{which}_{name}": x for which, statistics in (("q", of_q), ("k", of_k)) for name, x in statistics.items()
    }
    return {name: x.flatten(0, 1) for name, x in (phases | {"share": share}).items()}


def _phases(z: Tensor, planes: Planes, n: int) -> dict[str, Tensor]:
    """Return size, concentration, alignment and direction by plane of n tokens before rotation, ``(..., count)``.

    ``z`` is ``(chunks, ..., size, pairs)``, zero after the text.
    """
    size = planes.size(z)
    mean_size = size.sum((0, -2)) / n
    # A vector of length zero has no direction and contributes none.
    by_size = planes.spread(size.clamp_min_(1e-300).reciprocal_())[..., None]
    mean_unit = torch.view_as_complex((torch.view_as_real(z) * by_size).sum((0, -3))) / n
    alignment = planes.size(z.sum((0, -2)) / n) / mean_size.clamp_min(1e-300)
    turned = len(planes.turning)
    direction = pad(mean_unit[..., :turned].angle(), (0, planes.count - turned), value=torch.nan)
    scale = torch.ones(planes.count, dtype=torch.float64, device=z.device)
    scale[:turned] = planes.scaling
    return {
        "size": mean_size / scale,
        "concentration": planes.size(mean_unit),
        "alignment": alignment,
        "direction": direction,
    }


@dataclass(frozen=True)
class ResidualBound:
    """Upper bound on SSE/TSS of the three-axis fit, one entry per head, all ``(heads,)`` float64.

    ``SSE/TSS ≤ bound ≤ from_causes``. NaN where the logits are constant.

    Attributes:
        bound: Share of the variance not explained by closed-form distance, query and key terms, at most 1.
        turning_q: Share from the rotation of query deviations relative to the mean key.
        turning_k: Share from the rotation of key deviations relative to the mean query.
        content: Share from the product of deviations, without its query and key means.
    """

    bound: Tensor
    turning_q: Tensor
    turning_k: Tensor
    content: Tensor

    __repr__ = short_repr

    @property
    def from_causes(self) -> Tensor:
        """Bound from the sizes of the three causes alone, ``(√turning_q + √turning_k + √content)²``."""
        return (self.turning_q.sqrt() + self.turning_k.sqrt() + self.content.sqrt()).square()


def residual_bound(rot_q: Tensor, rot_k: Tensor, planes: Planes, *, window: int | None = None) -> ResidualBound:
    """Return a bound on the residual share of ``a[i-j] + b[i] + c[j]``, in time O(n d (d + log n)) per head.

    Takes tensors: a window is ignored unless it is given; other masks, soft-cap and sinks are always ignored.

    The share does not depend on the scale of the dot product. An additive bias does not change the residual, only the
    variance that it is divided by.

    Args:
        rot_q: Rotated queries, ``(heads, n, d)``, of tokens at consecutive positions.
        rot_k: Rotated keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        planes: Dimensions and angles of the planes.
        window: Only distances below this are used.
    """
    width = _check(rot_q, rot_k, window)
    # The origin of positions only rotates the means: the deviations after rotation stay the same.
    positions = torch.arange(rot_q.shape[1], device=rot_q.device)
    return _bound_of(_by_key_heads(rot_q, rot_k, planes, positions, width, _bounds))


def _bound_of(values: Mapping[str, Tensor]) -> ResidualBound:
    return ResidualBound(**{field.name: values[field.name] for field in fields(ResidualBound)})


def _bounds(heads: _Heads) -> dict[str, Tensor]:
    """Return the fields of :class:`ResidualBound` and the residual share itself, ``(heads,)`` each."""
    q, k, planes, rotor, band, logits = heads.q, heads.k, heads.planes, heads.rotor, heads.band, heads.sums
    # Means weighted by the number of pairs of each token: any means give a bound, these a tighter one.
    by_distance, by_query, by_key = band.unpack(band.counts)
    mean_q = _weighted_mean(heads.z_q, by_query)  # (kv_heads, groups, pairs)
    mean_k = _weighted_mean(heads.z_k, by_key)  # (kv_heads, pairs)
    turned_q = planes.to_real((mean_q[..., None, :] * rotor[:, None]).contiguous())
    turned_k = planes.to_real((mean_k[..., None, :] * rotor).contiguous())
    rest_q, rest_k = q - turned_q, k - turned_k

    # Query deviations times mean key: the mean of each row is a query term.
    sums = band_sums(rest_q, turned_k, band, by_dimension=False)
    b = sums.rows / by_query
    turning_q = sums.squares - (sums.rows * b).sum(-1)
    # Key deviations times mean query: the mean of each column is a key term.
    sums = band_sums(turned_q, rest_k, band, by_dimension=False)
    c = sums.columns / by_key
    turning_k = sums.squares - (sums.columns * c).sum(-1)
    # Deviations times deviations: row means, then column means of the remainder.
    sums = band_sums(rest_q, rest_k, band, by_dimension=False)
    b_content = sums.rows / by_query
    explained = band.normal(band.pack(b.new_zeros(*b.shape[:2], band.width), b_content, torch.zeros_like(b)))
    left = sums.columns - band.unpack(explained)[2]
    c_content = left / by_key
    content = sums.squares - (sums.rows * b_content).sum(-1) - (left * c_content).sum(-1)

    # Means times means, by distance.
    means, turns = mean_q * mean_k[:, None].conj(), planes.rotor(torch.arange(band.width, device=q.device))
    a = means.real @ turns.real.mT - means.imag @ turns.imag.mT
    candidate = band.pack(a, b + b_content, c + c_content)
    assert heads.diagonals is not None
    margins = band.pack(heads.diagonals, logits.rows, logits.columns)
    image = band.normal(candidate)
    errors = logits.squares - (candidate * (2 * margins - image)).sum(-1)
    # The remainder's mean at each distance belongs to the distance curve.
    left_over = margins - image
    least = errors - (band.unpack(left_over)[0].square() / by_distance).sum(-1)
    tss = logits.squares - logits.rows.sum(-1).square() / band.pairs
    squares = torch.stack([least, turning_q, turning_k, content])
    shares = torch.where(logits.varies(tss), squares.clamp_min(0) / tss.clamp_min(1e-300), torch.nan).flatten(1)
    # The best fit follows from the sums of what the candidate leaves.
    of_rest = Margins(band, left_over.flatten(0, 1), errors.flatten())
    fit = fit_margins(of_rest, candidate.flatten(0, 1), method="linear")
    return {
        "bound": shares[0].clamp_max(1),
        "turning_q": shares[1],
        "turning_k": shares[2],
        "content": shares[3],
        "actual": 1 - fit.r.square(),
    }


def _weighted_mean(z: Tensor, weight: Tensor) -> Tensor:
    """Return the mean over tokens of ``z`` ``(chunks, ..., size, pairs)`` with ``weight`` ``(n,)``."""
    of_chunks = chunked((weight / weight.sum())[:, None], z.shape[-2]).mT  # (chunks, 1, size)
    parts = of_chunks.view(len(z), *[1] * (z.ndim - 3), 1, -1) @ Planes.to_real(z)
    return Planes.to_complex(parts.sum(0)[..., 0, :])


def layer_stats(attention: LayerAttention) -> PlaneStats:
    """Return statistics of every plane of a captured layer that rotates, with its window and positions."""
    planes, positions, width = _layout(attention)
    values = _by_key_heads(attention.rot_q[0], attention.rot_k[0], planes, positions, width, _of_planes)
    return _statistics(values, planes, width)


def _layout(attention: LayerAttention) -> tuple[Planes, Tensor, int]:
    """Return the planes, positions ``(n,)`` and number of distances of a layer."""
    check_single_text(attention)
    rot_q, rot_k = attention.rot_q[0], attention.rot_k[0]
    planes = Planes.of(attention.rotation, rot_q.shape[-1], device=rot_q.device)
    width = _distances(rot_q, rot_k, band_width(attention))
    if attention.rotation is None:
        return planes, torch.arange(attention.n, device=rot_q.device), width
    positions = attention.positions.reshape(-1, attention.m)[0]
    if bool((on_host(attention.positions).reshape(-1, attention.m)[0].diff() != 1).any()):
        raise MeasureError(f"positions of layer {attention.layer} are not consecutive, as statistics of planes require")
    return planes, positions, width


def layer_scores(attention: LayerAttention, config: PlanesConfig) -> list[Scores]:
    """Return plane statistics and residual bound of each text of a layer; only the bound if it does not rotate.

    Soft-cap and bias are left out: they do not consist of planes.
    """
    merged = attention.merged
    planes, positions, width = _layout(merged)
    values = _launched_at_once(merged, planes, positions, width)
    heads = {
        "residual_bound": values["bound"],
        "residual_share": values["actual"],
        **{name: values[name] for name in ("turning_q", "turning_k", "content")},
    }
    whole: dict[str, float | Tensor] = {}
    curves: dict[str, Column] = {}
    if merged.rotation is not None:
        stats = _statistics(values, planes, width)
        heads["slow_dominance"] = stats.slow_dominance
        heads["q_concentration"] = stats.weighted(stats.q_concentration)
        heads["k_concentration"] = stats.weighted(stats.k_concentration)
        whole["slow_dimensions"] = (planes.dimensions * stats.slow).sum() / planes.dimensions.sum()
        whole["random_concentration"] = math.sqrt(math.pi / attention.n) / 2
        if config.curves:
            by_plane = {name: x for name, x in vars(stats).items() if x.ndim == 2}
            curves = {f"plane_{name}": Column(x.float(), ("head", "plane")) for name, x in by_plane.items()}
            # The inverse of the period, which is infinite for planes that never turn.
            curves["plane_turns_per_token"] = Column(1 / stats.period, ("plane",))
    return scores_by_text(attention, heads=heads, whole=whole, curves=curves)


_RECORDED = 2**26
"""Entries of q above which the kernels take longer than their launches."""


def _launched_at_once(attention: LayerAttention, planes: Planes, positions: Tensor, width: int) -> dict[str, Tensor]:
    """Return the statistics and bounds of a layer; only the bounds if it does not rotate."""
    functions = (_bounds,) if attention.rotation is None else (_bounds, _of_planes)
    names = [*(field.name for field in fields(ResidualBound)), "actual"]
    if attention.rotation is not None:
        names += [field.name for field in fields(PlaneStats) if field.name not in ("period", "slow")]

    def computed(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        values = _by_key_heads(q, k, planes, positions, width, *functions)
        return tuple(values[name] for name in names)

    q, k = attention.rot_q[0], attention.rot_k[0]
    # The fit on a band is solved by iterations, which wait for the GPU.
    whole = width == attention.n and has_triton(q.device) and q.numel() <= _RECORDED
    key = ("planes", id(planes), width) if whole else None
    held = 16 * 8 * (q.numel() + k.numel())  # the Fourier transforms of long texts, and their copies, are the largest
    return dict(zip(names, launched(computed, q, k, positions, key=key, held=held, kept=lambda: planes), strict=True))


def _check(q: Tensor, k: Tensor, window: int | None) -> int:
    """Check queries ``(heads, n, d)`` and keys ``(kv_heads, n, d)``, and return the number of distances."""
    width = _distances(q, k, window)
    check_finite(q, k)
    return width


def _distances(q: Tensor, k: Tensor, window: int | None) -> int:
    """Return the number of distances of queries and keys of shapes that fit together."""
    check_heads(q, k)
    if q.shape[1:] != k.shape[1:]:
        raise MeasureError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have the same n and d")
    n = q.shape[1]
    if n < 4:
        raise MeasureError(f"{n} tokens are too few for planes: at least 4 are needed")
    if window is not None and window < 3:
        raise MeasureError(f"window={window} leaves too few distances: at least 3 are needed")
    return n if window is None else min(n, window)
