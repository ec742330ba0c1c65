"""Controlled distance: logits recomputed at dummy distances, as ``f(q, d) + g(q, k)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.distance import DistanceConfig
from wherewhat.measures.measurement import Subject
from wherewhat.measures.tensors import centred_ranks, check_finite, check_heads, cosine, rotates
from wherewhat.options import short_repr
from wherewhat.scores import Column, Scores


def turn(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every plane of ``x`` ``(..., d)`` by its angle at ``positions`` ``(...)``, without scaling; float64.

    The angle is a float64 product, unlike in the model: float32 is not precise enough at distances far beyond the text.
    """
    return turn_planes(
        x, positions.double()[..., None] * rotation.inv_freq.to(positions.device, torch.float64), rotation
    )


def turn_planes(x: Tensor, angles: Tensor, rotation: Rotation) -> Tensor:
    """Rotate plane f of ``x`` ``(..., d)`` by ``angles[..., f]``, broadcast over the leading dimensions; float64."""
    left, right = rotation.halves
    out = x.double() + torch.zeros_like(angles[..., :1])  # a copy of the broadcast shape
    u, v = out[..., left], out[..., right]
    cos, sin = angles.cos(), angles.sin()
    out[..., left], out[..., right] = u * cos - v * sin, v * cos + u * sin
    return out


def scale_queries(q: Tensor, rotation: Rotation, scale: float) -> Tensor:
    """Multiply queries ``(..., d)`` by all factors of the logit, so that rotated queries times keys are logits.

    The rotation scales queries and keys by ``scaling`` each, in the rotated dimensions only.
    """
    out = q.double() * scale
    out[..., rotation.offset : rotation.offset + 2 * rotation.planes] *= rotation.scaling**2
    return out


