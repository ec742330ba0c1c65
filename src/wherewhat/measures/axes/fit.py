"""Fit logits by ``a[i-j] + b[i] + c[j]``: tensors, captured layers, and one distance curve for many documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes import HIGH_R, AxesConfig, Method
from wherewhat.measures.axes.margins import Logits, bilinear_margins, blocked_margins, centre, has_kernels
from wherewhat.measures.axes.solver import SUBSETS, Band, Margins, SubsetFits, distance_error, fit_subsets
from wherewhat.measures.graphs import launched
from wherewhat.measures.tensors import by_text, check_heads, check_single_text, scores_by_text, token_ranks
from wherewhat.numerics import computing_device, has_triton
from wherewhat.options import short_repr
from wherewhat.scores import Column, Scores

_RECORDED = 2**26
"""Entries of q above which copying q and k into a CUDA graph takes about as long as the launches that it saves."""


@dataclass(frozen=True)
class AxesFit:
    """The additive decomposition of a layer's logits, one entry per head.

    The curves are in the canonical gauge: c has zero mean and zero slope over keys, b zero mean, a takes the rest.

    Attributes:
        r: Correlation of fitted and true logits, √(1 − SSE/TSS), ``(heads,)``. NaN where the logits are constant.
        r_subset: The same for every subset of the axes, from ``"a"`` to ``"abc"``.
        r_behaviour: √(1 − SSE_abc / SSE_b), ``(heads,)``: r without b, which cancels in softmax. NaN where the logits
            are a query term alone.
        noise_floor: r of pure noise.
        adjusted_r2: R² corrected for the number of parameters, ``(heads,)``.
        own: R² of each axis alone, ``(heads,)`` by axis.
        unique: Decrease of R² without the axis, ``(heads,)`` by axis.
        sse: Sum of squared errors of the full fit, ``(heads,)``.
        tss: Sum of squares around the mean, ``(heads,)``.
        mean: Mean logit, ``(heads,)``.
        a: Distance curve, ``(heads, width)``; entry 0 is the smallest distance used.
        b: Query effects, ``(heads, n)``; entry 0 is the first query that sees a key.
        c: Key effects, ``(heads, n)``; entry 0 is the first key used.
        pairs: Number of (query, key) pairs.
        rank: Number of free parameters.
        method: How the margins were computed.
    """

    r: Tensor
    r_subset: dict[str, Tensor]
    r_behaviour: Tensor
    noise_floor: float
    adjusted_r2: Tensor
    own: dict[str, Tensor]
    unique: dict[str, Tensor]
    sse: Tensor
    tss: Tensor
    mean: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    pairs: int
    rank: int
    method: str

    __repr__ = short_repr


@torch.no_grad()
def fit_axes(
    q: Tensor,
    k: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    window: int | None = None,
    skip: int = 0,
    min_distance: int = 0,
    padding: tuple[int, int] = (0, 0),
    method: Method = "auto",
    block: int = 512,
    check: bool = True,
) -> AxesFit:
    """Fit ``W[i, j] ≈ a[i-j] + b[i] + c[j]`` over the causal pairs, for every subset of the axes.

    Takes tensors: scale, soft-cap, biases, window and padding are ignored unless given, and other masks always.
    :func:`wherewhat.axes` takes a layer and uses its own.

    ``W = softcap(scale · q kᵀ) + biases``, as it enters softmax. Not differentiable.

    Args:
        q: Rotated queries, ``(heads, n, d)``.
        k: Rotated keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        scale: Factor on the dot product.
        softcap: ``softcap · tanh(logit / softcap)``; not bilinear, so time becomes n².
        distance_bias: Bias that depends on distance alone (ALiBi), ``(n,)`` or ``(heads, n)``; in closed form.
        key_bias: Bias that depends on the key alone, ``(n,)`` or ``(heads, n)``; in closed form.
        bias: Any other known bias, broadcastable to ``(heads, n, n)``; time becomes n².
        window: Only distances below this (sliding window).
        skip: Number of first keys to leave out (attention sinks).
        min_distance: Leave out smaller distances.
        padding: Padded tokens to leave out at the left and at the right.
        method: ``linear`` (time n), ``blocked`` (time n²), or the faster of the two that applies.
        block: Rows computed at a time by the blocked method.
        check: Whether to raise an error for logits that are not finite, which waits for a GPU; else r is NaN.
    """
    heads, n = _check(q, k, window, skip, min_distance, padding)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    first_key = padding[0] + skip
    last = n - padding[1]
    queries = slice(first_key + min_distance, last)
    keys = slice(first_key, last - min_distance)
    q, k = q[:, queries], k[:, keys]
    side = q.shape[1]
    width = side if window is None else min(side, window - min_distance)
    bilinear = softcap is None and bias is None
    whole = width == side
    if method == "linear" and not bilinear:
        raise MeasureError("method='linear' needs bilinear logits: leave out softcap and bias, or use 'auto'")
    if method == "auto":
        # Short texts and narrow windows: computing the logits is faster than the sums in linear time without kernels.
        short = min(side, 2 * width) <= 6 * max(64, q.shape[-1]) and not (whole and has_kernels(q))
        method = "linear" if bilinear and not short else "blocked"
    band = Band(side, width, q.device)

    def summed(q: Tensor, k: Tensor) -> tuple[Margins, Tensor]:
        # Known additive terms are kept separate from the sums, where they would cancel and lose precision.
        offset = torch.zeros(heads, sum(band.sizes), dtype=torch.float64, device=q.device)
        by_distance, by_query, by_key = band.unpack(offset)
        if bilinear:
            if method == "linear":
                margins, rows, columns = bilinear_margins(q, k, width, dtype=dtype)
            else:
                grouped = q.to(dtype).contiguous().view(k.shape[0], -1, side, q.shape[-1])
                q, k, rows, columns = centre(grouped, k.to(dtype))
                logits = _logits(q.view(heads, side, -1), k, 1.0, None, None)
                margins = blocked_margins(logits, heads, band, block=block)
            by_query.add_(rows, alpha=scale)
            by_key.add_(columns, alpha=scale)
            margins = Margins(band, margins.sums.mul_(scale), scale**2 * margins.squares)
        else:
            known = None if bias is None else bias.expand(heads, n, n)[:, queries, keys]
            logits = _logits(q.to(dtype), k.to(dtype), scale, softcap, known)
            margins = blocked_margins(logits, heads, band, block=block)
        if distance_bias is not None:
            by_distance += distance_bias[..., min_distance : min_distance + width].to(offset)
        if key_bias is not None:
            by_key += key_bias[..., keys].to(offset)
        return margins, offset

    if not (whole and has_triton(q.device)):
        margins, offset = summed(q, k)
        if check:
            _check_finite(margins.squares.sum(), dtype)
        return fit_margins(margins, offset, method=method)
    from wherewhat.measures.axes.solver_cuda import SCORES, fit_triangle

    def solved(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        margins, offset = summed(q, k)
        return margins.squares.sum(), *fit_triangle(margins.sums, margins.squares, offset)

    # The check is read last: waiting for it before would leave the GPU idle while the solve is launched.
    plain = bilinear and distance_bias is None and key_bias is None
    key = ("axes", scale, method, block) if plain and q.numel() <= _RECORDED else None
    held = 6 * 8 * (q.numel() + k.numel())  # spectra, before and after, are the largest intermediate results
    squares, scores, curves = launched(solved, q, k, key=key, held=held)
    if check:
        _check_finite(squares, dtype)
    return _fit(dict(zip(SCORES, scores, strict=True)), *curves, band=band, method=method)


def _check_finite(squares: Tensor, dtype: torch.dtype) -> None:
    if not math.isfinite(float(squares)):
        raise MeasureError(f"the logits are not finite: q or k hold NaN or Inf, or overflow {dtype}")


def fit_margins(margins: Margins, offset: Tensor, *, method: str) -> AxesFit:
    """Fit a matrix given by its margins plus known additive terms, packed ``(heads, size)``."""
    band = margins.band
    if band.width == band.n and has_triton(band.device):
        from wherewhat.measures.axes.solver_cuda import SCORES, fit_triangle

        scores, curves = fit_triangle(margins.sums, margins.squares, offset)
        return _fit(dict(zip(SCORES, scores, strict=True)), *curves, band=band, method=method)
    fits = fit_subsets(margins, offset)
    return _fit(_scores(fits, band), *canonical(*fits.terms), band=band, method=method)


def _scores(fits: SubsetFits, band: Band) -> dict[str, Tensor]:
    """Return the scores of a fit by name, ``(heads,)`` each."""
    sse, tss = fits.sse, fits.tss
    # For constant logits, rounding leaves a TSS of about 1e-14 of the squares of the summands.
    varies = tss > 1e-12 * fits.reach.clamp_min(1e-300)
    shares = torch.where(varies, 1 - sse / tss.clamp_min(1e-300), torch.nan).clamp_(0, 1)
    share = dict(zip(SUBSETS, shares, strict=True))
    whole, query = sse[SUBSETS.index("abc")], sse[SUBSETS.index("b")]
    left = varies & (query > 1e-12 * fits.reach)  # else only rounding is left beside a query term
    others = {"a": "bc", "b": "ac", "c": "ab"}
    return {
        **{f"r_{subset}": r for subset, r in zip(SUBSETS, shares.sqrt(), strict=True)},
        **{f"own_{axis}": share[axis] for axis in others},
        **{f"unique_{axis}": (share["abc"] - share[other]).clamp_min(0) for axis, other in others.items()},
        "r_behaviour": torch.where(left, 1 - whole / query.clamp_min(1e-300), torch.nan).clamp_(0, 1).sqrt_(),
        "adjusted_r2": 1 - (1 - share["abc"]) * ((band.pairs - 1) / max(1, band.pairs - band.rank)),
        "sse": whole,
        "tss": tss,
        "mean": fits.mean,
    }


def _fit(scores: Mapping[str, Tensor], a: Tensor, b: Tensor, c: Tensor, *, band: Band, method: str) -> AxesFit:
    return AxesFit(
        r=scores["r_abc"],
        r_subset={subset: scores[f"r_{subset}"] for subset in SUBSETS},
        noise_floor=(min(1.0, (band.rank - 1) / max(1, band.pairs - 1))) ** 0.5,
        own={axis: scores[f"own_{axis}"] for axis in "abc"},
        unique={axis: scores[f"unique_{axis}"] for axis in "abc"},
        **{name: scores[name] for name in ("r_behaviour", "adjusted_r2", "sse", "tss", "mean")},
        a=a,
        b=b,
        c=c,
        pairs=band.pairs,
        rank=band.rank,
        method=method,
    )


def canonical(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return terms with the same sum, c of zero mean and zero slope, b of zero mean, and the rest in a."""
    n = c.shape[-1]
    middle = (n - 1) / 2
    centred = torch.arange(n, dtype=c.dtype, device=c.device) - middle
    slope = (c @ centred / centred.square().sum())[..., None]
    mean_b, mean_c = b.mean(-1, keepdim=True), c.mean(-1, keepdim=True)
    # Taking s·j out of c means adding -s·d to a and s·i to b: s·j = s·i - s·d.
    line = slope * centred
    constant = mean_b + mean_c - slope * middle
    return a - line[..., : a.shape[-1]] + constant, b + line - mean_b, c - line - mean_c


