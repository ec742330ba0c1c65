"""Positional and symbolic scores by swapping tokens."""

from __future__ import annotations

LABELS = ("mixed", "positional", "symbolic", "uniform")
"""Names of the codes that :func:`label` gives."""


TAU = 1e-4
"""Temperature of the weights of swaps in arXiv 2605.31558."""
