"""Positional or symbolic: what attention does when contents change places."""

from wherewhat.measure.swaps.labels import LABELS, label
from wherewhat.measure.swaps.layer import Swaps, layer_swaps, swap_scores

__all__ = ["LABELS", "Swaps", "label", "layer_swaps", "swap_scores"]
