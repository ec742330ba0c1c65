"""The list of measurements. Everything that can be measured, run or reported is derived from it."""

from __future__ import annotations

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.measure.attention import ATTENTION
from wherewhat.measure.axes.measurement import AXES
from wherewhat.measure.base import Measurement
from wherewhat.measure.choices import CHOICES
from wherewhat.measure.distance import DISTANCE
from wherewhat.measure.frequencies import FREQUENCIES
from wherewhat.measure.heads import HEADS
from wherewhat.measure.lengths import EXTEND
from wherewhat.measure.perturb import PERTURB
from wherewhat.measure.planes import PLANES
from wherewhat.measure.prompts import PROMPTS
from wherewhat.measure.residual import RESIDUAL
from wherewhat.measure.split import SPLIT

MEASUREMENTS: tuple[Measurement, ...] = (
    AXES,
    DISTANCE,
    PLANES,
    RESIDUAL,
    SPLIT,
    HEADS,
    FREQUENCIES,
    PROMPTS,
    PERTURB,
    CHOICES,
    EXTEND,
    ATTENTION,
)


def find(name: str) -> Measurement:
    """The measurement of that name.

    Raises:
        ConfigError: If there is none, with the nearest name.
    """
    by_name = {m.name: m for m in MEASUREMENTS}
    if name in by_name:
        return by_name[name]
    raise ConfigError(f"there is no measurement '{name}': {nearest(name, by_name, cutoff=0.6)}")
