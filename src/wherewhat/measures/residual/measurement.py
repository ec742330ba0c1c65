"""Declaration of ``wherewhat residual``: loss with the non-additive part of the logits scaled down."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import (
    NON_NEGATIVE,
    DocumentScores,
    Metric,
    Subject,
    Text,
    TextMeasurement,
    check_minimum,
)
from wherewhat.options import option


@dataclass(frozen=True)
class ResidualConfig:
    """Options of the residual measurement."""

    strengths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "values of λ, in all heads at once")
    layers: bool = option(True, "also make each layer alone additive")
    heads: bool = option(False, "also make each head alone additive, and the cheapest heads together")
    axes: bool = option(True, "also subtract each axis from all heads' logits")
    block_mib: int = option(64, "memory for one block of logits, in MiB")

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ConfigError(f"strengths={self.strengths}: give one or more different values of λ")
        check_minimum(self, 1, "block_mib")


class ResidualMeasurement(TextMeasurement):
    """``wherewhat residual``."""

    name = "residual"
    group = "Decomposition"
    revision = 2
    summary = "Loss with the non-additive part of the logits scaled down."
    config = ResidualConfig
    controls = ()
    metrics = (
        Metric("loss", "loss", "Mean next-token loss of the intact model.", unit="nats", range=NON_NEGATIVE),
        Metric(
            "loss_strength_1",
            "loss at λ = 1",
            "Loss through the replacement: must equal the loss.",
            unit="nats",
            range=NON_NEGATIVE,
        ),
        Metric(
            "loss_strength_0.75",
            "loss at λ = 0.75",
            "Loss with three quarters of the residual.",
            unit="nats",
            range=NON_NEGATIVE,
        ),
        Metric(
            "loss_strength_0.5", "loss at λ = 0.5", "Loss with half of the residual.", unit="nats", range=NON_NEGATIVE
        ),
        Metric(
            "loss_strength_0.25",
            "loss at λ = 0.25",
            "Loss with a quarter of the residual.",
            unit="nats",
            range=NON_NEGATIVE,
        ),
        Metric(
            "loss_strength_0",
            "loss at λ = 0",
            "Loss with exactly additive logits in all heads.",
            unit="nats",
            range=NON_NEGATIVE,
        ),
        Metric(
            "cost_without_a",
            "cost without distance",
            "Increase of the loss without the distance term; a sink column keeps its weight.",
            unit="nats",
        ),
        Metric(
            "cost_without_c",
            "cost without key",
            "Increase of the loss without the key term; a sink column keeps its weight.",
            unit="nats",
        ),
        Metric(
            "additive_cost_of_layer",
            "cost of one layer",
            "Increase of the loss with one layer alone made additive, mean over layers.",
            unit="nats",
        ),
        Metric(
            "additive_cost_of_head",
            "cost of one head",
            "Increase of the loss with one head alone made additive.",
            unit="nats",
        ),
    )
    limits = (
        "The fit uses the whole text, later tokens included: the loss at λ < 1 is that of the best additive logits for "
        "this text, not of a model trained with additive logits. In layers with a sink column, subtracting an axis "
        "changes the weights of the keys relative to each other, but not the weight of the sink."
    )

    def measure(self, subject: Subject, text: Text, config: ResidualConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.residual.replacement import measure_residual

        return measure_residual(subject, text.ids, config)
