"""Controlled distance: what a head's logits would be if every key stood at another distance."""

from wherewhat.measure.distance.controlled import ControlledDistance, controlled_distance
from wherewhat.measure.distance.measurement import DISTANCE, DistanceConfig
from wherewhat.measure.distance.turning import scramble_phases

__all__ = ["DISTANCE", "ControlledDistance", "DistanceConfig", "controlled_distance", "scramble_phases"]
