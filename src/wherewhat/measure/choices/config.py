"""Options of the measurement of choices."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.measure.base import option
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.names import KINDS


@dataclass(frozen=True)
class ChoicesConfig:
    """Options of the measurement of choices; those of perturbations are as for ``perturb``."""

    kinds: tuple[str, ...] = option(
        ("words",), f"what to disturb in the context, of {', '.join(KINDS)}; empty for none"
    )
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to disturb, 0 to 1")
    seed: int = option(0, "seed of the draws; every item has draws of its own")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose entering hidden states are swapped")
    reach: int = option(8, "farthest that jitter moves a position")
    gap: int = option(1, "positions left out at a gap")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        self.perturbing()

    def perturbing(self) -> PerturbConfig:
        """The same as options of perturbations.

        Raises:
            ConfigError: If a value makes no sense.
        """
        return PerturbConfig(
            kinds=self.kinds, rates=self.rates, seed=self.seed, layers=self.layers, reach=self.reach, gap=self.gap
        )
