"""Attention weights a block of queries at a time, how far they spread, and the rank of queries and keys."""

from wherewhat.measure.attention.measurement import ATTENTION, AttentionConfig, AttentionStats, attention_stats
from wherewhat.measure.attention.rank import effective_rank, gaussian_rank

__all__ = ["ATTENTION", "AttentionConfig", "AttentionStats", "attention_stats", "effective_rank", "gaussian_rank"]
