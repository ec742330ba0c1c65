"""What an encoding is: angles of planes, slopes of a bias, a table of vectors, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Encoding:
    """One way to tell a model where its tokens are.

    Attributes:
        name: Its name among the options.
        summary: One line.
        inv_freq: Angle per position of a head's first planes, ``(planes,)`` float32, from the head's dimensions, the
            base and the share that rotates; None if nothing rotates.
        share: Share that rotates if none is given.
        slopes: What a key's logit loses per position of distance, ``(heads,)``, from the number of heads.
        learned: Whether a learned vector is added to each token's embedding.
        polar: Whether each dimension of q and k is the length of a plane of its own, as :mod:`.pope` says, and not one
            half of a plane.
    """

    name: str
    summary: str
    inv_freq: Callable[[int, float, float], Tensor] | None = None
    share: float = 1.0
    slopes: Callable[[int], Tensor] | None = None
    learned: bool = False
    polar: bool = False
