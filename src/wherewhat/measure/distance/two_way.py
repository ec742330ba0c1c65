"""Analysis of variance of the table of logits over keys and distances, without making the table."""

from __future__ import annotations

import torch
from torch import Tensor


def additive_shares(turned: Tensor, curve: Tensor, centred: Tensor, energy: Tensor) -> dict[str, Tensor]:
    """Shares of the two-way table's variance, ``(kv_heads, groups)``, from the Gram matrix of the keys.

    With C the Gram matrix of the centred keys and w_d the turned queries, the key term's square is D·w̄ᵀCw̄, the
    interaction's Σ_d (w_d − w̄)ᵀC(w_d − w̄), and the distance term's m·Σ_d (f_d − f̄)². All three are sums of squares,
    so nothing cancels.

    Args:
        turned: Turned queries, ``(kv_heads, groups, distances, d)``.
        curve: Mean over keys at each distance, ``(kv_heads, groups, distances)``.
        centred: Keys around their mean, ``(kv_heads, m, d)``.
        energy: Sum of squares of the keys themselves, ``(kv_heads,)``.
    """
    m, count = centred.shape[-2], turned.shape[-2]
    gram = (centred.mT @ centred)[:, None]  # (kv_heads, 1, d, d)
    mean = turned.mean(-2, keepdim=True)
    around = turned - mean
    interaction = ((around @ gram) * around).sum((-1, -2)).clamp_min(0)
    by_key = count * ((mean @ gram) * mean).sum((-1, -2)).clamp_min(0)
    by_distance = m * (curve - curve.mean(-1, keepdim=True)).square().sum(-1)
    total = interaction + by_key + by_distance
    # What rounding alone would leave of a constant table.
    least = 1e-24 * turned.square().sum((-1, -2)) * energy[:, None]
    divided = torch.where(total > least, total, torch.nan)
    return {
        "additive_share": (by_key + by_distance) / divided,
        "distance_share": by_distance / divided,
        "key_share": by_key / divided,
        "key_constancy": by_key / torch.where(by_key + interaction > least, by_key + interaction, torch.nan),
    }


def spread(values: Tensor) -> Tensor:
    """Standard deviation over the first dimension, leaving out NaN; NaN where fewer than two are left."""
    around = (values - values.nanmean(0)).square()
    count = around.isfinite().sum(0)
    return torch.where(count > 1, around.nansum(0) / (count - 1).clamp_min(1), torch.nan).sqrt()
