"""``wherewhat heads``: positional and symbolic scores of every head, with patterns, axes and frequencies."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.axes.measurement import fit_layer
from wherewhat.measures.frequencies.planes import frequency_use, mean_frequency
from wherewhat.measures.measurement import (
    KEYS_MIX,
    Curve,
    DocumentScores,
    LayerScores,
    Measurement,
    Metric,
    Subject,
    option,
)
from wherewhat.measures.patterns import METRICS as PATTERN_METRICS
from wherewhat.measures.patterns import PatternConfig, layer_scores, pattern_statistics
from wherewhat.measures.statistics import correlation, over_documents
from wherewhat.measures.swaps.layer import Swaps, layer_swaps
from wherewhat.measures.swaps.placement import choose_queries, reference_scores
from wherewhat.measures.swaps.scores import LABELS, TAU, label


@dataclass(frozen=True)
class HeadsConfig(PatternConfig):
    """Options of the heads measurement."""

    queries: int = option(16, "number of queries, spread evenly up to the last; 1 is the last alone, 0 all")
    positions: tuple[int, ...] = option((), "positions of the queries instead; negative ones count from the end")
    tau: float = option(TAU, "temperature of the weights of swaps")
    block: int = option(1, "tokens per swapped block")
    skip: int = option(0, "leave the first so many keys where they are (attention sinks)")
    gamma: float = option(0.1, "pure is a score of at least 1 - gamma beside one of at most gamma")
    taus: tuple[float, ...] = option((1e-3, 1e-2, 1e-1), "other temperatures, to show the sensitivity")
    blocks: tuple[int, ...] = option((2, 8, 32), "other block sizes, to show the sensitivity")
    rerun: bool = option(True, "run layers once per swap whose keys are not made token by token; else leave them out")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        if self.queries < 0:
            raise ConfigError(f"queries is {self.queries}: give a number of queries, or 0 for all")
        if any(tau <= 0 for tau in (self.tau, *self.taus)):
            raise ConfigError(f"tau={min((self.tau, *self.taus)):g} must be positive: it divides the weights of swaps")
        if any(block < 1 for block in (self.block, *self.blocks)):
            raise ConfigError(f"block={min((self.block, *self.blocks))}: a block has at least 1 token")
        if not 0 < self.gamma < 0.5:
            raise ConfigError(f"gamma={self.gamma:g} must be between 0 and 0.5")
        if self.skip < 0:
            raise ConfigError(f"skip={self.skip} must not be negative")


METRICS = (
    Metric(
        "s_pos",
        "positional score",
        "",
        "1 where attention stays in its places when two tokens change theirs: the head looks at where.",
    ),
    Metric(
        "s_sym",
        "symbolic score",
        "",
        "1 where attention goes along with the tokens that change places: the head looks at what. Even attention has "
        "both.",
    ),
    Metric("heads_positional", "pure positional heads", "", "Share of heads with a high positional score alone."),
    Metric("heads_symbolic", "pure symbolic heads", "", "Share of heads with a high symbolic score alone."),
    Metric("heads_uniform", "uniform heads", "", "Share of heads with both scores high: their attention is even."),
    Metric("heads_mixed", "mixed heads", "", "Share of all other heads."),
    Metric(
        "s_pos_logits",
        "positional, of logits",
        "",
        "The positional score from logits and all pairs alike: no softmax, no temperature.",
    ),
    Metric("s_sym_logits", "symbolic, of logits", "", "The symbolic score from logits and all pairs alike."),
    Metric(
        "exclusion",
        "exclusion",
        "",
        "Squared deviations from both over the variance of logits, smallest over queries: never below 1.",
    ),
    Metric("corr_pos_sym", "positional ~ symbolic", "", "Correlation of the two scores over heads."),
    Metric(
        "mean_frequency",
        "mean frequency ID",
        "",
        "Mean rank of the RoPE planes a head uses, weighted by its largest logit from each: 1 turns fastest.",
        "mean_frequency_even",
        "even use",
    ),
    Metric("corr_pos_frequency", "positional ~ frequency", "", "Correlation over heads with the mean frequency ID."),
    Metric("corr_sym_frequency", "symbolic ~ frequency", "", "Correlation over heads with the mean frequency ID."),
    Metric("r", "r of three axes", "", "Correlation of logits with a[i-j] + b[i] + c[j]; see the axes measurement."),
    Metric("r_a", "distance alone", "", "Correlation of logits with a distance curve alone."),
    Metric("r_c", "key alone", "", "Correlation of logits with a key term alone."),
    Metric(
        "corr_pos_distance",
        "positional ~ distance",
        "",
        "Correlation over heads: do positional heads have logits made of distance.",
    ),
    Metric(
        "corr_sym_key",
        "symbolic ~ key",
        "",
        "Correlation over heads: do symbolic heads have logits made of a key term.",
    ),
    Metric("corr_pos_r", "positional ~ r", "", "Correlation over heads of the positional score with r."),
    Metric("rerun", "layers run again", "", "Share of layers whose keys are not made token by token."),
    *PATTERN_METRICS,
)

LIMITS = (
    "Scores are of swaps of two tokens at the chosen queries of these texts: another text, another query, larger "
    "blocks or another temperature (stored as curves) give other numbers. With a small temperature the weights of "
    "swaps fall on the pairs with the largest difference in attention, so a head with a sink is judged by what happens "
    "when the sink is swapped away (leave it in place with skip=1). Intervals of a head's scores are Student's "
    "over the means of documents; those of a single document are over its queries, and say nothing of other texts. "
    "Attention on a kind of token is not yet what the head does to the output."
)


PAIRS = {
    "corr_pos_sym": ("s_pos", "s_sym"),
    "corr_pos_frequency": ("s_pos", "mean_frequency"),
    "corr_sym_frequency": ("s_sym", "mean_frequency"),
    "corr_pos_distance": ("s_pos", "r_a"),
    "corr_sym_key": ("s_sym", "r_c"),
    "corr_pos_r": ("s_pos", "r"),
}
"""Correlations over heads, by name."""


def relations(layers: Sequence[LayerScores]) -> Mapping[str, float]:
    """The correlations over all heads of a model, those that are defined."""
    found: dict[str, float] = {}
    for name, (first, second) in PAIRS.items():
        both = [layer for layer in layers if first in layer.heads and second in layer.heads]
        if both:
            value = correlation(*(torch.cat([layer.heads[m].cpu() for layer in both]) for m in (first, second)))
            if not math.isnan(value):
                found[name] = value
    return found


def _measure(subject: Subject, ids: Tensor, config: HeadsConfig) -> DocumentScores:
    queries = choose_queries(ids.shape[1], count=config.queries, positions=config.positions)
    mixing = subject.key_mixing()
    found: dict[int, LayerScores] = {}

    def look(attention: LayerAttention) -> None:
        swaps = None
        if mixing.get(attention.layer, 0.0) <= KEYS_MIX:
            swaps = layer_swaps(
                attention,
                _seen(attention, queries, config),
                tau=config.tau,
                block=config.block,
                skip=config.skip,
                taus=config.taus,
                blocks=config.blocks,
            )
        found[attention.layer] = _layer(attention, ids[0], queries, swaps, config)

    subject.run(ids, look)
    mixed = [layer for layer in found if mixing.get(layer, 0.0) > KEYS_MIX]
    if mixed and config.rerun:
        with subject.blocks(ids) as again:
            for layer in mixed:
                before = again.run(layer, again.hidden(layer))
                scores = reference_scores(
                    before,
                    functools.partial(again.swapped, layer, block=config.block),
                    _seen(before, queries, config),
                    tau=config.tau,
                    block=config.block,
                    skip=config.skip,
                )
                found[layer] = _with_scores(found[layer], *scores, config)
    layers = list(found.values())
    return DocumentScores(layers, relations(layers))


def _seen(attention: LayerAttention, queries: list[int], config: HeadsConfig) -> list[int]:
    """Chosen queries that see two blocks at least; those given by position must, and are refused otherwise."""
    if config.positions or len(queries) == 1:
        return queries
    least = 2 * config.block + config.skip
    enough = [query for query in queries if query >= least]
    if not enough:
        raise MeasureError(
            f"block={config.block} and skip={config.skip} leave no query with two blocks before it in {attention.n} "
            "tokens: use smaller ones, or more tokens"
        )
    return enough


def _layer(
    attention: LayerAttention, ids: Tensor, queries: list[int], swaps: Swaps | None, config: HeadsConfig
) -> LayerScores:
    heads, whole, curves = layer_scores(pattern_statistics(attention, ids, config))
    try:
        fit = fit_layer(attention)
    except MeasureError:  # a mask that is no causal band has no three axes; the rest still means something
        pass
    else:
        heads |= {"r": fit.r, "r_behaviour": fit.r_behaviour, "r_a": fit.r_subset["a"], "r_c": fit.r_subset["c"]}
    if attention.rotation is not None:
        use = frequency_use(attention, queries)
        heads["mean_frequency"] = mean_frequency(use, attention.rotation.inv_freq)
        whole["mean_frequency_even"] = (attention.rotation.planes + 1) / 2
        curves["frequency_use"] = Curve(use.float(), ("head", "plane"))
    scores = LayerScores(
        layer=attention.layer,
        heads={name: values.cpu() for name, values in heads.items()},
        whole=whole | {"rerun": float(swaps is None)},
        curves=curves,
    )
    if swaps is None:
        return scores
    sensitivity = {
        f"{name}_by_{what}": Curve(values[index].float(), ("head", what))
        for what, values in (("tau", swaps.by_tau), ("block", swaps.by_block))
        for index, name in enumerate(("s_pos", "s_sym"))
    }
    from_logits = {
        "s_pos_logits": swaps.s_pos_logits.mean(1),
        "s_sym_logits": swaps.s_sym_logits.mean(1),
        "exclusion": swaps.exclusion.amin(1).clamp_max(1e6),  # infinite for constant logits, which a table cannot hold
    }
    scores = LayerScores(scores.layer, {**from_logits, **scores.heads}, scores.whole, {**sensitivity, **scores.curves})
    return _with_scores(scores, swaps.s_pos, swaps.s_sym, config)


def _with_scores(layer: LayerScores, s_pos: Tensor, s_sym: Tensor, config: HeadsConfig) -> LayerScores:
    """The layer's numbers with swap scores ``(heads, queries)``, their intervals and labels."""
    heads = _summary(s_pos[:, None], s_sym[:, None], config.gamma)
    curves = {
        "s_pos_by_query": Curve(s_pos.float(), ("head", "query")),
        "s_sym_by_query": Curve(s_sym.float(), ("head", "query")),
    }
    shares = _shares(heads["s_pos"], heads["s_sym"], config.gamma)
    return LayerScores(layer.layer, {**heads, **layer.heads}, {**layer.whole, **shares}, {**layer.curves, **curves})


