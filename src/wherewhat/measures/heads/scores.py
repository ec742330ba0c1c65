"""Positional and symbolic scores of every head, with patterns, axes and frequencies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.frequencies.planes import frequency_use, mean_frequency, mean_frequency_softmax
from wherewhat.measures.heads import PAIRS, HeadsConfig
from wherewhat.measures.heads.patterns import layer_scores, pattern_statistics
from wherewhat.measures.measurement import KEYS_MIX, Subject
from wherewhat.measures.swaps import LABELS, SCORE_LABELS, SCORES
from wherewhat.measures.swaps.layer import Swaps, layer_swaps, reference_scores
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.swaps.scores import label, sink_heads
from wherewhat.measures.tensors import correlation, defined, over_documents
from wherewhat.scores import Column, Scores


def head_correlations(layers: Sequence[Scores]) -> Mapping[str, float]:
    """Return the correlations of scores over all heads of a model that are defined."""
    correlations: dict[str, float] = {}
    for name, pair in PAIRS.items():
        both = [layer for layer in layers if all(metric in layer.heads for metric in pair)]
        if both:
            correlations[name] = correlation(
                *(torch.cat([layer.heads[metric].cpu() for layer in both]) for metric in pair)
            )
    return defined(correlations)


def measure_heads(subject: Subject, ids: Tensor, config: HeadsConfig) -> Scores:
    """Return swap scores, patterns, axes and frequencies of every head on one text ``(1, n)``."""
    # Means over queries count each of them once.
    queries = sorted(set(choose_queries(ids.shape[1], count=config.queries, positions=config.positions)))
    mixing = subject.key_mixing()
    by_layer: dict[int, Scores] = {}

    def measure(attention: LayerAttention) -> None:
        swaps = None
        if mixing.get(attention.layer, 0.0) <= KEYS_MIX:
            swaps = layer_swaps(
                attention,
                _scored_queries(attention, queries, config),
                tau=config.tau,
                block=config.block,
                skip=config.skip,
                sink_tokens=config.sink_tokens,
                taus=config.taus,
                blocks=config.blocks,
            )
        by_layer[attention.layer] = _layer(attention, ids[0], queries, swaps, config)

    subject.run(ids, measure)
    mixed = [layer for layer in by_layer if mixing.get(layer, 0.0) > KEYS_MIX]
    if mixed and config.rerun:
        with subject.blocks(ids) as again:
            for layer in mixed:
                before = again.run(layer, again.hidden(layer))
                scores = reference_scores(
                    before,
                    functools.partial(again.swapped, layer, block=config.block),
                    _scored_queries(before, queries, config),
                    tau=config.tau,
                    block=config.block,
                    skip=config.skip,
                    sink_tokens=config.sink_tokens,
                )
                by_layer[layer] = _with_scores(by_layer[layer], *scores, config)
    layers = list(by_layer.values())
    return Scores(layers=layers, whole=head_correlations(layers))


def _scored_queries(attention: LayerAttention, queries: list[int], config: HeadsConfig) -> list[int]:
    """Return the queries with at least two blocks before them; queries given by position are checked later."""
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
) -> Scores:
    heads, whole, curves = layer_scores(pattern_statistics(attention, ids, config))
    try:
        fit = fit_layer(attention)
    except MeasureError:  # the three axes are defined only for a causal band
        pass
    else:
        heads |= {"r": fit.r, "r_behaviour": fit.r_behaviour, "r_a": fit.r_subset["a"], "r_c": fit.r_subset["c"]}
    if attention.rotation is not None:
        use = frequency_use(attention, queries)
        heads["mean_frequency_softmax"] = mean_frequency_softmax(use, attention.rotation.inv_freq)
        heads["mean_frequency"] = mean_frequency(use, attention.rotation.inv_freq)
        whole["mean_frequency_even"] = (attention.rotation.planes + 1) / 2
        curves["frequency_use"] = Column(use.float(), ("head", "plane"))
    heads = {name: values.cpu() for name, values in heads.items()}
    whole["rerun"] = float(swaps is None)
    if swaps is None:
        return Scores(layer=attention.layer, heads=heads, whole=whole, curves=curves)
    sensitivity = {
        f"{name}_by_{what}": Column(values[index].float(), ("head", what))
        for what, values in (("tau", swaps.by_tau), ("block", swaps.by_block))
        for index, name in enumerate(("s_pos", "s_sym"))
    }
    from_logits = {
        "s_pos_logits": swaps.s_pos_logits.mean(1),
        "s_sym_logits": swaps.s_sym_logits.mean(1),
        "exclusion": swaps.exclusion.amin(1).clamp_max(1e6),  # infinite for constant logits; stored values are finite
        "swap_bound": swaps.bound.amax(1),
        "swaps_kept": swaps.kept.mean(1),
    }
    scores = Scores(layer=attention.layer, heads=from_logits | heads, whole=whole, curves=sensitivity | curves)
    return _with_scores(
        scores, swaps.s_pos, swaps.s_sym, swaps.effective, swaps.s_pos_no_sink, swaps.s_sym_no_sink, config
    )


def _with_scores(
    layer: Scores,
    s_pos: Tensor,
    s_sym: Tensor,
    effective: Tensor,
    s_pos_no_sink: Tensor,
    s_sym_no_sink: Tensor,
    config: HeadsConfig,
) -> Scores:
    """Return the layer's scores with swap scores ``(heads, queries)``, their intervals and labels."""
    scores = dict(zip(SCORES, (s_pos, s_sym, s_pos_no_sink, s_sym_no_sink), strict=True))
    heads = _summary({name: values[:, None] for name, values in scores.items()}, [layer], config)
    shares = _shares(heads, config.gamma)
    heads["effective_swaps"] = effective.mean(-1)
    curves = {f"{name}_by_query": Column(values.float(), ("head", "query")) for name, values in scores.items()}
    return Scores(
        layer=layer.layer,
        heads={**heads, **layer.heads},
        whole={**layer.whole, **shares},
        curves={**layer.curves, **curves},
    )