def _logits(q: Tensor, k: Tensor, scale: float, softcap: float | None, bias: Tensor | None) -> Logits:
    heads, _, d = q.shape
    groups = heads // k.shape[0]
    centred = softcap is None and bias is None

    def logits(i0: int, i1: int, j0: int, j1: int) -> Tensor:
        block = q[:, i0:i1].reshape(k.shape[0], groups * (i1 - i0), d) @ k[:, j0:j1].mT
        block = block.view(heads, i1 - i0, j1 - j0)
        if centred:
            return block
        block = block * scale
        if softcap is not None:
            block = softcap * torch.tanh(block / softcap)
        if bias is not None:
            block = block + bias[:, i0:i1, j0:j1].to(block.dtype)
        return block.double()  # not centred: in float32 the sums of squares would cancel

    return logits


def _check(
    q: Tensor, k: Tensor, window: int | None, skip: int, min_distance: int, padding: tuple[int, int]
) -> tuple[int, int]:
    check_heads(q, k)
    if q.shape[1:] != k.shape[1:]:
        raise MeasureError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in tokens and dimension")
    if min(skip, min_distance, *padding) < 0:
        raise MeasureError(f"skip={skip}, min_distance={min_distance} and padding={padding} must not be negative")
    n = q.shape[1] - sum(padding) - skip - min_distance
    if n < 4:
        cut = {"skip": skip, "min_distance": min_distance, "padding": sum(padding)}
        less = "".join(f", less {name}={value}" for name, value in cut.items() if value)
        raise MeasureError(f"{q.shape[1]} tokens{less} are too few: at least 4 must be left")
    if window is not None and window - min_distance < 3:
        raise MeasureError(f"window={window} leaves {window - min_distance} distances: at least 3 are needed")
    return q.shape[0], q.shape[1]


