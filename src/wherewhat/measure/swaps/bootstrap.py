"""Bootstrap intervals of means over documents and queries."""

from __future__ import annotations

import torch
from torch import Tensor


def interval(values: Tensor, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Tensor:
    """Percentile interval of the mean over documents and queries, ``(heads, 2)``.

    Documents are drawn with replacement, and of each drawn document its queries (Efron & Tibshirani 1993, ch. 8): two
    queries of one text are less independent than queries of two texts. NaN values are left out.

    Args:
        values: ``(heads, documents, queries)``.
        level: Share of draws inside.
        draws: Number of draws.
        seed: The same seed gives the same interval.
    """
    _, documents, queries = values.shape
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(draws, documents * queries, dtype=torch.float64)
    ones = torch.ones(draws, queries, dtype=torch.float64)
    for _ in range(documents):
        chosen = torch.randint(documents, (draws, 1), generator=generator)
        picked = torch.randint(queries, (draws, queries), generator=generator)
        counts.scatter_add_(1, chosen * queries + picked, ones)
    flat = values.flatten(1).double().cpu()
    known = ~flat.isnan()
    means = flat.nan_to_num(0.0) @ counts.T / (known.double() @ counts.T)  # (heads, draws)
    edge = (1 - level) / 2
    bounds = torch.tensor([edge, 1 - edge], dtype=torch.float64)
    return means.nanquantile(bounds, dim=-1).T
