"""``wherewhat axes``: the three-axis fit of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Capacity, DocumentScores, LayerMeasurement, LayerScores, Metric, ReportRun
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


Method = Literal["auto", "linear", "blocked"]
"""How the fit is computed: in linear time, in blocks of queries, or whichever is faster."""


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


class AxesMeasurement(LayerMeasurement):
    """``wherewhat axes``."""

    name = "axes"
    group = "Decomposition"
    revision = 2
    summary = "How much of every head's logits is a sum of a distance, a query and a key term."
    config = AxesConfig
    controls = ("random", "shuffled")
    metrics = (
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
    )
    limits = (
        "A high r alone does not show that anything was learned: a random deep model makes all tokens alike, and alike "
        "tokens are additive. Read it beside the twins, the ranks and r of behaviour. r says how much of the logits' "
        "variance is additive, not how much the rest matters to the model."
    )

    def measure(self, layer: LayerAttention, config: AxesConfig) -> LayerScores:
        """Return the scores."""
        from wherewhat.measures.axes.layer import layer_scores

        return layer_scores(layer, config)

    def combine(self, documents: Sequence[DocumentScores], config: AxesConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.axes.layer import shared

        return shared(documents)

    def pooled(self, layers: Sequence[LayerScores]) -> Mapping[str, float]:
        """Return scores of the model from those of its layers."""
        from wherewhat.measures.axes.layer import pooled

        return pooled(layers)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it."""
        return ReportRun(1.5, controls=("random", "shuffled"))
