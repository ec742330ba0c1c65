"""The decomposition of one captured layer: reads mask and biases off it and fits what applies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measure.axes.fit import AxesFit, Method, fit_axes


def fit_layer(attention: LayerAttention, *, skip: int = 0, min_distance: int = 0, method: Method = "auto") -> AxesFit:
    """Decompose the logits of a captured layer, exactly as they enter softmax.

    Args:
        attention: One layer of a pass over one text without cache.
        skip: Leave out the first keys.
        min_distance: Leave out smaller distances.
        method: As for :func:`fit_axes`.

    Raises:
        MeasureError: If the mask is no causal band, or the tensors cannot be fitted.
    """
    if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for {attention.n} "
            "queries: decompose one text at a time, without a cache"
        )
    return fit_axes(
        attention.rot_q[0],
        attention.rot_k[0],
        scale=attention.scale,
        softcap=attention.softcap,
        window=band_width(attention),
        skip=skip,
        min_distance=min_distance,
        method=method,
        **bias_options(attention),
    )


def band_width(attention: LayerAttention) -> int | None:
    """Number of distances a query sees: the sliding window, or None for all.

    Raises:
        MeasureError: If the queries see something else than the last so many keys.
    """
    if attention.mask.only_causal:
        return None
    rows = _sample(attention.n, attention.mask.device)
    seen = attention.visible(rows)
    width = int(seen[0, 0, -1].sum())
    j = torch.arange(attention.m, device=seen.device)
    band = (j <= rows[:, None]) & (j > rows[:, None] - width)
    right = (seen == band).flatten(0, 1).all(0).all(-1)
    if not bool(right.all()):
        row = int(rows[~right][0])
        raise MeasureError(
            f"layer {attention.layer} does not see the last {width} keys at token {row}: its mask is not a causal "
            "band (chunks, padding or prefixes), which the three axes are not defined on"
        )
    return None if width == attention.m else width


def bias_options(attention: LayerAttention) -> dict[str, Any]:
    """The layer's additive bias in the cheapest form that says it all: by key, by distance, or as a matrix."""
    n = attention.n
    rows = _sample(n, attention.mask.device)
    given = attention.bias(rows)
    if given is None:
        return {}
    heads = attention.heads
    values = given[0].expand(heads, len(rows), attention.m).double()
    by_key = values[:, -1]
    by_distance = by_key.flip(-1)
    distance = rows[:, None] - torch.arange(attention.m, device=rows.device)
    later = distance < 0
    same_key = bool((later | (values == by_key[:, None])).all())
    same_distance = bool((later | (values == by_distance[:, distance.clamp_min(0)])).all())
    if same_key:
        return {"key_bias": by_key} if bool(by_key.any()) else {}
    if same_distance:
        return {"distance_bias": by_distance}
    whole = attention.bias()
    assert whole is not None
    return {"bias": whole[0].expand(heads, n, attention.m)}


def gaussian_like(x: Tensor, *, seed: int) -> Tensor:
    """Independent Gaussian vectors with the norms of ``x`` ``(..., d)``: tokens that have nothing in common."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    matched: Tensor = noise * (x.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return matched


def _sample(n: int, device: torch.device) -> Tensor:
    """A few rows, ascending, first and last among them."""
    rows = {0, 1, n // 5, n // 3, n // 2, (3 * n) // 4, n - 2, n - 1}
    return torch.tensor(sorted(row for row in rows if 0 <= row < n), device=device)