def _summary(scores: Mapping[str, Tensor], documents: Sequence[Scores], config: HeadsConfig) -> dict[str, Tensor]:
    """Return means of scores ``(heads, documents, queries)`` with intervals and both labels of every head.

    ``label`` follows from the scores over all keys alone. ``label_no_sink`` is *sink* for sink heads, and follows from
    the scores over the keys after the sink for all others.
    """
    heads = {}
    for name, values in scores.items():
        bounds = over_documents(values).clamp(0, 1)
        heads[name] = values.double().nanmean(-1).nanmean(-1)
        heads[f"{name}_low"], heads[f"{name}_high"] = bounds.unbind(-1)
    excess = torch.stack(
        [document.heads["sink_mass"] - document.whole["sink_mass_uniform"] for document in documents], 1
    )
    sink = sink_heads(excess, config.sink_threshold)
    heads["label"] = label(heads["s_pos"], heads["s_sym"], config.gamma).double()
    heads["label_no_sink"] = label(heads["s_pos_no_sink"], heads["s_sym_no_sink"], config.gamma, sink=sink).double()
    return heads


def _shares(heads: Mapping[str, Tensor], gamma: float) -> dict[str, float]:
    """Return the share of heads with each label in both versions, and of pure heads at half of γ."""

    def share(codes: Tensor, name: str) -> float:
        return float((codes == LABELS.index(name)).double().mean())

    strict = label(heads["s_pos"], heads["s_sym"], gamma / 2)
    return {
        **{f"heads_{name}": share(heads["label"], name) for name in SCORE_LABELS},
        **{f"heads_{name}_strict": share(strict, name) for name in ("positional", "symbolic")},
        "heads_sink": share(heads["label_no_sink"], "sink"),
        **{f"heads_{name}_no_sink": share(heads["label_no_sink"], name) for name in SCORE_LABELS},
    }


def combine_documents(documents: Sequence[Scores], config: HeadsConfig) -> Scores:
    """Return means, intervals and labels of every head over all documents, each with equal weight."""
    layers = []
    for same in zip(*(document.layers for document in documents), strict=True):
        if any("s_pos_by_query" not in layer.curves for layer in same):
            continue
        scores = {name: torch.stack([layer.curves[f"{name}_by_query"].values for layer in same], 1) for name in SCORES}
        heads = _summary(scores, same, config)
        layers.append(Scores(layer=same[0].layer, heads={f"{name}_together": values for name, values in heads.items()}))
    return Scores(layers=layers)
