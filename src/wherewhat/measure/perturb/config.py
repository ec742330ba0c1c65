"""Options of the perturbation experiment."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.checking import check_seed, nearest
from wherewhat.errors import ConfigError
from wherewhat.measure.base import option
from wherewhat.measure.perturb.names import KINDS


@dataclass(frozen=True)
class PerturbConfig:
    """Options of the perturbation experiment."""

    kinds: tuple[str, ...] = option((), f"of {', '.join(KINDS)}; all that the model and the text allow if empty")
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to disturb, 0 to 1")
    seeds: int = option(3, "draws per rate, averaged")
    seed: int = option(0, "seed of the first draw")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose entering hidden states are swapped")
    reach: int = option(8, "farthest that jitter moves a position")
    gap: int = option(1, "positions left out at a gap")
    at: float = option(0.05, "rate at which axes, heads and the equivalence of positions and features are looked at")
    axes: bool = option(True, "also fit the three axes under each kind, and measure how sensitive heads are")
    equivalence: bool = option(True, "also compare swapped positions with swapped features")
    queries: int = option(16, "last tokens at which the sensitivity of heads is taken")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for kind in self.kinds:
            if kind not in KINDS:
                raise ConfigError(f"there is no kind of perturbation '{kind}': {nearest(kind, KINDS)}")
        for name in ("kinds", "rates", "layers"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"{name}={','.join(map(str, values))}: each value can be given only once")
        if not self.rates:
            raise ConfigError("rates is empty: give one or more shares from 0 to 1")
        for rate in (*self.rates, self.at):
            if not 0 <= rate <= 1:
                raise ConfigError(f"rate {rate:g} is outside 0 to 1: a rate is the share of units that are disturbed")
        for name in ("seeds", "reach", "gap", "queries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        check_seed(self.seed)
        if not self.layers or min(self.layers) < 0:
            raise ConfigError(f"layers={','.join(map(str, self.layers))}: give one or more layers, 0 the first")
