"""Everything that says what a head does, on the same heads: swap scores, patterns, axes and frequencies."""

from wherewhat.measure.heads.measurement import HEADS

__all__ = ["HEADS"]
