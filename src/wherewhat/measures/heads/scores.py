"""Positional and symbolic scores of every head, with patterns, axes and frequencies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.frequencies.planes import frequency_use, mean_frequency, mean_frequency_softmax
from wherewhat.measures.heads import PAIRS, HeadsConfig
from wherewhat.measures.heads.patterns import layer_scores as pattern_scores
from wherewhat.measures.heads.patterns import pattern_statistics
from wherewhat.measures.measurement import KEYS_MIX, Subject
from wherewhat.measures.swaps import LABELS, SCORE_LABELS, SCORES
from wherewhat.measures.swaps.layer import check_exclusion, layer_swaps, reference_scores
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.swaps.scores import label, sink_heads
from wherewhat.measures.tensors import correlation, defined, over_documents, scores_by_text
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


def layer_scores(layer: LayerAttention, ids: Tensor, config: HeadsConfig) -> list[Scores]:
    """Return swap scores, patterns, axes and frequencies of every head of a layer on each of its texts.

    Args:
        layer: The layer.
        ids: Tokens of the texts, ``(texts, n)``.
        config: Options.
    """
    merged, queries = layer.merged, _queries(layer.n, config)
    heads, whole, curves = pattern_scores(pattern_statistics(layer, ids, config))
    try:
        fit = fit_layer(merged)
    except MeasureError:  # the three axes are defined only for a causal band
        pass
    else:
        heads |= {"r": fit.r, "r_behaviour": fit.r_behaviour, "r_a": fit.r_subset["a"], "r_c": fit.r_subset["c"]}
    if layer.rotation is not None:
        use = frequency_use(merged, queries)
        heads["mean_frequency_softmax"] = mean_frequency_softmax(use, layer.rotation.inv_freq)
        heads["mean_frequency"] = mean_frequency(use, layer.rotation.inv_freq)
        whole["mean_frequency_even"] = (layer.rotation.planes + 1) / 2
        curves["frequency_use"] = Column(use.float(), ("head", "plane"))
    rerun = _keys_mix(layer)
    whole["rerun"] = float(rerun)
    if rerun:
        return scores_by_text(layer, heads=heads, whole=whole, curves=curves)
    swaps = layer_swaps(
        merged,
        _scored_queries(merged, queries, config),
        tau=config.tau,
        block=config.block,
        skip=config.skip,
        sink_tokens=config.sink_tokens,
        taus=config.taus,
        blocks=config.blocks,
    )
    from_logits = {
        "s_pos_logits": swaps.s_pos_logits.mean(1),
        "s_sym_logits": swaps.s_sym_logits.mean(1),
        "exclusion": swaps.exclusion.amin(1).clamp_max(1e6),  # infinite for constant logits; stored values are finite
        "swap_bound": swaps.bound.amax(1),
        "swaps_kept": swaps.kept.mean(1),
    }
    sensitivity = {
        f"{name}_by_{what}": Column(values[index].float(), ("head", what))
        for what, values in (("tau", swaps.by_tau), ("block", swaps.by_block))
        for index, name in enumerate(("s_pos", "s_sym"))
    }
    excess = heads["sink_mass"] - whole["sink_mass_uniform"]
    scores = swaps.s_pos, swaps.s_sym, swaps.s_pos_no_sink, swaps.s_sym_no_sink
    summary, by_query = _swap_scores(scores, swaps.effective, excess, config)
    shares = _shares(summary, config.gamma, layer.texts)
    return scores_by_text(
        layer,
        heads=summary | from_logits | heads,
        whole=whole | shares,
        curves=sensitivity | curves | by_query,
    )


def _keys_mix(layer: LayerAttention) -> bool:
    """Return whether keys depend on several tokens, so that swaps are made for real."""
    return (layer.key_mixing or 0.0) > KEYS_MIX


def complete(subject: Subject, ids: Tensor, scores: Scores, config: HeadsConfig) -> Scores:
    """Return the scores of one text ``(1, n)`` with those of layers whose keys depend on several tokens."""
    layers = {
        layer.layer: replace(layer, whole=defined({name: float(x) for name, x in layer.whole.items()}))
        for layer in scores.layers
    }
    mixed = [number for number, layer in layers.items() if layer.whole["rerun"]]
    if mixed and config.rerun:
        queries = _queries(ids.shape[1], config)
        with subject.blocks(ids) as again:
            for number in mixed:
                before = again.run(number, again.hidden(number))
                s_pos, s_sym, effective, *without = reference_scores(
                    before,
                    functools.partial(again.swapped, number, block=config.block),
                    _scored_queries(before, queries, config),
                    tau=config.tau,
                    block=config.block,
                    skip=config.skip,
                    sink_tokens=config.sink_tokens,
                )
                layer = layers[number]
                excess = layer.heads["sink_mass"] - layer.whole["sink_mass_uniform"]
                heads, curves = _swap_scores((s_pos, s_sym, *without), effective, excess, config)
                shares = {name: float(x) for name, x in _shares(heads, config.gamma, 1).items()}
                layers[number] = replace(
                    layer,
                    heads={**heads, **layer.heads},
                    whole={**layer.whole, **shares},
                    curves={**layer.curves, **curves},
                )
    return replace(scores, layers=list(layers.values()), whole=head_correlations(list(layers.values())))


def check_layers(layers: Sequence[Scores]) -> None:
    """Raise an error if attention of a layer is not finite, or if its logits are impossible."""
    for layer in layers:
        if not bool(layer.heads["entropy"].isfinite().all()):
            raise MeasureError(f"attention of layer {layer.layer} is not finite: the model's logits overflow")
        if "exclusion" in layer.heads:
            check_exclusion(layer.layer, float(layer.heads["exclusion"].amin()))


def _queries(n: int, config: HeadsConfig) -> list[int]:
    """Return the positions of the queries, each once: means count each of them once."""
    return sorted(set(choose_queries(n, count=config.queries, positions=config.positions)))


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


def _swap_scores(
    scores: Sequence[Tensor], effective: Tensor, excess: Tensor, config: HeadsConfig
) -> tuple[dict[str, Tensor], dict[str, Column]]:
    """Return values per head, with intervals and labels, and curves by query.

    Args:
        scores: ``SCORES`` of each head at each query, ``(heads, queries)`` each.
        effective: Effective number of swaps, ``(heads, queries)``.
        excess: Share of attention on the first tokens beyond that of uniform attention, ``(heads,)``.
        config: Options.
    """
    by_query = dict(zip(SCORES, scores, strict=True))
    heads = _summary({name: values[:, None] for name, values in by_query.items()}, excess[:, None], config)
    heads["effective_swaps"] = effective.mean(-1)
    return heads, {f"{name}_by_query": Column(x.float(), ("head", "query")) for name, x in by_query.items()}


def _summary(scores: Mapping[str, Tensor], excess: Tensor, config: HeadsConfig) -> dict[str, Tensor]:
    """Return means of scores ``(heads, documents, queries)`` with intervals and both labels of every head.

    ``excess`` ``(heads, documents)`` is the share of attention on the first tokens beyond that of uniform attention.

    ``label`` follows from the scores over all keys alone. ``label_no_sink`` is *sink* for sink heads, and follows from
    the scores over the keys after the sink for all others.
    """
    heads = {}
    for name, values in scores.items():
        bounds = over_documents(values).clamp(0, 1)
        heads[name] = values.double().nanmean(-1).nanmean(-1)
        heads[f"{name}_low"], heads[f"{name}_high"] = bounds.unbind(-1)
    sink = sink_heads(excess, config.sink_threshold)
    heads["label"] = label(heads["s_pos"], heads["s_sym"], config.gamma).double()
    heads["label_no_sink"] = label(heads["s_pos_no_sink"], heads["s_sym_no_sink"], config.gamma, sink=sink).double()
    return heads


def _shares(heads: Mapping[str, Tensor], gamma: float, texts: int) -> dict[str, Tensor]:
    """Return the share of heads with each label in both versions, and of pure heads at half of γ, ``(texts,)`` each."""

    def share(codes: Tensor, name: str) -> Tensor:
        return (codes == LABELS.index(name)).double().view(texts, -1).mean(1)

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
        excess = torch.stack([layer.heads["sink_mass"] - layer.whole["sink_mass_uniform"] for layer in same], 1)
        heads = _summary(scores, excess, config)
        layers.append(Scores(layer=same[0].layer, heads={f"{name}_together": values for name, values in heads.items()}))
    return Scores(layers=layers)
