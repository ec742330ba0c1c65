"""Words for pairs of scores: pure positional, pure symbolic, uniform, or mixed."""

from __future__ import annotations

import torch
from torch import Tensor

LABELS = ("mixed", "positional", "symbolic", "uniform")
"""Names of the codes that :func:`label` gives."""


def label(s_pos: Tensor, s_sym: Tensor, gamma: float) -> Tensor:
    """Code of each head, an index into :data:`LABELS`, in the shape of the scores.

    A head is *pure* if one score is at least 1 - γ and the other at most γ, *uniform* if both are at least 1 - γ: only
    even attention can be both positional and symbolic (arXiv 2605.31558). NaN scores give -1.
    """
    high_pos, high_sym = s_pos >= 1 - gamma, s_sym >= 1 - gamma
    code = torch.zeros_like(s_pos, dtype=torch.int64)
    code[high_pos & (s_sym <= gamma)] = LABELS.index("positional")
    code[high_sym & (s_pos <= gamma)] = LABELS.index("symbolic")
    code[high_pos & high_sym] = LABELS.index("uniform")
    code[s_pos.isnan() | s_sym.isnan()] = -1
    return code