@dataclass(frozen=True)
class SharedCurve:
    """Distance curves that all documents share, one per head.

    Attributes:
        a: The curve, ``(heads, width)``.
        r: Correlation of each document's logits with the common curve and its own b and c, ``(documents, heads)``.
        r_separate: The same with each document's own curve, ``(documents, heads)``.
        r_pooled: Correlation over the logits of all documents at once, around their common mean, ``(heads,)``.
    """

    a: Tensor
    r: Tensor
    r_separate: Tensor
    r_pooled: Tensor

    __repr__ = short_repr


def shared_curve(a: Tensor, sse: Tensor, tss: Tensor, mean: Tensor, *, n: int) -> SharedCurve:
    """Fit one ``a`` per head over many documents, with separate ``b`` and ``c`` for each document, exactly.

    Least squares is linear in the logits, and documents of one length have the same normal equations, so the common
    curve is the mean of the separate ones. A document's error increases by the part of ``a_t - a`` that its own b and c
    cannot absorb, which is again a least-squares fit, of a matrix known in closed form.

    Args:
        a: Each document's own curve in the canonical gauge, ``(documents, heads, width)``.
        sse: Each document's sum of squared errors, ``(documents, heads)``.
        tss: Each document's sum of squares around its mean, ``(documents, heads)``.
        mean: Each document's mean logit, ``(documents, heads)``.
        n: Queries (and keys) of every document.
    """
    if a.ndim != 3 or a.shape[0] < 2 or any(x.shape != a.shape[:2] for x in (sse, tss, mean)):
        raise MeasureError(
            f"curves {tuple(a.shape)}, errors {tuple(sse.shape)}, totals {tuple(tss.shape)} and means "
            f"{tuple(mean.shape)} must be of two or more documents and the same heads"
        )
    documents, heads, width = a.shape
    a = a.double()
    common = a.mean(0)
    band = Band(n, width, a.device)
    error = sse.double() + distance_error((a - common).view(-1, width), band).view(documents, heads)
    total = tss.double()
    between = band.pairs * (mean.double() - mean.double().mean(0)).square()
    return SharedCurve(
        a=common,
        r=(1 - error / total).clamp(0, 1).sqrt(),
        r_separate=(1 - sse.double() / total).clamp(0, 1).sqrt(),
        r_pooled=(1 - error.sum(0) / (total + between).sum(0)).clamp(0, 1).sqrt(),
    )


