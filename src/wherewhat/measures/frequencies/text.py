"""Frequencies that heads use, scores of single planes, and the model with planes or dimensions changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.extend.retrieval import Encode, Planting, RememberedFacts, plant, remembered_facts
from wherewhat.measures.frequencies import FrequenciesConfig
from wherewhat.measures.frequencies.masking import (
    FAITHFUL,
    MASSIVE,
    FixedDimensions,
    Masking,
    frequency_bands,
    relative_norms,
)
from wherewhat.measures.frequencies.planes import (
    frequency_ids,
    layer_frequencies,
    peak_band,
    plane_norms,
    predicted_band,
    slower_planes,
)
from wherewhat.measures.measurement import KEYS_MIX, Subject
from wherewhat.measures.swaps import SCORES
from wherewhat.measures.swaps.layer import Swaps, layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import (
    check_faithful,
    correlation,
    defined,
    next_token_loss,
    per_query_head,
    rotates,
)
from wherewhat.measures.variants import DEPTHS, LEAST_GAIN, RUN, recalled
from wherewhat.scores import Column, Scores


def measure_frequencies(
    subject: Subject, ids: Tensor, config: FrequenciesConfig, *, encode: Encode | None = None, prefix: int = 0
) -> Scores:
    """Return frequencies of every layer that rotates, and the loss with planes masked or un-rotated.

    The tokenizer is for the remembered facts of ``config.massive``, which are left out without it; ``prefix`` is the
    number of leading tokens of ``ids`` ``(1, n)`` that are not text, such as BOS.
    """
    queries = choose_queries(ids.shape[-1], count=config.queries)
    mixing = subject.key_mixing()
    layers: list[Scores] = []
    bands: dict[int, Tensor] = {}
    slow: dict[int, Tensor] = {}
    fast: dict[int, Tensor] = {}
    massive: dict[int, FixedDimensions] = {}
    planting = plant(ids, DEPTHS, run=RUN) if config.massive else None
    trained = subject.trained_length() if config.unrotate else 0

    def scored(attention: LayerAttention) -> bool:
        return mixing.get(attention.layer, 0.0) <= KEYS_MIX

    def measure(attention: LayerAttention) -> None:
        if not rotates(attention):
            return
        assert attention.rotation is not None
        layer, inv_freq = attention.layer, attention.rotation.inv_freq
        bands[layer] = frequency_bands(inv_freq, config.bands)
        scores = layer_frequencies(
            attention, queries, tau=config.tau, sink_tokens=config.sink_tokens, scored=scored(attention)
        )
        if config.unrotate:
            scores = _with_band_index(scores, attention, trained)
            slow[layer] = slower_planes(inv_freq, scores.whole["band_predicted"])
            fast[layer] = frequency_ids(inv_freq) <= int(slow[layer].sum())
        if config.massive:
            massive[layer] = FixedDimensions.massive(attention)
            scores = _with_massive(scores, attention)
        layers.append(scores)

    needs_loss = config.masking or config.unrotate or config.massive
    logits = subject.run(ids, measure, logits=needs_loss)
    if not layers:
        raise MeasureError(
            "no layer of this model rotates its queries and keys: without rotation there are no frequencies; measure "
            "its heads or axes"
        )
    masked = _masked_heads(layers, config.heads)
    whole = _correlations(layers) | _band_scores(layers, bands, config.bands)
    if needs_loss:
        assert logits is not None
        loss = next_token_loss(logits, ids)
        del logits
        masking = Masking(subject, ids, masked, config.block_mib)
        by_band = [{layer: x[band] for layer, x in bands.items()} for band in range(config.bands)]
        whole["loss"] = loss
        if config.masking:
            masking.check(loss)
            whole |= _effects(
                masking,
                by_band,
                layers,
                lambda attention: (
                    layer_swaps(attention, queries, tau=config.tau, sink_tokens=config.sink_tokens)
                    if scored(attention)
                    else None
                ),
            )
        if config.unrotate:
            masking.check(loss, how="unrotate")
            whole |= _unrotated(masking, by_band, slow, fast)
        if planting is not None:
            facts = None if encode is None else remembered_facts(ids, encode, prefix=prefix)
            whole |= _without_massive(masking, massive, loss, planting, facts)
    return Scores(layers=sorted(layers, key=lambda layer: layer.layer), whole=defined(whole))


def _masked_heads(layers: Sequence[Scores], chosen: Sequence[str]) -> dict[int, Tensor]:
    """Return the heads to mask by layer, ``(heads,)`` bool each."""
    sizes = {layer.layer: len(layer.heads["mean_frequency"]) for layer in layers}
    if not chosen:
        return {layer: torch.ones(size, dtype=torch.bool) for layer, size in sizes.items()}
    masked: dict[int, Tensor] = {}
    for text in chosen:
        layer, head = map(int, text.split("."))
        if layer not in sizes:
            rotating = ", ".join(map(str, sorted(sizes)))
            raise MeasureError(f"heads holds {text}, but layer {layer} is not one that rotates: choose from {rotating}")
        if head >= sizes[layer]:
            raise MeasureError(f"heads holds {text}, but layer {layer} has heads 0 to {sizes[layer] - 1}")
        masked.setdefault(layer, torch.zeros(sizes[layer], dtype=torch.bool))[head] = True
    return masked


def _correlations(layers: Sequence[Scores]) -> dict[str, float]:
    """Return correlations over heads of the two mean frequencies with the swap scores."""

    def joined(name: str) -> Tensor:
        return torch.cat([x.heads[name] for x in layers])

    return {
        f"{name}_{score}": correlation(joined(used), joined(score))
        for name, used in (("frequency_softmax", "mean_frequency_softmax"), ("frequency", "mean_frequency"))
        for score in SCORES
    }


def _band_scores(layers: Sequence[Scores], bands: dict[int, Tensor], count: int) -> dict[str, float]:
    """Return the scores of single planes, averaged over heads and the planes of each band."""
    return {
        f"{name}_band_{band + 1}": float(
            torch.cat(
                [x.curves[f"plane_{name}"].values[:, bands[x.layer][band]].double().flatten() for x in layers]
            ).nanmean()
        )
        for name in SCORES
        for band in range(count)
    }


def _effects(
    masking: Masking,
    bands: Sequence[Mapping[int, Tensor]],
    layers: Sequence[Scores],
    score: Callable[[LayerAttention], Swaps | None],
) -> dict[str, float]:
    """Return the loss without each band and with only it, and changes of the masked heads' scores without it."""
    heads = masking.heads
    before = {
        name: float(torch.cat([x.heads[name][heads[x.layer]] for x in layers if x.layer in heads]).nanmean())
        for name in SCORES
    }
    drawn = masking.random(bands[0])
    whole = {"loss_without_random": masking.loss(drawn), "loss_only_random": masking.loss(_others(drawn))}
    for band, planes in enumerate(bands, 1):
        after: dict[str, list[Tensor]] = {name: [] for name in SCORES}

        def add_scores(masked: LayerAttention, after: Mapping[str, list[Tensor]] = after) -> None:
            if (swaps := score(masked)) is not None:
                for name, means in after.items():
                    means.append(getattr(swaps, name)[heads[masked.layer]].nanmean(-1))

        whole[f"loss_without_band_{band}"] = masking.loss(planes, reducer=add_scores)
        whole[f"loss_only_band_{band}"] = masking.loss(_others(planes))
        for name, values in after.items():
            mean = float(torch.cat(values).mean()) if values else torch.nan
            whole[f"{name}_change_without_band_{band}"] = mean - before[name]
    return whole


