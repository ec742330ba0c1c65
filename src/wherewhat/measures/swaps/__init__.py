"""Positional and symbolic scores by swapping tokens."""

from __future__ import annotations

LABELS = ("mixed", "positional", "symbolic", "uniform")
"""Names of the codes that :func:`~wherewhat.measures.swaps.scores.label` returns."""

TAU = 1e-4
"""Temperature of the swap weights in arXiv 2605.31558."""
