"""The list of measurements. Everything that can be measured, run or reported is derived from it."""

from __future__ import annotations

from wherewhat.errors import ConfigError
from wherewhat.measures.attention import ATTENTION
from wherewhat.measures.axes.measurement import AXES
from wherewhat.measures.choices import CHOICES
from wherewhat.measures.distance.measurement import DISTANCE
from wherewhat.measures.extend.measurement import EXTEND
from wherewhat.measures.frequencies.measurement import FREQUENCIES
from wherewhat.measures.heads import HEADS
from wherewhat.measures.measurement import Measurement
from wherewhat.measures.perturb.measurement import PERTURB
from wherewhat.measures.planes.measurement import PLANES
from wherewhat.measures.prompts import PROMPTS
from wherewhat.measures.residual import RESIDUAL
from wherewhat.measures.split.measurement import SPLIT
from wherewhat.options import nearest

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


def find_measurement(name: str) -> Measurement:
    """The measurement of that name."""
    by_name = {m.name: m for m in MEASUREMENTS}
    if name in by_name:
        return by_name[name]
    raise ConfigError(f"there is no measurement '{name}': {nearest(name, by_name, cutoff=0.6)}")
