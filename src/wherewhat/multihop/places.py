"""What a model's encoding does to the attention over n tokens: turns of planes and a bias, made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wherewhat.capturing.rotation import Rotation
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.encodings import ENCODINGS, allowed_planes


@dataclass(frozen=True)
class Place:
    """What one layer's attention needs to know about positions.

    Attributes:
        turn: Factor of each plane of q and k as a complex number, ``(n, 1, heads or 1, planes)``: it turns the plane,
            or is 0 where the head may not use it. None if it would change nothing.
        slopes: What a key's logit loses per position of distance, ``(heads,)``; None if nothing.
        positions: Where the tokens are, ``(n,)``.
        dtype: Dtype of the logits.
    """

    turn: Tensor | None
    slopes: Tensor | None
    positions: Tensor
    dtype: torch.dtype

    @cached_property
    def real_turn(self) -> Tensor | None:
        """The factors as cosine and sine, ``(n, 1, heads or 1, planes, 2)``."""
        return None if self.turn is None else torch.view_as_real(self.turn)

    @cached_property
    def bias(self) -> Tensor | None:
        """What is added to the logits, ``(heads, n, n)``; None if nothing is."""
        if self.slopes is None:
            return None
        return self.slopes[:, None, None] * (self.positions[None] - self.positions[:, None])

    @cached_property
    def hidden(self) -> Tensor:
        """-inf where a key comes after the query, the bias elsewhere, ``(heads or 1, n, n)``."""
        n = len(self.positions)
        hidden = torch.full((n, n), -torch.inf, device=self.positions.device, dtype=self.dtype).triu_(1)[None]
        return hidden if self.bias is None else hidden + self.bias


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


def make_places(config: LabConfig, positions: Tensor, *, device: torch.device, dtype: torch.dtype) -> list[Place]:
    """One entry per layer, for tokens at ``positions`` ``(n,)``.

    Raises:
        ConfigError: If the config names planes that are not there.
    """
    positions = positions.cpu()
    encoding = ENCODINGS[config.encoding]
    planes = config.head_width if encoding.polar else config.head_width // 2
    rotation = find_rotation(config)
    allowed = allowed_planes(config.frequencies, layers=config.layers, heads=config.heads, planes=planes)
    turns: list[Tensor | None] = [None] * config.layers
    if rotation is not None or allowed is not None:
        angles = torch.zeros(len(positions), planes)
        if rotation is not None:
            angles[:, : rotation.planes] = rotation.angles(positions)
        turn = torch.complex(angles.cos(), angles.sin())[:, None, None]
        turn = turn.to(device, torch.complex128 if dtype == torch.float64 else torch.complex64)
        turns = [turn if allowed is None else turn * allowed[layer].to(device) for layer in range(config.layers)]
    slopes = None if encoding.slopes is None else encoding.slopes(config.heads).to(device, dtype)
    where = positions.to(device)
    first = Place(turns[0], slopes, where, dtype)
    # Layers that need the same share one place, so that its bias is made once.
    return [first if turn is turns[0] else Place(turn, slopes, where, dtype) for turn in turns]
