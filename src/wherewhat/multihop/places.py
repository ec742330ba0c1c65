"""What a model's encoding does to the attention over n tokens: turns of planes and a bias, made once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.rotation import Rotation
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.encodings import ENCODINGS, allowed_planes


@dataclass(frozen=True)
class Place:
    """What one layer's attention needs to know about positions.

    Attributes:
        turn: Factor of each plane of q and k as a complex number, ``(n, 1, heads or 1, d / 2)``: it turns the plane, or
            is 0 where the head may not use it. None if it would change nothing.
        bias: What is added to the logits, ``(heads, n, n)``; None if nothing is.
        hidden: -inf where a key comes after the query, ``bias`` elsewhere, ``(heads or 1, n, n)``.
    """

    turn: Tensor | None
    bias: Tensor | None
    hidden: Tensor


def find_rotation(config: LabConfig) -> Rotation | None:
    """How queries and keys are rotated; None if they are not.

    Raises:
        ConfigError: If nothing would be left to rotate.
    """
    encoding = ENCODINGS[config.encoding]
    if encoding.inv_freq is None:
        return None
    if config.angles:
        return Rotation("interleaved", 0, torch.tensor(config.angles, dtype=torch.float32), 1.0)
    share = encoding.share if config.rotary_share is None else config.rotary_share
    return Rotation("interleaved", 0, encoding.inv_freq(config.head_width, config.base, share), 1.0)


def make_places(config: LabConfig, n: int, *, device: torch.device, dtype: torch.dtype) -> list[Place]:
    """One entry per layer, for ``n`` tokens.

    Raises:
        ConfigError: If the config names planes that are not there.
    """
    planes = config.head_width // 2
    rotation = find_rotation(config)
    allowed = allowed_planes(config.frequencies, layers=config.layers, heads=config.heads, planes=planes)
    turns: list[Tensor | None] = [None] * config.layers
    if rotation is not None or allowed is not None:
        angles = torch.zeros(n, planes)
        if rotation is not None:
            angles[:, : rotation.planes] = rotation.angles(torch.arange(n))
        turn = torch.complex(angles.cos(), angles.sin())[:, None, None]
        turn = turn.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)
        turns = [turn if allowed is None else turn * allowed[layer].to(device) for layer in range(config.layers)]
    hidden = torch.full((n, n), -torch.inf, device=device, dtype=dtype).triu_(1)[None]
    slopes = ENCODINGS[config.encoding].slopes
    bias: Tensor | None = None
    if slopes is not None:
        ahead = torch.arange(n)[None] - torch.arange(n)[:, None]
        bias = (slopes(config.heads)[:, None, None] * ahead).to(device, dtype)
        hidden = hidden + bias
    return [Place(turn, bias, hidden) for turn in turns]
