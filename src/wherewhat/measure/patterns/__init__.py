"""Patterns that heads are known by: slashes, previous, duplicate, induction and retrieval tokens, rank-one tokens."""

from wherewhat.measure.patterns.scores import METRICS, layer_scores
from wherewhat.measure.patterns.statistics import PatternConfig, PatternStatistics, RankOne, pattern_statistics
from wherewhat.measure.patterns.targets import TargetMass

__all__ = [
    "METRICS",
    "PatternConfig",
    "PatternStatistics",
    "RankOne",
    "TargetMass",
    "layer_scores",
    "pattern_statistics",
]
