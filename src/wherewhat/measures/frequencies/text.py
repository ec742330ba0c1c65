"""Frequencies that heads use, scores of single planes, and the model with planes masked or un-rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.frequencies.masking import Masking, frequency_bands
from wherewhat.measures.frequencies.measurement import FrequenciesConfig
from wherewhat.measures.frequencies.planes import (
    frequency_ids,
    layer_frequencies,
    peak_band,
    plane_norms,
    predicted_band,
    slower_planes,
)
from wherewhat.measures.measurement import KEYS_MIX, Curve, DocumentScores, LayerScores, Subject
from wherewhat.measures.swaps.placement import choose_queries
from wherewhat.measures.tensors import correlation, defined, next_token_loss, rotates


def measure_frequencies(subject: Subject, ids: Tensor, config: FrequenciesConfig) -> DocumentScores:
    """Return frequencies of every layer that rotates, and the loss with planes masked or un-rotated.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        config: Options.
    """
    queries = choose_queries(ids.shape[-1], count=config.queries)
    mixing = subject.key_mixing()
    found: list[LayerScores] = []
    bands: dict[int, Tensor] = {}
    slow: dict[int, Tensor] = {}
    trained = subject.trained_length() if config.unrotate else 0

    def measure(attention: LayerAttention) -> None:
        if not rotates(attention):
            return
        assert attention.rotation is not None
        bands[attention.layer] = frequency_bands(attention.rotation.inv_freq, config.bands)
        scored = mixing.get(attention.layer, 0.0) <= KEYS_MIX
        scores = layer_frequencies(attention, queries, tau=config.tau, scored=scored)
        if config.unrotate:
            scores = _with_band_index(scores, attention, trained)
            slow[attention.layer] = slower_planes(attention.rotation.inv_freq, scores.whole["band_predicted"])
        found.append(scores)

    logits = subject.run(ids, measure, logits=config.masking or config.unrotate)
    if not found:
        raise MeasureError(
            "no layer of this model rotates its queries and keys: without rotation there are no frequencies; measure "
            "its heads or axes"
        )
    masked = _masked_heads(found, config.heads)
    whole = _correlations(found) | _band_scores(found, bands, config.bands)
    if config.masking or config.unrotate:
        assert logits is not None
        loss = next_token_loss(logits, ids)
        del logits
        masking = Masking(
            subject,
            ids,
            masked,
            bands=config.bands,
            queries=queries,
            tau=config.tau,
            scored=frozenset(layer.layer for layer in found if mixing.get(layer.layer, 0.0) <= KEYS_MIX),
            block_mib=config.block_mib,
        )
        whole["loss"] = loss
        if config.masking:
            masking.check(loss)
            whole |= _effects(masking, found, masked, config.bands)
        if config.unrotate:
            masking.check(loss, how="unrotate")
            whole |= _unrotated(masking, slow, config.bands)
    return DocumentScores(sorted(found, key=lambda layer: layer.layer), defined(whole))


def _masked_heads(layers: Sequence[LayerScores], chosen: Sequence[str]) -> dict[int, Tensor]:
    """Return the heads to mask by layer, ``(heads,)`` bool each."""
    sizes = {layer.layer: len(layer.heads["mean_frequency"]) for layer in layers}
    if not chosen:
        return {layer: torch.ones(size, dtype=torch.bool) for layer, size in sizes.items()}
    found: dict[int, Tensor] = {}
    for text in chosen:
        layer, head = map(int, text.split("."))
        if layer not in sizes:
            rotating = ", ".join(map(str, sorted(sizes)))
            raise MeasureError(f"heads holds {text}, but layer {layer} is not one that rotates: choose from {rotating}")
        if head >= sizes[layer]:
            raise MeasureError(f"heads holds {text}, but layer {layer} has heads 0 to {sizes[layer] - 1}")
        found.setdefault(layer, torch.zeros(sizes[layer], dtype=torch.bool))[head] = True
    return found


def _correlations(layers: Sequence[LayerScores]) -> dict[str, float]:
    """Return correlations over heads of the two mean frequencies with the swap scores."""

    def joined(name: str) -> Tensor:
        return torch.cat([x.heads[name] for x in layers])

    return {
        f"{name}_{score}": correlation(joined(used), joined(score))
        for name, used in (("frequency_softmax", "mean_frequency_softmax"), ("frequency", "mean_frequency"))
        for score in ("s_pos", "s_sym")
    }


def _band_scores(layers: Sequence[LayerScores], bands: dict[int, Tensor], count: int) -> dict[str, float]:
    """Return the scores of single planes, averaged over heads and the planes of each band."""
    return {
        f"{name}_band_{band + 1}": float(
            torch.cat(
                [x.curves[f"plane_{name}"].values[:, bands[x.layer][band]].double().flatten() for x in layers]
            ).nanmean()
        )
        for name in ("s_pos", "s_sym")
        for band in range(count)
    }


def _effects(
    masking: Masking, layers: Sequence[LayerScores], masked: dict[int, Tensor], bands: int
) -> dict[str, float]:
    """Return the loss without each band and with only it, and changes of the masked heads' scores without it."""
    before = {
        name: float(torch.cat([x.heads[name][masked[x.layer]] for x in layers if x.layer in masked]).nanmean())
        for name in ("s_pos", "s_sym")
    }
    whole = dict(zip(("loss_without_random", "loss_only_random"), masking.random(0), strict=True))
    for band in range(bands):
        loss, s_pos, s_sym = masking.without(band)
        whole[f"loss_without_band_{band + 1}"] = loss
        whole[f"loss_only_band_{band + 1}"] = masking.only(band)
        whole[f"s_pos_change_without_band_{band + 1}"] = s_pos - before["s_pos"]
        whole[f"s_sym_change_without_band_{band + 1}"] = s_sym - before["s_sym"]
    return whole


