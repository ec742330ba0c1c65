"""p-RoPE (Barbero et al., arXiv 2410.06205): RoPE whose lowest frequencies do not turn."""

from __future__ import annotations

from torch import Tensor

from wherewhat.multihop.encodings.base import Encoding
from wherewhat.multihop.encodings.rope import geometric


def _without_lowest(d: int, base: float, share: float) -> Tensor:
    inv_freq = geometric(d, base)
    inv_freq[round(share * len(inv_freq)) :] = 0
    return inv_freq


P_ROPE = Encoding("p-rope", "RoPE without its lowest frequencies", _without_lowest, share=0.75)
