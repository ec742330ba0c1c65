"""``wherewhat axes``: the three-axis fit of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention.weights import effective_rank
from wherewhat.measures.axes.fit import AxesFit, fit_axes, shared_curve
from wherewhat.measures.axes.measurement import AxesConfig, Method
from wherewhat.measures.axes.solver import SUBSETS
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores


def fit_layer(attention: LayerAttention, *, skip: int = 0, min_distance: int = 0, method: Method = "auto") -> AxesFit:
    """Decompose the logits of a captured layer, exactly as they enter softmax.

    Args:
        attention: One layer of a pass over one text without cache.
        skip: Leave out the first keys.
        min_distance: Leave out smaller distances.
        method: As for :func:`fit_axes`.
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
    """Number of distances a query sees: the sliding window, or None for all."""
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


def layer_scores(attention: LayerAttention, config: AxesConfig) -> LayerScores:
    """Fit every head of a layer and return correlations, shares, ranks and curves."""
    fit = fit_layer(attention, skip=config.skip, min_distance=config.min_distance, method=config.method)
    groups = attention.heads // attention.kv_heads
    heads: dict[str, Tensor] = {"r": fit.r, "r_behaviour": fit.r_behaviour, "adjusted_r2": fit.adjusted_r2}
    heads |= {f"r_{subset}": fit.r_subset[subset] for subset in SUBSETS if subset != "abc"}
    heads |= {f"unique_{axis}": fit.unique[axis] for axis in "abc"}
    heads |= {"sse": fit.sse, "tss": fit.tss, "logit_mean": fit.mean}
    heads["q_rank"] = effective_rank(attention.q[0])
    heads["k_rank"] = effective_rank(attention.k[0]).repeat_interleave(groups)
    # Under the layer's own mask, biases and soft-cap, which have a share in r that no token has.
    noise_layer = replace(
        attention,
        rot_q=gaussian_like(attention.rot_q, seed=attention.layer),
        rot_k=gaussian_like(attention.rot_k, seed=attention.layer + 1_000_000),
    )
    noise = fit_layer(noise_layer, skip=config.skip, min_distance=config.min_distance, method=config.method)
    curves = {"a": ("head", "distance"), "b": ("head", "query"), "c": ("head", "key")}
    return LayerScores(
        layer=attention.layer,
        heads={name: values.cpu() for name, values in heads.items()},
        whole={
            "noise_floor": fit.noise_floor,
            "r_gaussian": float(noise.r.nanmean()),
            "r_behaviour_gaussian": float(noise.r_behaviour.nanmean()),
            "pairs": float(fit.pairs),
        },
        curves={name: Curve(getattr(fit, name).float().cpu(), axes) for name, axes in curves.items()}
        if config.curves
        else {},
    )


def pooled(layers: Sequence[LayerScores]) -> Mapping[str, float]:
    """Correlation over all logits of all heads at once, around one common mean.

    Pooling adds the differences between heads' means to what is explained, so it is larger than the mean over heads.
    """
    sse = torch.cat([layer.heads["sse"] for layer in layers])
    tss = torch.cat([layer.heads["tss"] for layer in layers])
    mean = torch.cat([layer.heads["logit_mean"] for layer in layers])
    pairs = torch.cat([torch.full_like(layer.heads["sse"], layer.whole["pairs"]) for layer in layers])
    grand = (mean * pairs).sum() / pairs.sum()
    total = (tss + pairs * (mean - grand).square()).sum()
    return {"pooled_r": float((1 - sse.sum() / total).clamp_min(0).sqrt())} if float(total) > 0 else {}


def shared(documents: Sequence[DocumentScores]) -> DocumentScores:
    """One distance curve per head over all documents: what r keeps of it says whether *where* belongs to the head."""
    layers = []
    for same in zip(*(document.layers for document in documents), strict=True):
        if any("a" not in layer.curves for layer in same):
            continue
        found = shared_curve(
            torch.stack([layer.curves["a"].values for layer in same]),
            *(torch.stack([layer.heads[name] for layer in same]) for name in ("sse", "tss", "logit_mean")),
            n=same[0].curves["b"].values.shape[-1],
        )
        heads = {"r_shared": found.r.mean(0), "r_shared_pooled": found.r_pooled, "r_separate": found.r_separate.mean(0)}
        curve = Curve(found.a.float(), ("head", "distance"))
        layers.append(LayerScores(same[0].layer, heads, curves={"shared_a": curve}))
    return DocumentScores(layers)