def _with_band_index(layer: LayerScores, attention: LayerAttention, trained: int) -> LayerScores:
    """Return a layer's scores with the predicted and the measured index of the plane with the largest norm."""
    assert attention.rotation is not None
    window = attention.declared_window or attention.mask.window
    norms = plane_norms(attention)
    predicted = predicted_band(attention.rotation.inv_freq, min(trained, window or trained))
    return replace(
        layer,
        heads={**layer.heads, "band_measured": norms.argmax(-1).double()},
        whole={**layer.whole, "band_predicted": predicted, "band_peak": float(peak_band(norms))},
        curves={**layer.curves, "plane_norm": Curve(norms.float(), ("head", "plane"))},
    )


def _unrotated(masking: Masking, slow: dict[int, Tensor], bands: int) -> dict[str, float]:
    """Return the loss with bands un-rotated, with all planes, and with those slower than the predicted band."""

    def slower(attention: LayerAttention) -> Tensor:
        return slow[attention.layer]

    def faster(attention: LayerAttention) -> Tensor:
        """Return the fastest planes, as many as are slower than the predicted band."""
        assert attention.rotation is not None
        return frequency_ids(attention.rotation.inv_freq) <= int(slower(attention).sum())

    def band_planes(attention: LayerAttention) -> Tensor:
        assert attention.rotation is not None
        return frequency_bands(attention.rotation.inv_freq, bands)[0]

    return {
        **{f"loss_unrotated_band_{band + 1}": masking.unrotated(band) for band in range(bands)},
        "loss_unrotated_random": masking.random_loss(0, band_planes, how="unrotate"),
        "loss_unrotated_all": masking.loss(lambda attention: torch.zeros_like(slower(attention)), how="unrotate"),
        "loss_unrotated_slow": masking.loss(lambda attention: ~slower(attention), how="unrotate"),
        "loss_unrotated_slow_random": masking.random_loss(0, slower, how="unrotate"),
        "loss_unrotated_fast": masking.loss(lambda attention: ~faster(attention), how="unrotate"),
        "loss_without_slow": masking.loss(lambda attention: ~slower(attention)),
        "loss_without_slow_random": masking.random_loss(0, slower),
    }
