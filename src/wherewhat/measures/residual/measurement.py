"""What the part of the logits that is not additive does: it is turned down, and the model's loss is measured.

Inside the forward pass the logits W of a head are replaced by ``a + b + c + λ · (W - a - b - c)``, with the three-axis
fit of that very pass, or an axis is taken out of them. λ = 1 is the model itself, λ = 0 one with additive logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import DocumentScores, Metric, Subject, Text, TextMeasurement
from wherewhat.options import option


@dataclass(frozen=True)
class ResidualConfig:
    """Options of the residual experiment."""

    strengths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "values of λ, in all heads at once")
    layers: bool = option(True, "also make each layer additive by itself, the others left alone")
    axes: bool = option(True, "also take each axis out of all heads' logits")
    block_mib: int = option(64, "memory for one block of logits, in MiB")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if not self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ConfigError(f"strengths={self.strengths}: give one or more different values of λ")
        if self.block_mib < 1:
            raise ConfigError(f"block_mib is {self.block_mib}: at least 1 MiB is needed")


class ResidualMeasurement(TextMeasurement):
    """``wherewhat residual``."""

    name = "residual"
    group = "Decomposition"
    revision = 2
    summary = "What the loss becomes when the part of the logits that is not additive is turned down."
    config = ResidualConfig
    controls = ()
    metrics = (
        Metric("loss", "loss", "nats", "Mean next-token loss of the untouched model."),
        Metric("loss_strength_1", "loss at λ = 1", "nats", "The same through the replacement: must equal the loss."),
        Metric("loss_strength_0.75", "loss at λ = 0.75", "nats", "Loss with three quarters of the residual."),
        Metric("loss_strength_0.5", "loss at λ = 0.5", "nats", "Loss with half of the residual."),
        Metric("loss_strength_0.25", "loss at λ = 0.25", "nats", "Loss with a quarter of the residual."),
        Metric("loss_strength_0", "loss at λ = 0", "nats", "Loss when all heads' logits are exactly additive."),
        Metric(
            "cost_without_a",
            "cost without distance",
            "nats",
            "Rise of the loss without the distance term; a sink column keeps its weight.",
        ),
        Metric(
            "cost_without_c",
            "cost without key",
            "nats",
            "Rise of the loss without the key term; a sink column keeps its weight.",
        ),
        Metric(
            "additive_cost_of_layer",
            "cost of one layer",
            "nats",
            "Rise of the loss when one layer alone is made additive, mean over layers.",
        ),
    )
    limits = (
        "The fit is that of the text at hand: it knows the whole text, later tokens included, so the loss at λ < 1 is "
        "what the best additive logits would allow, not what a model trained to be additive would reach. Where a "
        "layer has a sink column, taking an axis out changes how the keys share what the sink leaves them, and not the "
        "sink's own weight."
    )

    def measure(self, subject: Subject, text: Text, config: ResidualConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.residual.replacement import measure_residual

        return measure_residual(subject, text.ids, config)
