"""Positional and symbolic scores by swapping tokens."""

from __future__ import annotations

SCORES = ("s_pos", "s_sym", "s_pos_no_sink", "s_sym_no_sink")
"""Positional and symbolic score over all keys, and over the keys after the sink."""

SCORE_LABELS = ("mixed", "positional", "symbolic", "uniform")
"""Labels that follow from the two scores alone (arXiv 2605.31558)."""

LABELS = (*SCORE_LABELS, "sink")
"""Names of the codes that :func:`~wherewhat.measures.swaps.scores.label` returns."""

SINK = 0.3
"""Attention on the first tokens, beyond that of uniform attention, from which on a head is a sink head.

arXiv 2410.10781 uses the same share. In heads of trained models with more, the first key is the most attended one of
most queries, so that scores over all keys describe the sink."""

TAU = 1e-4
"""Temperature of the swap weights in arXiv 2605.31558."""
