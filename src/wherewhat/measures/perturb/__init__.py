"""Loss under word-order and position perturbation: kinds and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wherewhat.boundary import MOST_LAYERS, MOST_REPEATS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import check_minimum
from wherewhat.options import check_seed, nearest, option

KINDS: dict[str, str] = {
    "words": "words transposed",
    "adjacent_words": "adjacent words transposed",
    "tokens": "tokens transposed",
    "adjacent_tokens": "adjacent tokens transposed",
    "sentences": "sentences transposed",
    "letters": "words with letters transposed",
    "position_jitter": "positions jittered",
    "position_swap": "positions swapped",
    "position_shuffle": "positions shuffled",
    "position_gaps": "gaps between positions",
    "position_shift": "positions shifted",
    "features": "hidden states swapped",
}
"""Title of each kind of perturbation, most important first."""


class Perturbation(NamedTuple):
    """A kind of perturbation under which numbers are stored; of each layer where hidden states are swapped.

    Attributes:
        kind: The kind.
        label: Its name in metrics.
        title: Its title.
        layer: The layer, if it is of one layer.
    """

    kind: str
    label: str
    title: str
    layer: int | None


def perturbations(kinds: Sequence[str], layers: Sequence[int]) -> Iterator[Perturbation]:
    """Yield the perturbations of some kinds."""
    for kind in kinds:
        if kind == "features":
            for layer in layers:
                yield Perturbation(kind, f"{kind}_{layer}", f"{KINDS[kind]}, layer {layer}", layer)
        else:
            yield Perturbation(kind, kind, KINDS[kind], None)


def percent(rate: float) -> str:
    """Return a rate as it is written in names of metrics: 5 for 0.05."""
    return f"{100 * rate:.6g}"


_MOST_STEP = 1 << 20
"""Largest change of a position."""


@dataclass(frozen=True)
class PerturbConfig:
    """Options of the perturb measurement."""

    kinds: tuple[str, ...] = option((), f"of {', '.join(KINDS)}; all that the model and the text allow if empty")
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to perturb, 0 to 1")
    seeds: int = option(3, "draws per rate, averaged")
    seed: int = option(0, "seed of the first draw")
    layers: tuple[int, ...] = option((0,), "layers, one at a time, whose input hidden states are swapped")
    reach: int = option(8, "largest change of a position by jitter")
    gap: int = option(1, "positions left out at a gap")
    at: float = option(0.05, "rate at which axes, heads and the equivalence of positions and features are measured")
    axes: bool = option(True, "also fit the three axes under each kind, and measure the sensitivity of heads")
    equivalence: bool = option(True, "also compare swapped positions with swapped features")
    queries: int = option(16, "number of last tokens at which the sensitivity of heads is measured")

    def __post_init__(self) -> None:
        """Check the values."""
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
                raise ConfigError(f"rate {rate:g} is outside 0 to 1: a rate is the share of units that are perturbed")
        check_minimum(self, 1, "seeds", most=MOST_REPEATS)
        check_minimum(self, 1, "reach", "gap", most=_MOST_STEP)
        check_minimum(self, 1, "queries")
        check_at_most(MOST_LAYERS, layers=self.layers)
        check_seed(self.seed)
        if not self.layers or min(self.layers) < 0:
            raise ConfigError(f"layers={','.join(map(str, self.layers))}: give one or more layers, 0 the first")
