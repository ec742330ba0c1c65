"""RoPE (Su et al., arXiv 2104.09864): every plane of a head turns, each at its own speed."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.multihop.encodings.base import Encoding


def geometric(d: int, base: float) -> Tensor:
    """Angles per position ``base^(-2i/d)``, ``(d / 2,)`` float32, rounded as GPT-J rounds them."""
    return 1.0 / (base ** (torch.arange(0, d, 2) / d))


ROPE = Encoding("rope", "all planes of q and k turn with the position", lambda d, base, share: geometric(d, base))
