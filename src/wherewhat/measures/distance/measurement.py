"""The ``distance`` measurement: controlled distance on every rotated layer of a model, beside its control."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Capacity, DocumentScores, Metric, ReportRun, Subject, Text, TextMeasurement
from wherewhat.options import check_seed, option


@dataclass(frozen=True)
class DistanceConfig:
    """Options of the distance measurement."""

    queries: int = option(16, "number of queries looked at, evenly spaced in the second half of the text")
    per_octave: int = option(1, "dummy distances for each doubling; 1 gives 0, 1, 2, 4, … and the longest in the text")
    beyond: tuple[int, ...] = option((), "also dummy distances of so many times the text, such as 2,4")
    reference: int = option(0, "dummy distance whose key profile the others are compared with, besides the real one")
    block_mib: int = option(64, "memory for one block of key profiles, in MiB")
    keep_mean: bool = option(False, "the control keeps the mean key and gives random phases to deviations from it only")
    seed: int = option(0, "seed of the control's random phases")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in ("queries", "per_octave", "block_mib"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.per_octave > 64:
            raise ConfigError(f"per_octave is {self.per_octave}: more than 64 gives the same distances again")
        if any(times < 2 for times in self.beyond):
            raise ConfigError(f"beyond is {list(self.beyond)}: each must be at least 2 times the text")
        check_seed(self.seed)


_SCRAMBLED = "random phases"


class DistanceMeasurement(TextMeasurement):
    """``wherewhat distance``."""

    name = "distance"
    group = "Decomposition"
    page = "controlled-distance"
    summary = "Controlled distance: how far logits are a distance term plus a key term, per head."
    config = DistanceConfig
    metrics = (
        Metric(
            "additive_share",
            "additive share",
            "",
            "Share of the logits' variance over keys and dummy distances that distance plus key explains; 1 is a "
            "pure sum. The control keeps every magnitude: what it reaches is owed to slow planes, not to phases.",
            "additive_share_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "distance_share",
            "distance share",
            "",
            "The part of the additive share that a distance curve common to all keys has.",
            "distance_share_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "key_share",
            "key share",
            "",
            "The part of the additive share that the keys have, whatever their distance.",
            "key_share_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "key_constancy",
            "key constancy",
            "",
            "Share of the variance between keys that does not depend on the distance: the additive share where no "
            "distance curve flatters it.",
            "key_constancy_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "key_rank_correlation",
            "key rank correlation",
            "",
            "How far the order of keys at a dummy distance is that of their key component where they really stand; "
            "mean over dummy distances within the text.",
            "key_rank_correlation_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "drift",
            "drift of the key component",
            "",
            "How far the key component moves with the distance, relative to its size; 0 is not at all, unrelated "
            "profiles of equal size are √2 apart.",
            "drift_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "shape_drift",
            "drift of its shape",
            "",
            "The same when the profile may also be rescaled: 1 − cos², from 0 to 1.",
            "shape_drift_scrambled",
            _SCRAMBLED,
        ),
        Metric(
            "logit_rank_correlation",
            "logit rank correlation",
            "",
            "How far the order of keys at a dummy distance is that of the real logits, whose order owes something to "
            "distance too.",
            "logit_rank_correlation_scrambled",
            _SCRAMBLED,
        ),
    )
    limits = (
        "Distances are dummies: queries and keys are those the model made at the real ones. Soft-cap and additive bias "
        "are left out. Layers without rotation have no scores. Slow planes are additive by themselves: read the shares "
        "against the random phases, and against the random model."
    )

    def measure(self, subject: Subject, text: Text, config: DistanceConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.distance.layer import measure_distance

        return measure_distance(subject, text.ids, config)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it."""
        return ReportRun(11.0, documents=1, tokens=256)
