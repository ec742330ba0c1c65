"""``wherewhat frequencies``: which frequencies heads use, what each is by itself, and what heads are without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.frequencies.masking import Masking, frequency_bands
from wherewhat.measures.frequencies.planes import layer_frequencies, rotates
from wherewhat.measures.measurement import KEYS_MIX, DocumentScores, LayerScores, Measurement, Metric, Subject, option
from wherewhat.measures.statistics import correlation, next_token_loss
from wherewhat.measures.swaps.placement import choose_queries
from wherewhat.measures.swaps.scores import TAU

BANDS = 4


@dataclass(frozen=True)
class FrequenciesConfig:
    """Options of the frequencies measurement."""

    queries: int = option(2, "number of queries, spread evenly with the last token among them; 0 for all")
    tau: float = option(TAU, "temperature of the weights of swaps")
    bands: int = option(BANDS, "bands that the planes, sorted by speed, are cut into; band 1 is the fastest")
    masking: bool = option(True, "also measure the model with each band removed, and with only that band")
    heads: tuple[str, ...] = option((), "heads to mask, as layer.head, such as 3.1,5.0; all if empty")
    block_mib: int = option(64, "memory for one block of logits, in MiB")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.queries < 0:
            raise ConfigError(f"queries is {self.queries}: give 1 or more, or 0 for all")
        if not self.tau > 0:
            raise ConfigError(f"tau is {self.tau}: it must be positive, because it divides the weights of swaps")
        for name in ("bands", "block_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        for head in self.heads:
            if not re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,6}", head):
                raise ConfigError(f"heads holds {head!r}: give layer.head, such as 3.1 for head 1 of layer 3")


def measure_frequencies(subject: Subject, ids: Tensor, config: FrequenciesConfig) -> DocumentScores:
    """Frequencies of every layer that rotates, and the model with bands of them masked.

    Args:
        subject: The model.
        ids: Tokens, ``(1, n)``.
        config: Options.
    """
    queries = choose_queries(ids.shape[-1], count=config.queries)
    mixing = subject.key_mixing()
    found: list[LayerScores] = []
    bands: dict[int, Tensor] = {}

    def look(attention: LayerAttention) -> None:
        if not rotates(attention):
            return
        assert attention.rotation is not None
        bands[attention.layer] = frequency_bands(attention.rotation.inv_freq, config.bands)
        scored = mixing.get(attention.layer, 0.0) <= KEYS_MIX
        found.append(layer_frequencies(attention, queries, tau=config.tau, scored=scored))

    logits = subject.run(ids, look, logits=config.masking)
    if not found:
        raise MeasureError(
            "no layer of this model rotates its queries and keys: without rotation there are no frequencies; measure "
            "its heads or axes"
        )
    masked = _masked_heads(found, config.heads)
    whole = _correlations(found) | _band_scores(found, bands, config.bands)
    if config.masking:
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
        masking.check(loss)
        whole |= {"loss": loss} | _effects(masking, found, masked, config.bands)
    defined = {name: value for name, value in whole.items() if value == value}
    return DocumentScores(sorted(found, key=lambda layer: layer.layer), defined)


def _masked_heads(layers: Sequence[LayerScores], chosen: Sequence[str]) -> dict[int, Tensor]:
    """Heads to mask by layer, ``(heads,)`` bool each."""
    sizes = {layer.layer: len(layer.heads["mean_frequency"]) for layer in layers}
    if not chosen:
        return {layer: torch.ones(size, dtype=torch.bool) for layer, size in sizes.items()}
    found: dict[int, Tensor] = {}
    for text in chosen:
        layer, head = map(int, text.split("."))
        if layer not in sizes:
            there = ", ".join(map(str, sorted(sizes)))
            raise MeasureError(f"heads holds {text}, but layer {layer} is not one that rotates: choose of {there}")
        if head >= sizes[layer]:
            raise MeasureError(f"heads holds {text}, but layer {layer} has heads 0 to {sizes[layer] - 1}")
        found.setdefault(layer, torch.zeros(sizes[layer], dtype=torch.bool))[head] = True
    return found


def _correlations(layers: Sequence[LayerScores]) -> dict[str, float]:
    """Correlations over heads of the mean frequency with the scores of whole heads."""
    used, s_pos, s_sym = (torch.cat([x.heads[name] for x in layers]) for name in ("mean_frequency", "s_pos", "s_sym"))
    return {"frequency_s_pos": correlation(used, s_pos), "frequency_s_sym": correlation(used, s_sym)}


def _band_scores(layers: Sequence[LayerScores], bands: dict[int, Tensor], count: int) -> dict[str, float]:
    """Mean over heads and the planes of a band of single planes' scores."""
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
    """Loss with each band removed and with only it, and what removing it does to the masked heads' scores."""
    before = {
        name: float(torch.cat([x.heads[name][masked[x.layer]] for x in layers if x.layer in masked]).nanmean())
        for name in ("s_pos", "s_sym")
    }
    whole = dict(zip(("loss_without_random", "loss_only_random"), masking.random(0), strict=True))
    for band in range(bands):
        without = masking.without(band)
        whole[f"loss_without_band_{band + 1}"] = without.loss
        whole[f"loss_only_band_{band + 1}"] = masking.only(band)
        whole[f"s_pos_change_without_band_{band + 1}"] = without.s_pos - before["s_pos"]
        whole[f"s_sym_change_without_band_{band + 1}"] = without.s_sym - before["s_sym"]
    return whole


