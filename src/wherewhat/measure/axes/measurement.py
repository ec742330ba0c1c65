"""``wherewhat axes``: the three-axis decomposition of every head, with its controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError
from wherewhat.measure.attention import effective_rank
from wherewhat.measure.axes.fit import Method
from wherewhat.measure.axes.layer import fit_layer, gaussian_like
from wherewhat.measure.axes.shared import shared_curve
from wherewhat.measure.axes.solve import SUBSETS
from wherewhat.measure.base import Curve, DocumentScores, LayerScores, Measurement, Metric, option, per_layer


@dataclass(frozen=True)
class AxesConfig:
    """Options of the decomposition."""

    skip: int = option(0, "leave out the first so many keys (attention sinks)")
    min_distance: int = option(0, "leave out smaller distances")
    method: Method = option("auto", "linear, blocked, or auto for the faster one that applies")
    curves: bool = option(True, "store the curves a, b and c of every head")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.skip < 0 or self.min_distance < 0:
            raise ConfigError(f"skip={self.skip} and min_distance={self.min_distance} must not be negative")


def _scores(attention: LayerAttention, config: AxesConfig) -> LayerScores:
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


def shared(documents: Sequence[DocumentScores], _: AxesConfig) -> DocumentScores:
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


AXES = Measurement(
    name="axes",
    revision=2,
    summary="How much of every head's logits is a sum of a distance, a query and a key term.",
    config=AxesConfig,
    measure=per_layer(_scores, pooled),
    pooled=pooled,
    twins=("random", "shuffled"),
    combine=shared,
    metrics=(
        Metric(
            "r",
            "r",
            "",
            "Correlation of logits with a[i-j] + b[i] + c[j], mean over heads; noise alone reaches the control.",
            "noise_floor",
            "noise floor",
        ),
        Metric(
            "pooled_r",
            "pooled r",
            "",
            "The same over all heads' logits at once, as papers report it; differences between heads help it.",
        ),
        Metric(
            "r_behaviour",
            "r of behaviour",
            "",
            "The same without the query term, which softmax cancels: what of the attention pattern is additive.",
            "r_behaviour_gaussian",
            "Gaussian q, k",
        ),
        Metric(
            "r_shared",
            "r, one curve for all",
            "",
            "r with one distance curve per head for all documents; if it keeps r, where belongs to the head.",
            "r_separate",
            "own curves",
        ),
        Metric("r_a", "distance alone", "", "Correlation with a distance curve alone: where."),
        Metric("r_c", "key alone", "", "Correlation with a key term alone: what is attended to by all alike."),
        Metric("r_bc", "query + key", "", "Correlation with query and key terms, without distance."),
        Metric("unique_a", "unique: distance", "", "Share of variance only the distance term explains."),
        Metric("unique_c", "unique: key", "", "Share of variance only the key term explains."),
        Metric("q_rank", "rank of q", "", "Directions the queries use; near 1, additivity is trivial."),
        Metric("k_rank", "rank of k", "", "Directions the keys use; near 1, additivity is trivial."),
    ),
    limits=(
        "A high r alone does not show that anything was learned: a random deep model makes all tokens alike, and alike "
        "tokens are additive. Read it beside the twins, the ranks and r of behaviour. r says how much of the logits' "
        "variance is additive, not how much the rest matters to the model."
    ),
)
