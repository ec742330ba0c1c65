"""RoPE's planes: their magnitudes, phases and shares of the logits, and the residual they allow at most."""

from wherewhat.measure.planes.bound import ResidualBound, residual_bound
from wherewhat.measure.planes.layout import Planes
from wherewhat.measure.planes.measurement import PLANES, PlanesConfig
from wherewhat.measure.planes.statistics import PlaneStats, plane_stats

__all__ = ["PLANES", "PlaneStats", "Planes", "PlanesConfig", "ResidualBound", "plane_stats", "residual_bound"]
