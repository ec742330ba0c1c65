"""ALiBi (Press et al., arXiv 2108.12409): logits fall linearly with the distance, by a slope of each head's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherewhat.multihop.encodings.base import Encoding


def _slopes(heads: int) -> Tensor:
    """``2^(-8i/heads)`` for i from 1; where heads are no power of 2, every other one of twice as many fills up."""

    def powers(count: int) -> list[float]:
        return [2 ** (-8 * i / count) for i in range(1, count + 1)]

    whole = 2 ** math.floor(math.log2(heads))
    return torch.tensor((powers(whole) + powers(2 * whole)[::2])[:heads])


ALIBI = Encoding("alibi", "logits fall linearly with the distance", slopes=_slopes)
