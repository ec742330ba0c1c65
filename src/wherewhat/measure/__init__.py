"""Measurements: pure functions from captured tensors to typed results."""

from wherewhat.measure.attention import AttentionConfig, AttentionStats, attention_stats, effective_rank
from wherewhat.measure.base import Curve, DocumentScores, LayerScores, Measurement, Metric, Subject
from wherewhat.measure.registry import MEASUREMENTS, find

__all__ = [
    "MEASUREMENTS",
    "AttentionConfig",
    "AttentionStats",
    "Curve",
    "DocumentScores",
    "LayerScores",
    "Measurement",
    "Metric",
    "Subject",
    "attention_stats",
    "effective_rank",
    "find",
]