def scramble_phases(k: Tensor, rotation: Rotation, *, keep_mean: bool = False, seed: int = 0) -> Tensor:
    """Return keys before rotation with a random phase in every plane of every key and unchanged magnitudes.

    Args:
        k: Keys, ``(kv_heads, m, d)``. Dimensions that are not rotated are unchanged.
        rotation: Dimensions of the planes.
        keep_mean: Rotate only deviations from the mean key.
        seed: Seed of the phases.
    """
    mean = k.double().mean(-2, keepdim=True) if keep_mean else torch.zeros_like(k[..., :1, :], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    phases = torch.rand(*k.shape[:-1], rotation.planes, generator=generator, dtype=torch.float64) * (2 * math.pi)
    return mean + turn_planes(k - mean, phases.to(k.device), rotation)


def additive_shares(turned: Tensor, curve: Tensor, centred: Tensor, energy: Tensor) -> dict[str, Tensor]:
    """Return shares of the two-way table's variance, ``(kv_heads, groups)``, from the Gram matrix of the keys.

    With C the Gram matrix of the centred keys and w_d the rotated queries, the squares of the key term are D·w̄ᵀCw̄, of
    the interaction Σ_d (w_d − w̄)ᵀC(w_d − w̄), and of the distance term m·Σ_d (f_d − f̄)². All three are sums of
    squares, without cancellation.

    Args:
        turned: Rotated queries, ``(kv_heads, groups, distances, d)``.
        curve: Mean over keys at each distance, ``(kv_heads, groups, distances)``.
        centred: Keys around their mean, ``(kv_heads, m, d)``.
        energy: Sum of squares of the keys, ``(kv_heads,)``.
    """
    m, count = centred.shape[-2], turned.shape[-2]
    gram = (centred.mT @ centred)[:, None]  # (kv_heads, 1, d, d)
    mean = turned.mean(-2, keepdim=True)
    around = turned - mean
    interaction = ((around @ gram) * around).sum((-1, -2)).clamp_min(0)
    by_key = count * ((mean @ gram) * mean).sum((-1, -2)).clamp_min(0)
    by_distance = m * (curve - curve.mean(-1, keepdim=True)).square().sum(-1)
    total = interaction + by_key + by_distance
    # Rounding errors of a constant table.
    least = 1e-24 * turned.square().sum((-1, -2)) * energy[:, None]
    divided = torch.where(total > least, total, torch.nan)
    return {
        "additive_share": (by_key + by_distance) / divided,
        "distance_share": by_distance / divided,
        "key_share": by_key / divided,
        "key_constancy": by_key / torch.where(by_key + interaction > least, by_key + interaction, torch.nan),
    }


def nan_deviation(values: Tensor) -> Tensor:
    """Return the standard deviation over the first dimension without NaN; NaN where fewer than two are left."""
    around = (values - values.nanmean(0)).square()
    count = around.isfinite().sum(0)
    return torch.where(count > 1, around.nansum(0) / (count - 1).clamp_min(1), torch.nan).sqrt()


FEWEST_KEYS = 3


@dataclass(frozen=True)
class ControlledDistance:
    """Controlled distance of one layer, averaged over queries.

    The *key profile* at distance d is ``L[·, d]`` minus its mean over keys. The *key component* is the profile at the
    real distances without the distance curve, ``L[k, d_k] - f(d_k)``; for an additive head both are the same.

    Attributes:
        distances: The dummy distances, ``(distances,)`` float64.
        within: True for distances that the shares are over, ``(distances,)`` bool.
        additive_share: 1 − ‖interaction‖² / ‖L − mean‖² of the table over keys and distances, ``(heads,)``.
        additive_share_spread: Its standard deviation over queries, ``(heads,)``; NaN for one query.
        distance_share: Part of the additive share explained by the distance curve, ``(heads,)``.
        key_share: Part explained by the keys, ``(heads,)``.
        key_constancy: Share of the variance between keys that does not depend on the distance, ``(heads,)``: the
            additive share of the table without its distance curve.
        curve: The distance curve f: mean over keys of the logit at each distance, ``(heads, distances)``.
        drift: ‖profile − key component‖ / ‖key component‖, ``(heads, distances)``.
        shape_drift: The same squared, after the best scale: 1 − cos², ``(heads, distances)``.
        rank_correlation: Spearman correlation of the profile with the key component, ``(heads, distances)``.
        logit_drift: As ``drift``, relative to the real logits with their distance curve, ``(heads, distances)``.
        logit_rank_correlation: Spearman correlation of the profile with the real logits, ``(heads, distances)``.
        rank_correlation_reference: Spearman correlation with the profile at the reference distance, ``(heads,
            distances)``.
    """

    distances: Tensor
    within: Tensor
    additive_share: Tensor
    additive_share_spread: Tensor
    distance_share: Tensor
    key_share: Tensor
    key_constancy: Tensor
    curve: Tensor
    drift: Tensor
    shape_drift: Tensor
    rank_correlation: Tensor
    logit_drift: Tensor
    logit_rank_correlation: Tensor
    rank_correlation_reference: Tensor

    __repr__ = short_repr


def controlled_distance(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    *,
    distances: Sequence[float] | Tensor,
    queries: Sequence[int] | Tensor,
    scale: float = 1.0,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
    within: float | None = None,
    reference: float = 0.0,
    block_mib: int = 64,
) -> ControlledDistance:
    """Recompute the logits of some queries with all keys at dummy distances (controlled distance).

    Takes tensors: the mask is causal unless ``visible`` is given; bias, soft-cap and sinks are ignored.
    ``wherewhat.measure("distance", model, …)`` uses the mask of each layer.

    In float64; time O(m d (d + distances) + m log m · distances) for each head and query with m keys, memory
    O(heads · m) beyond the tensors given.

    Args:
        q: Queries before rotation, ``(heads, n, d)``.
        k: Keys before rotation, ``(kv_heads, m, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        rotation: The layer's rotation.
        distances: Dummy distances, query position minus key position.
        queries: Indices of the queries, below n.
        scale: Factor on the dot product.
        positions: Position of every key, ``(m,)``; the last n are the queries'. Counted from 0 if not given.
        visible: True where a query of ``queries`` may see a key, ``(queries, m)``. Causal if not given.
        within: Shares are over distances up to this one; over all if not given.
        reference: Distance whose profile ``rank_correlation_reference`` compares with.
        block_mib: Memory for one block of profiles, in MiB.
    """
    grid = torch.as_tensor(distances, dtype=torch.float64, device=q.device).flatten()
    chosen = torch.as_tensor(queries, dtype=torch.int64).flatten()
    _check(q, k, rotation, grid, chosen, positions, visible)
    kept = torch.ones_like(grid, dtype=torch.bool) if within is None else grid <= within
    if int(kept.sum()) < 2:
        raise MeasureError(f"{int(kept.sum())} of the distances are up to {within}: at least 2 are needed")
    n, m = q.shape[1], k.shape[1]
    places = torch.arange(m, device=q.device) if positions is None else positions.to(q.device)
    places = places.double() - places[0].double()
    by_query: dict[str, list[Tensor]] = {}
    for row, i in enumerate(chosen.tolist()):
        own = i + m - n
        shown = torch.arange(m, device=q.device) <= own if visible is None else visible[row].to(q.device)
        if int(shown.sum()) < FEWEST_KEYS:
            raise MeasureError(f"query {i} sees {int(shown.sum())} keys: at least {FEWEST_KEYS} are needed")
        keys = k[:, shown].double()
        query = scale_queries(q[:, i], rotation, scale).view(k.shape[0], -1, 1, q.shape[-1])
        real = places[own] - places[shown]
        numbers = _one_query(query, keys, real, rotation, grid, kept, reference, block_mib)
        for name, values in numbers.items():
            by_query.setdefault(name, []).append(values.flatten(0, 1))
    shares = torch.stack(by_query["additive_share"])
    means = {name: torch.stack(values).nanmean(0).cpu() for name, values in by_query.items()}
    return ControlledDistance(
        distances=grid.cpu(),
        within=kept.cpu(),
        additive_share_spread=nan_deviation(shares).cpu(),
        **means,
    )


def _one_query(
    query: Tensor,
    keys: Tensor,
    real: Tensor,
    rotation: Rotation,
    grid: Tensor,
    kept: Tensor,
    reference: float,
    block_mib: int,
) -> dict[str, Tensor]:
    """Return the values of one query, ``(kv_heads, groups)`` or ``(kv_heads, groups, distances)``.

    Args:
        query: The scaled query, ``(kv_heads, groups, 1, d)``.
        keys: Its visible keys, ``(kv_heads, m, d)``.
        real: Their real distances, ``(m,)``.
        rotation: The layer's rotation.
        grid: Dummy distances, ``(distances,)``.
        kept: True for distances that the shares are over, ``(distances,)``.
        reference: Distance of the reference profile.
        block_mib: Memory for a block of profiles.
    """
    mean_key = keys.mean(-2, keepdim=True)
    centred = keys - mean_key
    turned = turn(query, grid, rotation)  # (kv_heads, groups, distances, d)
    curve = (turned * mean_key[:, None]).sum(-1)
    numbers = additive_shares(turned[:, :, kept], curve[:, :, kept], centred, keys.square().sum((-1, -2)))
    # The query times a key rotated back by its distance is the rotated query times the key.
    component = _profile(query, turn(centred, -real, rotation))
    logits = component + _profile(query, turn(mean_key, -real, rotation))
    component, logits = (x - x.mean(-1, keepdim=True) for x in (component, logits))
    pinned = _profile(turn(query, grid.new_tensor([reference]), rotation), centred)
    component_ranks, logit_ranks, pinned_ranks = (centred_ranks(x) for x in (component, logits, pinned))
    block = max(1, block_mib * 2**20 // (8 * 6 * component.numel()))  # ranking needs about six copies
    parts: list[dict[str, Tensor]] = []
    for start in range(0, grid.numel(), block):
        profile = _profile(turned[:, :, start : start + block], centred)  # (kv_heads, groups, some, m)
        ranks = centred_ranks(profile)
        parts.append(
            {
                "drift": _relative(profile - component, component),
                "shape_drift": 1 - cosine(profile, component).square(),
                "rank_correlation": cosine(ranks, component_ranks),
                "logit_drift": _relative(profile - logits, logits),
                "logit_rank_correlation": cosine(ranks, logit_ranks),
                "rank_correlation_reference": cosine(ranks, pinned_ranks),
            }
        )
    return numbers | {"curve": curve} | {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}


def _profile(turned: Tensor, keys: Tensor) -> Tensor:
    """Return products ``(kv_heads, groups, rows, m)`` of ``(kv_heads, groups, rows, d)`` and ``(kv_heads, m, d)``."""
    kv_heads, groups, rows, d = turned.shape
    return (turned.reshape(kv_heads, groups * rows, d) @ keys.mT).view(kv_heads, groups, rows, -1)


def _relative(difference: Tensor, target: Tensor) -> Tensor:
    size = target.norm(dim=-1)
    return torch.where(size > 0, difference.norm(dim=-1) / size, torch.nan)


def _check(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    grid: Tensor,
    chosen: Tensor,
    positions: Tensor | None,
    visible: Tensor | None,
) -> None:
    check_heads(q, k)
    if q.shape[2] != k.shape[2] or q.shape[1] > k.shape[1]:
        raise MeasureError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in dimension, with a key per query")
    if rotation.offset + 2 * rotation.planes > q.shape[2]:
        raise MeasureError(f"{rotation.planes} planes from dimension {rotation.offset} do not fit into {q.shape[2]}")
    if not bool(rotation.inv_freq.any()):
        raise MeasureError("no plane of the rotation turns: the logits do not depend on distance")
    if not bool(grid.isfinite().all()) or grid.numel() == 0 or bool(grid.min() == grid.max()):
        raise MeasureError(f"distances {grid.tolist()} must be finite and at least 2 different values")
    n, m = q.shape[1], k.shape[1]
    if chosen.numel() == 0 or int(chosen.min()) < 0 or int(chosen.max()) >= n:
        raise MeasureError(f"queries {chosen.tolist()} must be at least one, each from 0 to {n - 1}")
    if positions is not None and positions.shape != (m,):
        raise MeasureError(f"positions {tuple(positions.shape)} must be one per key: ({m},)")
    if visible is not None and visible.shape != (chosen.numel(), m):
        raise MeasureError(f"visible {tuple(visible.shape)} must be (queries, keys): ({chosen.numel()}, {m})")
    check_finite(q, k)


FEWEST_TOKENS = 8
"""Queries are in the second half of the text, and a rank correlation needs at least four keys."""


def distance_grid(reach: float, *, per_octave: int = 1, beyond: tuple[int, ...] = ()) -> list[int]:
    """Return integer distances 0, 1, 2, 4, … up to ``reach``, finer with ``per_octave``, and multiples beyond."""
    last = int(reach)
    steps = math.floor(math.log2(max(1, last)) * per_octave) + 1
    inside = {0, last, *(min(last, round(2 ** (step / per_octave))) for step in range(steps))}
    return sorted(inside | {times * (last + 1) for times in beyond})


def spaced_queries(n: int, count: int) -> list[int]:
    """Return up to ``count`` different queries, evenly spaced from the middle of the text to its end."""
    return sorted(
        {round(x) for x in torch.linspace(n // 2, n - 1, min(count, n - n // 2), dtype=torch.float64).tolist()}
    )


def measure_distance(subject: Subject, ids: Tensor, config: DistanceConfig) -> Scores:
    """Return controlled distance of every layer that rotates on one document ``(1, n)``."""
    if ids.shape[-1] < FEWEST_TOKENS:
        raise MeasureError(f"the text has {ids.shape[-1]} tokens: at least {FEWEST_TOKENS} are needed for distances")
    layers: list[Scores] = []

    def measure(attention: LayerAttention) -> None:
        if rotates(attention):
            layers.append(layer_scores(attention, config))

    subject.run(ids, measure)
    if not layers:
        raise MeasureError("no layer of this model rotates queries and keys: controlled distance needs rotation")
    return Scores(layers=sorted(layers, key=lambda scores: scores.layer))


def layer_scores(attention: LayerAttention, config: DistanceConfig) -> Scores:
    """Return scores and curves of one layer that rotates."""
    rotation = attention.rotation
    assert rotation is not None
    positions = attention.positions if attention.positions.ndim == 1 else attention.positions[0]
    queries = spaced_queries(attention.n, config.queries)
    visible = attention.visible(torch.tensor(queries, device=attention.mask.device))[0].any(0)
    own = positions[attention.m - attention.n :].to(visible.device)[queries]
    apart = own[:, None] - positions.to(visible.device)[None, :]
    grid = distance_grid(float(positions.max() - positions.min()), per_octave=config.per_octave, beyond=config.beyond)
    q, k = attention.q[0], attention.k[0]
    real, scrambled = (
        controlled_distance(
            q,
            keys,
            rotation,
            distances=grid,
            queries=queries,
            scale=attention.scale,
            positions=positions,
            visible=visible,
            within=float(apart[visible].max()),
            reference=config.reference,
            block_mib=config.block_mib,
        )
        for keys in (k, scramble_phases(k, rotation, keep_mean=config.keep_mean, seed=config.seed))
    )
    control = {f"{name}_scrambled": values for name, values in _heads(scrambled).items()}
    axes = ("head", "distance")
    curves = {name: Column(x, axes) for name, x in vars(real).items() if x.ndim == 2} | {
        "rank_correlation_scrambled": Column(scrambled.rank_correlation, axes),
        "drift_scrambled": Column(scrambled.drift, axes),
        "distances": Column(real.distances, ("distance",)),
        "within": Column(real.within, ("distance",)),
    }
    heads = _heads(real) | {"additive_share_spread": real.additive_share_spread} | control
    return Scores(layer=attention.layer, heads=heads, curves=curves)


def _heads(layer: ControlledDistance) -> dict[str, Tensor]:
    """Return one value per head: shares, and means of the curves over the visible distances."""
    return {
        "additive_share": layer.additive_share,
        "distance_share": layer.distance_share,
        "key_share": layer.key_share,
        "key_constancy": layer.key_constancy,
        "key_rank_correlation": layer.rank_correlation[:, layer.within].mean(-1),
        "drift": layer.drift[:, layer.within].mean(-1),
        "shape_drift": layer.shape_drift[:, layer.within].mean(-1),
        "logit_rank_correlation": layer.logit_rank_correlation[:, layer.within].mean(-1),
    }
