"""Position encodings of the small model: RoPE, partial RoPE, p-RoPE, PoPE, ALiBi, learned, none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from wherewhat.captures.rotation import Rotation
from wherewhat.errors import ConfigError
from wherewhat_lab.config import LabConfig


@dataclass(frozen=True)
class Encoding:
    """A position encoding.

    Attributes:
        inv_freq: Function of the head's dimensions, the base and the rotated share that returns the angle per position
            of the head's first planes, ``(planes,)`` float32; None without rotation.
        share: Rotated share by default.
        slopes: Function of the number of heads that returns ALiBi's slopes ``(heads,)``: the decrease of a logit per
            position of distance.
        learned: Whether a learned vector is added to each token's embedding.
        polar: Whether each dimension of q and k is the magnitude of one plane (PoPE, arXiv 2509.10534).
    """

    inv_freq: Callable[[int, float, float], Tensor] | None = None
    share: float = 1.0
    slopes: Callable[[int], Tensor] | None = None
    learned: bool = False
    polar: bool = False


def _slopes(heads: int) -> Tensor:
    """Return ``2^(-8i/heads)`` for i from 1; for other than powers of 2, add every second slope of twice as many."""

    def powers(count: int) -> list[float]:
        return [2 ** (-8 * i / count) for i in range(1, count + 1)]

    whole = 2 ** math.floor(math.log2(heads))
    return torch.tensor((powers(whole) + powers(2 * whole)[::2])[:heads])


_FORM = re.compile(r"(\*|\d+)\.(\*|\d+):((?:\d+(?:-\d+)?)(?:\+\d+(?:-\d+)?)*)?")


def allowed_planes(entries: Sequence[str], *, layers: int, heads: int, planes: int) -> Tensor | None:
    """Return True for each plane that a head may use, ``(layers, heads, planes)``; None if all may be used.

    Args:
        entries: Entries ``layer.head:planes``. ``*`` stands for every layer or head; planes are numbers and ranges with
            both ends, joined by ``+``, counted from 0, the fastest. A later entry replaces an earlier one for the same
            head; heads without an entry may use all.
        layers: Number of layers.
        heads: Heads of each layer.
        planes: Planes of each head: half its dimensions, rotated or not.
    """
    if not entries:
        return None
    allowed = torch.ones(layers, heads, planes, dtype=torch.bool)
    for entry in entries:
        form = _FORM.fullmatch(entry.replace(" ", ""))
        if form is None:
            raise ConfigError(
                f"frequencies {entry!r} is not of the form layer.head:planes, such as *.*:0-15 or 2.0:0+4-7"
            )
        layer, head = _index(form[1], layers, "layer", entry), _index(form[2], heads, "head", entry)
        chosen = torch.zeros(planes, dtype=torch.bool)
        for part in form[3].split("+") if form[3] else ():
            first, _, last = part.partition("-")
            begin, end = (_index(plane, planes, "plane", entry) for plane in (first, last or first))
            chosen[begin.start : end.stop] = True
        allowed[layer, head] = chosen
    return None if bool(allowed.all()) else allowed


def _index(text: str, count: int, what: str, entry: str) -> slice:
    if text == "*":
        return slice(0, count)
    if int(text) >= count:
        raise ConfigError(f"frequencies {entry!r} names {what} {text}: there are {count}, counted from 0")
    return slice(int(text), int(text) + 1)


def geometric(d: int, base: float) -> Tensor:
    """Return angles per position ``base^(-2i/d)``, ``(d / 2,)`` float32, rounded as in GPT-J."""
    return 1.0 / (base ** (torch.arange(0, d, 2) / d))


def _without_lowest(d: int, base: float, share: float) -> Tensor:
    inv_freq = geometric(d, base)
    inv_freq[round(share * len(inv_freq)) :] = 0
    return inv_freq


def _first_dimensions(d: int, base: float, share: float) -> Tensor:
    rotated = 2 * round(share * d / 2)
    if rotated == 0:
        raise ConfigError(f"a rotary_share of {share} of {d} dimensions leaves none to rotate")
    return geometric(rotated, base)


def polar(x: Tensor, turn: Tensor, phase: Tensor | None = None) -> Tensor:
    """Return queries or keys as planes with interleaved dimensions, ``(batch, n, heads, 2 d)``.

    Args:
        x: Queries or keys as projected, ``(batch, n, heads, d)``.
        turn: Cosine and sine of each plane's angle, ``(n, heads or 1, d, 2)``; both 0 where a plane may not be used.
        phase: Phases added to the angles, ``(heads, d)``; None for none.
    """
    cos, sin = turn.unbind(-1)
    if phase is not None:
        phase = phase.clamp(-2 * math.pi, 0)
        c, s = phase.cos(), phase.sin()
        cos, sin = cos * c - sin * s, sin * c + cos * s
    length = functional.softplus(x)
    return torch.stack((length * cos, length * sin), -1).flatten(-2)


ENCODINGS = {
    "rope": Encoding(lambda d, base, share: geometric(d, base)),  # all planes of q and k rotate with the position
    "p-rope": Encoding(_without_lowest, share=0.75),  # RoPE without its lowest frequencies
    "partial": Encoding(_first_dimensions, share=0.25),  # RoPE on the first dimensions of a head alone
    "alibi": Encoding(slopes=_slopes),  # logits decrease linearly with the distance
    "learned": Encoding(learned=True),  # a learned vector for each position
    "nope": Encoding(),  # no encoding, only the causal mask
    # Dimensions are magnitudes, rotation depends on the position only.
    "pope": Encoding(lambda d, base, share: 1.0 / (base ** (torch.arange(d) / d)), polar=True),
}
"""All encodings by name."""


@dataclass(frozen=True)
class PositionTables:
    """Precomputed tensors of one layer that depend on positions.

    Attributes:
        turn: Complex factor of each plane of q and k, ``(n, 1, heads or 1, planes)``: a rotation, or 0 where the head
            may not use the plane. None if there is neither rotation nor restriction.
        slopes: ALiBi's slopes, ``(heads,)``; None without ALiBi.
        positions: Positions of the tokens, ``(n,)``.
        dtype: Dtype of the logits.
    """

    turn: Tensor | None
    slopes: Tensor | None
    positions: Tensor
    dtype: torch.dtype

    @cached_property
    def real_turn(self) -> Tensor | None:
        """``turn`` as cosine and sine, ``(n, 1, heads or 1, planes, 2)``."""
        return None if self.turn is None else torch.view_as_real(self.turn)

    @cached_property
    def bias(self) -> Tensor | None:
        """Bias on the logits, ``(heads, n, n)``; None if there is none."""
        if self.slopes is None:
            return None
        return self.slopes[:, None, None] * (self.positions[None] - self.positions[:, None])

    @cached_property
    def hidden(self) -> Tensor:
        """Causal mask plus bias: -inf where a key comes after the query, ``(heads or 1, n, n)``."""
        n = len(self.positions)
        hidden = torch.full((n, n), -torch.inf, device=self.positions.device, dtype=self.dtype).triu_(1)[None]
        return hidden if self.bias is None else hidden + self.bias


def find_rotation(config: LabConfig) -> Rotation | None:
    """Return the rotation of queries and keys; None if there is none."""
    encoding = ENCODINGS[config.encoding]
    if encoding.inv_freq is None:
        return None
    if config.angles:
        return Rotation("interleaved", 0, torch.tensor(config.angles, dtype=torch.float32), 1.0)
    share = encoding.share if config.rotary_share is None else config.rotary_share
    return Rotation("interleaved", 0, encoding.inv_freq(config.head_width, config.base, share), 1.0)


def make_position_tables(
    config: LabConfig, positions: Tensor, *, device: torch.device, dtype: torch.dtype
) -> list[PositionTables]:
    """Return one entry per layer, for tokens at ``positions`` ``(n,)``."""
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
    first = PositionTables(turns[0], slopes, where, dtype)
    # Layers with equal tables share one object, so that its bias is computed once.
    return [first if turn is turns[0] else PositionTables(turn, slopes, where, dtype) for turn in turns]
