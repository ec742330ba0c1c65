"""``wherewhat frequencies``: which frequencies heads use, what each is by itself, and what heads are without them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Capacity, DocumentScores, Metric, ReportRun, Subject, Text, TextMeasurement
from wherewhat.measures.swaps import TAU
from wherewhat.options import option

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


class FrequenciesMeasurement(TextMeasurement):
    """``wherewhat frequencies``."""

    name = "frequencies"
    group = "Heads"
    revision = 2
    summary = (
        "Which of RoPE's frequencies heads use, how positional or symbolic each is, and what heads are without it."
    )
    config = FrequenciesConfig
    metrics = (
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
    )
    limits = (
        "A plane by itself is not the plane in its head: softmax mixes them, and a plane with small logits attends "
        "almost evenly, which counts as positional and symbolic at once. Speeds are ranks; whether a plane turns over "
        "the text depends on its length. Soft-cap and bias are no part of a plane. Masked heads are not heads trained "
        "without the band: a loss says that the model relies on the band, not that the task needs it. Later layers see "
        "changed inputs, so a change of scores is that of all masking before a head as well."
    )

    def measure(self, subject: Subject, text: Text, config: FrequenciesConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.frequencies.text import measure_frequencies

        return measure_frequencies(subject, text.ids, config)

    def more_metrics(self, config: FrequenciesConfig) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config."""
        return _band_metrics(config)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it: with no more bands than there are planes."""
        options = {"bands": capacity.planes} if 0 < capacity.planes < BANDS else {}
        return ReportRun(22.0, documents=3, tokens=128, options=options)
