"""Three-axis fit of a captured layer: its mask and bias, controls, and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import effective_rank
from wherewhat.measures.axes.fit import AxesFit, fit_axes, shared_curve
from wherewhat.measures.axes.measurement import AxesConfig, Method
from wherewhat.measures.axes.solver import SUBSETS
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores
from wherewhat.measures.tensors import check_single_text, per_query_head


def fit_layer(attention: LayerAttention, *, skip: int = 0, min_distance: int = 0, method: Method = "auto") -> AxesFit:
    """Fit the logits of a captured layer by three axes, exactly as they enter softmax.

    Args:
        attention: One layer of a pass over one text without cache.
        skip: Number of first keys to leave out.
        min_distance: Leave out smaller distances.
        method: As for :func:`fit_axes`.
    """
    check_single_text(attention)
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
    """Return the number of distances that a query sees: the sliding window, or None for all."""
    if attention.mask.only_causal:
        return None
    rows = _sample(attention.n, attention.mask.device)
    visible = attention.visible(rows)
    width = int(visible[0, 0, -1].sum())
    j = torch.arange(attention.m, device=visible.device)
    band = (j <= rows[:, None]) & (j > rows[:, None] - width)
    is_band = (visible == band).flatten(0, 1).all(0).all(-1)
    if not bool(is_band.all()):
        row = int(rows[~is_band][0])
        raise MeasureError(
            f"layer {attention.layer} does not see the last {width} keys at token {row}: its mask is not a causal "
            "band (chunks, padding or prefixes), and the three axes are not defined on other masks"
        )
    return None if width == attention.m else width


def bias_options(attention: LayerAttention) -> dict[str, Any]:
    """Return the layer's additive bias as arguments of :func:`fit_axes`: by key, by distance, or as a matrix."""
    if not attention.mask.added:  # before rows are copied to the device, which would wait for its other work
        return {}
    n = attention.n
    rows = _sample(n, attention.mask.device)
    given = attention.bias(rows)
    assert given is not None
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
    """Return independent Gaussian vectors with the norms of ``x`` ``(..., d)``."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randn(x.shape, generator=generator, device=x.device)
    matched: Tensor = noise * (x.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return matched


def _sample(n: int, device: torch.device) -> Tensor:
    """Return a few rows, ascending, including the first and the last."""
    rows = {0, 1, n // 5, n // 3, n // 2, (3 * n) // 4, n - 2, n - 1}
    return torch.tensor(sorted(row for row in rows if 0 <= row < n), device=device)


def layer_scores(attention: LayerAttention, config: AxesConfig) -> LayerScores:
    """Fit every head of a layer; return correlations, shares, ranks and curves."""
    fit = fit_layer(attention, skip=config.skip, min_distance=config.min_distance, method=config.method)
    heads: dict[str, Tensor] = {"r": fit.r, "r_behaviour": fit.r_behaviour, "adjusted_r2": fit.adjusted_r2}
    heads |= {f"r_{subset}": fit.r_subset[subset] for subset in SUBSETS if subset != "abc"}
    heads |= {f"unique_{axis}": fit.unique[axis] for axis in "abc"}
    heads |= {"sse": fit.sse, "tss": fit.tss, "logit_mean": fit.mean}
    heads["q_rank"] = effective_rank(attention.q[0])
    heads["k_rank"] = per_query_head(effective_rank(attention.k[0]), attention)
    # The control keeps the layer's mask, biases and soft-cap, which contribute to r independently of the tokens.
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


def pooled_scores(layers: Sequence[LayerScores]) -> Mapping[str, float]:
    """Return the correlation over all logits of all heads at once, around one common mean.

    Differences between heads' means count as explained, so it is larger than the mean over heads.
    """
    sse = torch.cat([layer.heads["sse"] for layer in layers])
    tss = torch.cat([layer.heads["tss"] for layer in layers])
    mean = torch.cat([layer.heads["logit_mean"] for layer in layers])
    pairs = torch.cat([torch.full_like(layer.heads["sse"], layer.whole["pairs"]) for layer in layers])
    grand = (mean * pairs).sum() / pairs.sum()
    total = (tss + pairs * (mean - grand).square()).sum()
    return {"pooled_r": float((1 - sse.sum() / total).clamp_min(0).sqrt())} if float(total) > 0 else {}


def shared_scores(documents: Sequence[DocumentScores]) -> DocumentScores:
    """Return r of every head with one distance curve for all documents, next to r with separate curves."""
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