def _others(planes: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {layer: ~x for layer, x in planes.items()}


def _with_band_index(layer: Scores, attention: LayerAttention, trained: int) -> Scores:
    """Return a layer's scores with the predicted and the measured index of the plane with the largest norm."""
    assert attention.rotation is not None
    window = attention.declared_window or attention.mask.window
    norms = plane_norms(attention)
    predicted = predicted_band(attention.rotation.inv_freq, min(trained, window or trained))
    return replace(
        layer,
        heads={**layer.heads, "band_measured": norms.argmax(-1).double()},
        whole={**layer.whole, "band_predicted": predicted, "band_peak": float(peak_band(norms))},
        curves={**layer.curves, "plane_norm": Column(norms.float(), ("head", "plane"))},
    )


def _unrotated(
    masking: Masking, bands: Sequence[Mapping[int, Tensor]], slow: Mapping[int, Tensor], fast: Mapping[int, Tensor]
) -> dict[str, float]:
    """Return the loss with bands un-rotated, with all planes, and with those slower than the predicted band."""

    def loss(planes: Mapping[int, Tensor]) -> float:
        return masking.loss(planes, how="unrotate")

    return {
        **{f"loss_unrotated_band_{band}": loss(planes) for band, planes in enumerate(bands, 1)},
        "loss_unrotated_random": loss(masking.random(bands[0])),
        "loss_unrotated_all": loss({layer: torch.ones_like(x) for layer, x in slow.items()}),
        "loss_unrotated_slow": loss(slow),
        "loss_unrotated_slow_random": loss(masking.random(slow)),
        "loss_unrotated_fast": loss(fast),
        "loss_without_slow": masking.loss(slow),
        "loss_without_slow_random": masking.loss(masking.random(slow)),
    }


def _with_massive(layer: Scores, attention: LayerAttention) -> Scores:
    """Return a layer's scores with the largest relative norms of its dimensions, and where massive ones are."""
    assert attention.rotation is not None
    q, k, v = (relative_norms(x[0]).cpu() for x in (attention.rot_q, attention.rot_k, attention.value))
    largest = {
        "massive_q": q.amax(-1),
        "massive_k": per_query_head(k.amax(-1), attention),
        "massive_v": v.amax(-1).repeat_interleave(attention.heads // len(v)),
    }
    fast = attention.rotation.pairs[frequency_ids(attention.rotation.inv_freq) <= attention.rotation.planes / 2]
    slow = torch.ones(q.shape[-1], dtype=torch.bool)
    slow[fast.flatten()] = False
    massive = torch.cat([q, k]) > MASSIVE
    places = {
        "massive_heads": float(((largest["massive_q"] > MASSIVE) | (largest["massive_k"] > MASSIVE)).double().mean()),
        "massive_heads_v": float((largest["massive_v"] > MASSIVE).double().mean()),
        "massive_slow": float((massive & slow).sum().double() / massive.sum()),  # NaN without massive dimensions
        "massive_slow_even": float(slow.double().mean()),
    }
    return replace(layer, heads={**layer.heads, **largest}, whole={**layer.whole, **defined(places)})


def _without_massive(
    masking: Masking,
    massive: Mapping[int, FixedDimensions],
    loss: float,
    planting: Planting,
    facts: RememberedFacts | None,
) -> dict[str, float]:
    """Return loss and lost shares of two gains with massive dimensions replaced by their means, and with random ones.

    ``later`` are those with massive dimensions replaced at all tokens but the first, which is often an attention sink.
    """
    texts = torch.cat([planting.control, planting.planted])

    def outcome(fixed: Mapping[int, FixedDimensions], first: int = 0) -> tuple[float, float, float]:
        """Return the loss, the gain from planted sequences and that from remembered facts."""

        def edit(attention: LayerAttention) -> Tensor | None:
            own = fixed.get(attention.layer)
            if own is None:
                return None
            return attention_output(own.apply(attention, first=first), block_mib=masking.block_mib)

        logits = masking.subject.edited(texts, edit)
        before, after = recalled(logits, planting).tolist()
        loss = next_token_loss(logits[:1], planting.control)
        del logits
        known = torch.nan if facts is None else facts.gain(masking.subject.edited(facts.ids, edit))
        return loss, after - before, known

    unchanged, planted, known = outcome({layer: fixed.none() for layer, fixed in massive.items()})
    dtypes = {fixed.mean_q.dtype for fixed in massive.values()}
    check_faithful("the replacement of dimensions", unchanged, loss, dtypes=dtypes, precision=FAITHFUL)
    generator = torch.Generator().manual_seed(0)
    random = {layer: fixed.random(generator) for layer, fixed in massive.items()}
    whole = {"planted": planted, "facts": known}
    for ending, fixed, first in (("massive", massive, 0), ("massive_random", random, 0), ("massive_later", massive, 1)):
        whole[f"loss_{ending}"], still_planted, still_known = outcome(fixed, first)
        for name, before, after in (("planted", planted, still_planted), ("facts", known, still_known)):
            whole[f"{name}_lost_{ending}"] = 1 - after / before if before > LEAST_GAIN else torch.nan
    return whole
