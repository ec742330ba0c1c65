"""How statistics of heads go together over the heads of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from wherewhat.measure.base import LayerScores
from wherewhat.measure.correlation import correlation

PAIRS = {
    "corr_pos_sym": ("s_pos", "s_sym"),
    "corr_pos_frequency": ("s_pos", "mean_frequency"),
    "corr_sym_frequency": ("s_sym", "mean_frequency"),
    "corr_pos_distance": ("s_pos", "r_a"),
    "corr_sym_key": ("s_sym", "r_c"),
    "corr_pos_r": ("s_pos", "r"),
}
"""Correlations over heads, by name."""


def relations(layers: Sequence[LayerScores]) -> Mapping[str, float]:
    """The correlations over all heads of a model, those that are defined."""
    found: dict[str, float] = {}
    for name, (first, second) in PAIRS.items():
        both = [layer for layer in layers if first in layer.heads and second in layer.heads]
        if both:
            value = correlation(*(torch.cat([layer.heads[m].cpu() for layer in both]) for m in (first, second)))
            if not math.isnan(value):
                found[name] = value
    return found
