"""PoPE (Gopalakrishnan et al., arXiv 2509.10534): dimensions of q and k are lengths, and positions alone are angles.

Each dimension has a plane of its own. Content gives the length, softplus of the dimension; the position gives the
angle; keys are turned further by a learned phase of each head and dimension. With a query at i and a key at j,

    logit = Σ_f softplus(q_f) softplus(k_f) cos((j - i) θ_f + δ_f),    θ_f = base^(-f/d),    f = 0 .. d - 1.

As in the paper, δ is held within -2π and 0. It starts at 0, the choice that the paper found to keep longer texts
readable (the other is uniform over the range).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat.multihop.encodings.base import Encoding


def polar(x: Tensor, turn: Tensor, phase: Tensor | None = None) -> Tensor:
    """Queries or keys as planes, the two dimensions of each side by side, ``(batch, n, heads, 2 d)``.

    Args:
        x: Queries or keys as projected, ``(batch, n, heads, d)``.
        turn: Cosine and sine of each plane's angle, ``(n, heads or 1, d, 2)``; both 0 where a plane may not be used.
        phase: What is added to the angles, ``(heads, d)``; None for nothing.
    """
    cos, sin = turn.unbind(-1)
    if phase is not None:
        phase = phase.clamp(-2 * math.pi, 0)
        c, s = phase.cos(), phase.sin()
        cos, sin = cos * c - sin * s, sin * c + cos * s
    length = functional.softplus(x)
    return torch.stack((length * cos, length * sin), -1).flatten(-2)


def _every_dimension(d: int, base: float, share: float) -> Tensor:
    return 1.0 / (base ** (torch.arange(d) / d))


POPE = Encoding("pope", "dimensions are lengths, positions alone turn them", _every_dimension, polar=True)
