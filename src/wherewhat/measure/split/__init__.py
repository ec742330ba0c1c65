"""Queries and keys as a position part, the same for all documents, and a content part."""

from wherewhat.measure.split.logits import LogitSplit, LogitSums, logit_split
from wherewhat.measure.split.measurement import SPLIT, SplitConfig
from wherewhat.measure.split.statistics import Estimate, Others, PositionShare, PositionSums, position_share

__all__ = [
    "SPLIT",
    "Estimate",
    "LogitSplit",
    "LogitSums",
    "Others",
    "PositionShare",
    "PositionSums",
    "SplitConfig",
    "logit_split",
    "position_share",
]