def fit_layer(attention: LayerAttention, *, skip: int = 0, min_distance: int = 0, method: Method = "auto") -> AxesFit:
    """Fit the logits of a captured layer by three axes, exactly as they enter softmax.

    The layer is one of a pass over one text without cache; the options are those of :func:`fit_axes`.
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
        check=False,
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
    bias = attention.bias(rows)
    assert bias is not None
    heads = attention.heads
    values = bias[0].expand(heads, len(rows), attention.m).double()
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
    """Return independent Gaussian vectors with the norms of ``x`` ``(texts, heads, n, d)``, one draw for all texts."""
    generator = torch.Generator(x.device).manual_seed(seed)
    noise = torch.randn(1, *x.shape[1:], generator=generator, device=x.device)
    matched: Tensor = noise * (x.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    return matched


def _sample(n: int, device: torch.device) -> Tensor:
    """Return a few rows, ascending, including the first and the last."""
    rows = {0, 1, n // 5, n // 3, n // 2, (3 * n) // 4, n - 2, n - 1}
    return torch.tensor(sorted(row for row in rows if 0 <= row < n), device=device)


def layer_scores(attention: LayerAttention, config: AxesConfig) -> list[Scores]:
    """Fit every head of a layer; return correlations, shares, ranks and curves of each text."""
    fitted = partial(fit_layer, skip=config.skip, min_distance=config.min_distance, method=config.method)
    merged = attention.merged
    fit = fitted(merged)
    heads: dict[str, Tensor] = {"r": fit.r, "r2": fit.r.square(), "r_behaviour": fit.r_behaviour}
    heads["adjusted_r2"] = fit.adjusted_r2
    heads |= {f"r_{subset}": fit.r_subset[subset] for subset in SUBSETS if subset != "abc"}
    heads |= {f"unique_{axis}": fit.unique[axis] for axis in "abc"}
    heads |= {"sse": fit.sse, "tss": fit.tss, "logit_mean": fit.mean}
    heads["q_rank"], heads["k_rank"] = token_ranks(merged)
    # The control keeps the layer's mask, biases and soft-cap, which contribute to r independently of the tokens.
    noise_layer = replace(
        attention,
        rot_q=gaussian_like(attention.rot_q, seed=attention.layer),
        rot_k=gaussian_like(attention.rot_k, seed=attention.layer + 1_000_000),
    )
    noise = fitted(noise_layer.merged)
    axes = {"a": ("head", "distance"), "b": ("head", "query"), "c": ("head", "key")}
    return scores_by_text(
        attention,
        heads=heads,
        whole={
            "noise_floor": fit.noise_floor,
            "r_gaussian": by_text(noise.r, attention).nanmean(1),
            "r_behaviour_gaussian": by_text(noise.r_behaviour, attention).nanmean(1),
            "pairs": float(fit.pairs),
        },
        curves={name: Column(getattr(fit, name).float(), of) for name, of in axes.items()} if config.curves else {},
    )


def pooled_scores(layers: Sequence[Scores]) -> Mapping[str, float]:
    """Return r over the logits of all heads at once, its baseline, and summaries that do not pool.

    Around one common mean, differences between the means of heads count as explained, though softmax does not see them:
    the baseline is the r of one constant per head. Within heads, logits are around their own head's mean. Pooled
    numbers follow the heads with the largest logits; the median and the share of heads above 0.9 weigh heads equally.
    """
    names = ("r", "sse", "tss", "logit_mean")
    r, sse, tss, mean = (torch.cat([layer.heads[name] for layer in layers]) for name in names)
    pairs = torch.cat([torch.full_like(layer.heads["sse"], layer.whole["pairs"]) for layer in layers])
    grand = (mean * pairs).sum() / pairs.sum()
    between = (pairs * (mean - grand).square()).sum()
    within = tss.sum()
    scores: dict[str, float] = {}
    if float(within + between) > 0:
        scores["pooled_r"] = _root(1 - sse.sum() / (within + between))
        scores["pooled_r_means"] = _root(between / (within + between))
    if float(within) > 0:
        scores["pooled_r_within"] = _root(1 - sse.sum() / within)
    defined = r[r.isfinite()]
    if len(defined):
        scores["r_median"] = float(defined.median())
        scores["heads_high_r"] = float((defined > HIGH_R).double().mean())
    return scores


def _root(share: Tensor) -> float:
    return float(share.clamp(0, 1).sqrt())


_SHARED = {"cpu": 1, "cuda": 2**22}
"""Entries of distance curves up to which layers are fitted at once: a CPU's caches hold one layer."""