def _band_metrics(config: FrequenciesConfig) -> tuple[Metric, ...]:
    """Words for the numbers of each band."""
    described = (
        ("s_pos_band", "positional, band {}", "", "Mean positional score of single planes in band {}.", None),
        ("s_sym_band", "symbolic, band {}", "", "Mean symbolic score of single planes in band {}.", None),
        ("loss_without_band", "loss without band {}", "nats", "Loss with band {} masked out.", "loss_without_random"),
        ("loss_only_band", "loss with only band {}", "nats", "Loss with all others masked out.", "loss_only_random"),
        (
            "s_pos_change_without_band",
            "positional without band {}",
            "",
            "Change of the masked heads' mean positional score when band {} is masked out.",
            None,
        ),
        (
            "s_sym_change_without_band",
            "symbolic without band {}",
            "",
            "Change of the masked heads' mean symbolic score when band {} is masked out.",
            None,
        ),
    )
    return tuple(
        Metric(
            f"{name}_{band}",
            title.format(band),
            unit,
            reading.format(band),
            control,
            "random planes" if control is not None else "",
        )
        for name, title, unit, reading, control in described
        for band in range(1, config.bands + 1)
    )


FREQUENCIES = Measurement(
    name="frequencies",
    revision=2,
    summary="Which of RoPE's frequencies heads use, how positional or symbolic each is, and what heads are without it.",
    config=FrequenciesConfig,
    measure=measure_frequencies,
    more_metrics=_band_metrics,
    metrics=(
        Metric(
            "mean_frequency",
            "mean frequency ID",
            "",
            "Mean rank of the planes by speed, 1 the fastest, weighted by the largest logit each contributes; the "
            "control is a head that uses all alike.",
            "mean_frequency_even",
            "even use",
        ),
        Metric("s_pos", "positional", "", "1: attention of the head stays with places when contents are swapped."),
        Metric("s_sym", "symbolic", "", "1: attention of the head goes along with contents when they are swapped."),
        Metric(
            "frequency_s_pos",
            "frequency ID × positional",
            "",
            "Correlation over heads of mean frequency ID and positional score; above 0: slow heads are positional.",
        ),
        Metric(
            "frequency_s_sym",
            "frequency ID × symbolic",
            "",
            "Correlation over heads of mean frequency ID and symbolic score; above 0: slow heads are symbolic.",
        ),
        Metric("s_pos_rest", "positional, unrotated", "", "Positional score of the dimensions that do not rotate."),
        Metric("s_sym_rest", "symbolic, unrotated", "", "Symbolic score of the dimensions that do not rotate."),
        Metric("loss", "loss", "nats", "Mean next-token loss of the untouched model."),
    ),
    limits=(
        "A plane by itself is not the plane in its head: softmax mixes them, and a plane with small logits attends "
        "almost evenly, which counts as positional and symbolic at once. Speeds are ranks; whether a plane turns over "
        "the text depends on its length. Soft-cap and bias are no part of a plane. Masked heads are not heads trained "
        "without the band: a loss says that the model relies on the band, not that the task needs it. Later layers see "
        "changed inputs, so a change of scores is that of all masking before a head as well."
    ),
)
