"""Controlled distance: logits recomputed at dummy distances, as ``f(q, d) + g(q, k)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.distance import DistanceConfig
from wherewhat.measures.tensors import centred_ranks, check_finite, check_heads, on_host, rotates, scores_by_text
from wherewhat.numerics import constant_tensor
from wherewhat.options import short_repr
from wherewhat.scores import Column, Scores


def turn(x: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every plane of ``x`` ``(..., d)`` by its angle at ``positions`` ``(...)``, without scaling; float64.

    The angle is a float64 product, unlike in the model: float32 is not precise enough at distances far beyond the text.
    """
    return turn_planes(x, positions.double()[..., None] * rotation.frequencies(positions.device).double(), rotation)


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
        k: Keys, ``(..., kv_heads, m, d)``, of texts that all get the same phases. Dimensions that are not rotated are
            unchanged.
        rotation: Dimensions of the planes.
        keep_mean: Rotate only deviations from the mean key.
        seed: Seed of the phases.
    """
    mean = k.double().mean(-2, keepdim=True) if keep_mean else torch.zeros_like(k[..., :1, :], dtype=torch.float64)
    shape = (*k.shape[-3:-1], rotation.planes)
    drawn = (_kept_phases if math.prod(shape) <= _MOST_KEPT else _phases)(shape, seed, k.device)
    return mean + turn_planes(k - mean, drawn, rotation)


_MOST_KEPT = 2**22
"""Largest number of phases that are kept: layers of one shape have the same."""


def _phases(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Return phases drawn on the CPU, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=generator, dtype=torch.float64) * (2 * math.pi)).to(device)


_kept_phases = lru_cache(maxsize=2)(torch.inference_mode(False)(_phases))


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
    own = chosen.to(q.device) + (m - n)
    shown = torch.arange(m, device=q.device) <= own[:, None] if visible is None else visible.to(q.device)
    _check_seen(chosen.tolist(), shown, kept)
    places = torch.arange(m, device=q.device) if positions is None else positions.to(q.device)
    table = QueryTable.of(
        q[:, chosen.to(q.device)],
        rotation,
        distances=torch.cat([grid.new_tensor([reference]), grid]),
        kept=torch.cat([kept.new_zeros(1), kept]),
        visible=shown,
        places=places,
        own=own,
        scale=scale,
        kv_heads=k.shape[0],
    )
    numbers = _averaged(table.numbers(k, block_mib))
    own_distances = {name: x if x.ndim == 1 else x[:, 1:] for name, x in numbers.items()}
    return ControlledDistance(
        distances=grid.cpu(), within=kept.cpu(), **{name: x.cpu() for name, x in own_distances.items()}
    )


_CACHE_MIB, _GPU_MIB = 8, 2048
"""Largest block of profiles on a CPU, where caches are small, and smallest on a GPU, where launches take time."""

_COPIES = 6
"""Tensors of the size of the profiles that exist at a time."""


@dataclass(frozen=True)
class QueryTable:
    """Queries at all dummy distances and at their own positions, to be multiplied by keys; all float64.

    Attributes:
        turned: Scaled queries rotated to every distance, ``(kv_heads, queries, groups, distances, d)``. The profile at
            the first distance is the reference of rank correlations.
        rotated: Scaled queries rotated to their own positions, ``(kv_heads, queries, groups, d)``.
        kept: 1 for distances that the shares are over, else 0, ``(distances,)``.
        visible: True where a query sees a key, ``(queries, m)``.
        places: Positions of the keys, counted from the first, ``(m,)``.
        rotation: The rotation.
    """

    turned: Tensor
    rotated: Tensor
    kept: Tensor
    visible: Tensor
    places: Tensor
    rotation: Rotation

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        q: Tensor,
        rotation: Rotation,
        *,
        distances: Tensor,
        kept: Tensor,
        visible: Tensor,
        places: Tensor,
        own: Tensor,
        scale: float,
        kv_heads: int,
    ) -> QueryTable:
        """Return the table of queries ``(heads, queries, d)`` before rotation, whose positions are ``places[own]``."""
        q = torch.unflatten(scale_queries(q, rotation, scale), 0, (kv_heads, -1)).transpose(1, 2)
        places = places.double() - places[0].double()
        return cls(
            turned=turn(q[..., None, :], distances, rotation),
            rotated=turn(q, places[own][:, None], rotation),
            kept=kept.double(),
            visible=visible,
            places=places,
            rotation=rotation,
        )

    def numbers(self, k: Tensor, block_mib: int) -> dict[str, Tensor]:
        """Return the values of each query, ``(kv_heads, queries, groups)``, most with a last dimension of distances.

        Args:
            k: Keys before rotation, ``(kv_heads, m, d)``.
            block_mib: Memory for a block of profiles.
        """
        kv_heads, count, groups, distances = self.turned.shape[:4]
        limit = min(block_mib, _CACHE_MIB) if k.device.type == "cpu" else max(block_mib, _GPU_MIB)
        profiles = max(1, limit * 2**20 // (8 * _COPIES * groups * k.shape[1]))  # of all groups
        heads = max(1, profiles // (count * distances))
        queries = max(1, profiles // distances)
        keys = _Keys.of(k, self)
        parts = [
            _joined(
                [
                    self._block(keys, slice(h, h + heads), slice(i, i + queries), min(profiles, distances))
                    for i in range(0, count, queries)
                ],
                1,
            )
            for h in range(0, kv_heads, heads)
        ]
        return _joined(parts, 0)

    def _block(self, keys: _Keys, heads: slice, queries: slice, step: int) -> dict[str, Tensor]:
        """Return the values of some heads and queries, with ``step`` distances at a time."""
        visible = self.visible[queries]
        shown = _span(visible)
        visible = visible[:, shown]
        weights = visible.double()
        counts = weights.sum(-1)[:, None]  # (queries, 1)
        turned, rotated = self.turned[heads, queries], self.rotated[heads, queries]
        centred, offset = keys.centred[heads, shown], keys.offsets[heads, queries]
        mask = visible[:, None, None]

        def profile(rows: Tensor) -> Tensor:
            """Return key profiles ``(heads, queries, groups, rows, m)`` of rotated queries, 0 for hidden keys."""
            products = (rows.flatten(1, 3) @ centred.mT).view(*rows.shape[:-1], -1)
            around = rows.flatten(2, 3) @ offset[..., None]  # the mean over visible keys
            return products.sub_(around.view(*rows.shape[:-1], 1)).mul_(weights[:, None, None])

        # The distance curve at the real distances is a sum of waves over the keys, one for each plane.
        waves = self._waves(keys.mean[heads, None], rotated, shown), self._waves(offset, rotated, shown)
        product = (rotated.flatten(1, 2) @ keys.rotated[heads, shown].mT).view(*rotated.shape[:-1], -1)
        targets = torch.stack([product - waves[1], product + waves[0]], -2)  # key component and logits
        targets -= ((targets * weights[:, None, None]).sum(-1) / counts[..., None])[..., None]
        targets *= weights[:, None, None]
        sizes = targets.norm(dim=-1)  # (heads, queries, groups, 2)

        number = self.kept.sum()
        mean = (turned * (self.kept / number)[:, None]).sum(-2, keepdim=True)
        mean_profile = profile(mean)
        by_key = number * mean_profile.square().sum((-1, -2))
        interaction = torch.zeros_like(by_key)
        parts: list[dict[str, Tensor]] = []
        target_ranks = centred_ranks(targets, mask)
        for start in range(0, turned.shape[3], step):
            some = profile(turned[:, :, :, start : start + step])
            interaction += (some - mean_profile).norm(dim=-1).square() @ self.kept[start : start + step]
            ranks = centred_ranks(some, mask)
            if not start:
                target_ranks = torch.cat([target_ranks, ranks[..., :1, :]], -2)
            correlations = _cosines(ranks, target_ranks)
            parts.append(
                {
                    "drift": _relative(some - targets[..., :1, :], sizes[..., :1]),
                    "shape_drift": 1 - _cosines(some, targets[..., :1, :])[..., 0].square(),
                    "rank_correlation": correlations[..., 0],
                    "logit_drift": _relative(some - targets[..., 1:, :], sizes[..., 1:]),
                    "logit_rank_correlation": correlations[..., 1],
                    "rank_correlation_reference": correlations[..., 2],
                }
            )
        mean_keys = keys.mean[heads, None] + offset
        curve = (turned.flatten(2, 3) @ mean_keys[..., None]).view(turned.shape[:-1])
        mean_curve = (curve @ self.kept / number)[..., None]
        by_distance = counts * ((curve - mean_curve).square() @ self.kept)
        # Rounding errors of a constant table.
        energy = keys.energy[heads, queries, None]
        least = 1e-24 * number * rotated.square().sum(-1) * energy
        shares = _shares(by_key, by_distance, interaction, least)
        return shares | {"curve": curve} | _joined(parts, -1)

    def _waves(self, means: Tensor, rotated: Tensor, shown: slice) -> Tensor:
        """Return logits with mean keys at the places of all keys, less a constant, ``(heads, queries, groups, m)``.

        Args:
            means: Mean keys before rotation, ``(heads, queries or 1, d)``.
            rotated: Queries, ``(heads, queries, groups, d)``.
            shown: The keys.
        """
        left, right = self.rotation.halves
        angles = self.places[shown, None] * self.rotation.frequencies(self.places.device).double()
        u, v = rotated[..., left], rotated[..., right]
        x, y = means[:, :, None, left], means[:, :, None, right]
        by_plane = torch.cat([u * x + v * y, v * x - u * y], -1)
        return by_plane @ torch.cat([angles.cos(), angles.sin()], -1).mT


@dataclass(frozen=True)
class _Keys:
    """Keys of a layer around their mean.

    Attributes:
        centred: Keys minus their mean over all tokens, ``(kv_heads, m, d)``.
        rotated: The same rotated to their own positions, ``(kv_heads, m, d)``.
        mean: The mean, ``(kv_heads, d)``.
        offsets: Mean of the keys that each query sees, minus ``mean``, ``(kv_heads, queries, d)``.
        energy: Sum of squares of the keys that each query sees, ``(kv_heads, queries)``.
    """

    centred: Tensor
    rotated: Tensor
    mean: Tensor
    offsets: Tensor
    energy: Tensor

    @classmethod
    def of(cls, k: Tensor, table: QueryTable) -> _Keys:
        """Return the keys ``(kv_heads, m, d)`` of a table of queries."""
        k = k.double()
        weights = table.visible.double()
        # Around the mean of all keys, the mean of those that a query sees is small: subtracting it is precise.
        mean = k.mean(1)
        centred = k - mean[:, None]
        offsets = (weights / weights.sum(-1, keepdim=True)) @ centred
        rotated = turn(centred, table.places, table.rotation)
        return cls(centred, rotated, mean, offsets, k.square().sum(-1) @ weights.mT)


def _span(visible: Tensor) -> slice:
    """Return the keys from the first to the last that a query sees; on a GPU all, since reading would wait for it."""
    if visible.device.type != "cpu":
        return slice(None)
    seen = visible.any(0).nonzero()
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _shares(by_key: Tensor, by_distance: Tensor, interaction: Tensor, least: Tensor) -> dict[str, Tensor]:
    """Return shares of the two-way table's variance from the sums of squares of its terms.

    With L the profiles and L̄ their mean over distances, the squares of the key term are D · Σ_k L̄², of the interaction
    Σ_d Σ_k (L_d − L̄)², and of the distance term m · Σ_d (f_d − f̄)². All three are sums of squares, without
    cancellation. Shares of a table whose squares are at most ``least`` are NaN.
    """
    total = interaction + by_key + by_distance
    divided = torch.where(total > least, total, torch.nan)
    return {
        "additive_share": (by_key + by_distance) / divided,
        "distance_share": by_distance / divided,
        "key_share": by_key / divided,
        "key_constancy": by_key / torch.where(by_key + interaction > least, by_key + interaction, torch.nan),
    }


def _averaged(numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return means over queries and the spread of the additive share, ``(heads,)`` or ``(heads, distances)``."""
    by_head = {name: x.transpose(1, 2).flatten(0, 1) for name, x in numbers.items()}  # (heads, queries, …)
    means = {name: x.nanmean(1) for name, x in by_head.items()}
    return means | {"additive_share_spread": nan_deviation(by_head["additive_share"].mT)}