def shared_scores(documents: Sequence[Scores]) -> Scores:
    """Return r of every head with one distance curve for all documents, next to r with separate curves."""
    device = computing_device()
    most, layers = _SHARED[device.type], list[Scores]()
    fitted = [
        same
        for same in zip(*(document.layers for document in documents), strict=True)
        if all("a" in layer.curves for layer in same)
    ]
    for _, alike in groupby(fitted, key=_shape):
        group = [*alike]
        step = max(1, most // sum(layer.curves["a"].values.numel() for layer in group[0]))
        for some in (group[start : start + step] for start in range(0, len(group), step)):
            layers += _shared(some, device)
    return Scores(layers=layers)


def _shape(layers: Sequence[Scores]) -> tuple[int, ...]:
    """Return what layers have in common that are fitted at once: heads, distances and queries."""
    return (*layers[0].curves["a"].values.shape, layers[0].curves["b"].values.shape[-1])


def _shared(layers: Sequence[Sequence[Scores]], device: torch.device) -> list[Scores]:
    """Return the shared scores of layers of the same shape, each given by its documents."""

    def joined(name: str) -> Tensor:
        """Return the curves a, or values, of all layers' heads by document."""
        of_documents = [layer for of_document in zip(*layers, strict=True) for layer in of_document]
        values = [layer.curves["a"].values if name == "a" else layer.heads[name] for layer in of_documents]
        joined = torch.cat(values).to(device)
        return joined.view(len(layers[0]), -1, *joined.shape[1:])

    n = layers[0][0].curves["b"].values.shape[-1]
    fit = shared_curve(*map(joined, ("a", "sse", "tss", "logit_mean")), n=n)
    heads = {"r_shared": fit.r.mean(0), "r_shared_pooled": fit.r_pooled, "r_separate": fit.r_separate.mean(0)}
    columns = {name: x.cpu().tensor_split(len(layers)) for name, x in heads.items()}
    curves = fit.a.float().cpu().tensor_split(len(layers))
    return [
        Scores(
            layer=same[0].layer,
            heads={name: x[index] for name, x in columns.items()},
            curves={"shared_a": Column(curves[index], ("head", "distance"))},
        )
        for index, same in enumerate(layers)
    ]
