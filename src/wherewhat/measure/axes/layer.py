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
    last = attention.visible(slice(attention.n - 1, None))[..., 0, :]
    width = int(last.reshape(-1, attention.m)[0].sum())
    for row in _sample(attention.n):
        seen = attention.visible(slice(row, row + 1))[..., 0, :]
        j = torch.arange(attention.m, device=seen.device)
        if not bool((seen == ((j <= row) & (j > row - width))).all()):
            raise MeasureError(
                f"layer {attention.layer} does not see the last {width} keys at token {row}: its mask is not a causal "
                "band (chunks, padding or prefixes), which the three axes are not defined on"
            )
    return None if width == attention.m else width


def bias_options(attention: LayerAttention) -> dict[str, Any]:
    """The layer's additive bias in the cheapest form that says it all: by key, by distance, or as a matrix."""
    n = attention.n
    last = attention.bias(slice(n - 1, n))
    if last is None:
        return {}
    heads = attention.heads
    by_key = last[0, :, 0].expand(heads, -1).double()
    by_distance = by_key.flip(-1)
    same_key = same_distance = True
    for row in _sample(n):
        given = attention.bias(slice(row, row + 1))
        assert given is not None
        values = given[0, :, 0].expand(heads, -1)[:, : row + 1].double()
        same_key &= torch.equal(values, by_key[:, : row + 1])
        same_distance &= torch.equal(values.flip(-1), by_distance[:, : row + 1])
    if same_key:
        return {"key_bias": by_key} if bool(by_key.any()) else {}
    if same_distance:
        return {"distance_bias": by_distance}
    whole = attention.bias()
    assert whole is not None
    return {"bias": whole[0].expand(heads, n, attention.m)}


def gaussian_like(x: Tensor, *, seed: int) -> Tensor:
    """Independent Gaussian vectors with the norms of ``x`` ``(heads, n, d)``: tokens that have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator).to(x.device)
    matched: Tensor = noise * (x.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return matched


def _sample(n: int) -> list[int]:
    """A few rows, first and last among them."""
    return sorted({0, 1, n // 5, n // 3, n // 2, (3 * n) // 4, n - 2, n - 1})