def _summary(s_pos: Tensor, s_sym: Tensor, gamma: float) -> dict[str, Tensor]:
    """Means over documents and queries of scores ``(heads, documents, queries)``, with intervals and labels."""
    heads = {}
    for name, values in (("s_pos", s_pos), ("s_sym", s_sym)):
        bounds = over_documents(values).clamp(0, 1)
        heads[name] = values.double().nanmean(-1).nanmean(-1)
        heads[f"{name}_low"], heads[f"{name}_high"] = bounds.unbind(-1)
    heads["label"] = label(heads["s_pos"], heads["s_sym"], gamma).double()
    return heads


def _shares(s_pos: Tensor, s_sym: Tensor, gamma: float) -> dict[str, float]:
    """Share of heads with each label, and of pure ones with half of γ."""
    codes, strict = label(s_pos, s_sym, gamma), label(s_pos, s_sym, gamma / 2)
    found = {f"heads_{name}": float((codes == code).double().mean()) for code, name in enumerate(LABELS)}
    for name in ("positional", "symbolic"):
        found[f"heads_{name}_strict"] = float((strict == LABELS.index(name)).double().mean())
    return found


def _together(documents: Sequence[DocumentScores], config: HeadsConfig) -> DocumentScores:
    """Means, intervals and labels of every head over all documents, each of which counts once."""
    layers = []
    for same in zip(*(document.layers for document in documents), strict=True):
        if any("s_pos_by_query" not in layer.curves for layer in same):
            continue
        s_pos, s_sym = (
            torch.stack([layer.curves[f"{name}_by_query"].values for layer in same], 1) for name in ("s_pos", "s_sym")
        )
        heads = _summary(s_pos, s_sym, config.gamma)
        layers.append(LayerScores(same[0].layer, {f"{name}_together": values for name, values in heads.items()}))
    return DocumentScores(layers)


HEADS = Measurement(
    name="heads",
    revision=3,
    summary="Whether every head is positional or symbolic, beside the other things that say what it does.",
    config=HeadsConfig,
    measure=_measure,
    combine=_together,
    metrics=METRICS,
    limits=LIMITS,
)
