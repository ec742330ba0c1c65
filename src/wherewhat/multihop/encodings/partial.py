"""Partial RoPE, as of GPT-J and GPT-NeoX: the first dimensions of a head turn, the others know no position."""

from __future__ import annotations

from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.encodings.base import Encoding
from wherewhat.multihop.encodings.rope import geometric


def _first_dimensions(d: int, base: float, share: float) -> Tensor:
    rotated = 2 * round(share * d / 2)
    if rotated == 0:
        raise ConfigError(f"a rotary_share of {share} of {d} dimensions leaves none to rotate")
    return geometric(rotated, base)


PARTIAL = Encoding("partial", "RoPE on the first dimensions of a head alone", _first_dimensions, share=0.25)