def _joined(parts: Sequence[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Return tensors by name, concatenated along a dimension."""
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]} if len(parts) > 1 else parts[0]


def _cosines(x: Tensor, y: Tensor) -> Tensor:
    """Return cosines ``(..., rows, others)`` of rows of ``x`` ``(..., rows, m)`` and ``y`` ``(..., others, m)``."""
    norms = x.norm(dim=-1)[..., None] * y.norm(dim=-1)[..., None, :]
    return torch.where(norms > 0, ((x @ y.mT) / norms).clamp(-1, 1), torch.nan)


def _relative(difference: Tensor, size: Tensor) -> Tensor:
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


def layer_scores(attention: LayerAttention, config: DistanceConfig) -> list[Scores]:
    """Return scores and curves of each text of one layer; none if it does not rotate."""
    if attention.n < FEWEST_TOKENS:
        raise MeasureError(f"the text has {attention.n} tokens: at least {FEWEST_TOKENS} are needed for distances")
    if not rotates(attention):
        return []
    rotation = attention.rotation
    assert rotation is not None
    merged = attention.merged
    device = merged.rot_q.device
    positions = on_host(attention.positions)
    reach = float(positions.max() - positions.min())
    grid = distance_grid(reach, per_octave=config.per_octave, beyond=config.beyond)
    distances = constant_tensor(tuple(grid), device).double()
    queries = spaced_queries(attention.n, config.queries)
    chosen = constant_tensor(tuple(queries), device)
    own = chosen + (attention.m - attention.n)
    visible = merged.visible(chosen.to(merged.mask.device))[0].any(0).to(device)
    places = merged.positions.to(device)
    apart = (places[own][:, None] - places).double()
    kept = distances <= torch.where(visible, apart, -torch.inf).max()
    if not merged.mask.only_causal:  # reading waits for a GPU, and half of a text is enough otherwise
        _check_seen(queries, visible, kept)
    # The reference is the first distance of the table, unless it is that of the grid.
    added = grid[0] != config.reference
    table = QueryTable.of(
        merged.q[0][:, chosen],
        rotation,
        distances=torch.cat([constant_tensor((config.reference,), device).double(), distances]) if added else distances,
        kept=torch.cat([torch.zeros_like(kept[:1]), kept]) if added else kept,
        visible=visible,
        places=places,
        own=own,
        scale=attention.scale,
        kv_heads=merged.kv_heads,
    )
    keys = merged.k[0]
    by_text = torch.unflatten(keys, 0, (attention.texts, -1))
    scrambled = scramble_phases(by_text, rotation, keep_mean=config.keep_mean, seed=config.seed).flatten(0, 1)
    real, control = (
        {
            name: x[:, 1:] if added and x.ndim == 2 else x
            for name, x in _averaged(table.numbers(k, config.block_mib)).items()
        }
        for k in (keys, scrambled)
    )
    axes = ("head", "distance")
    curves = {name: Column(x, axes) for name, x in real.items() if x.ndim == 2} | {
        "rank_correlation_scrambled": Column(control["rank_correlation"], axes),
        "drift_scrambled": Column(control["drift"], axes),
        "distances": Column(distances, ("distance",)),
        "within": Column(kept, ("distance",)),
    }
    heads = _heads(real, kept) | {"additive_share_spread": real["additive_share_spread"]}
    heads |= {f"{name}_scrambled": values for name, values in _heads(control, kept).items()}
    return scores_by_text(attention, heads=heads, curves=curves)


def _check_seen(queries: Sequence[int], visible: Tensor, kept: Tensor) -> None:
    """Raise an error for a query that sees too few keys, or if there are too few distances among those that it sees."""
    for i, count in zip(queries, visible.sum(-1).tolist(), strict=True):
        if count < FEWEST_KEYS:
            raise MeasureError(f"query {i} sees {count} keys: at least {FEWEST_KEYS} are needed")
    if int(kept.sum()) < 2:
        raise MeasureError(f"{int(kept.sum())} of the distances are within the text: at least 2 are needed")


def _heads(numbers: dict[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """Return one value per head: shares, and means of the curves over the visible distances."""
    weights = kept.double() / kept.sum()
    means = {
        "key_rank_correlation": "rank_correlation",
        "drift": "drift",
        "shape_drift": "shape_drift",
        "logit_rank_correlation": "logit_rank_correlation",
    }
    shares = ("additive_share", "distance_share", "key_share", "key_constancy")
    return {name: numbers[name] for name in shares} | {
        name: torch.where(kept, numbers[curve] * weights, 0.0).sum(-1) for name, curve in means.items()
    }
