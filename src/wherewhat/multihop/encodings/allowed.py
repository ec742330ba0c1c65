"""Which planes the heads of a model may use, written as text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from wherewhat.errors import ConfigError

_FORM = re.compile(r"(\*|\d+)\.(\*|\d+):((?:\d+(?:-\d+)?)(?:\+\d+(?:-\d+)?)*)?")


def allowed_planes(entries: Sequence[str], *, layers: int, heads: int, planes: int) -> Tensor | None:
    """True for each plane that a head may use, ``(layers, heads, planes)``; None if nothing is forbidden.

    Args:
        entries: Entries ``layer.head:planes``. ``*`` stands for every layer or head; planes are numbers and ranges with
            both ends, joined by ``+``, counted from 0, the fastest. A later entry replaces an earlier one for the same
            head; heads without one may use all.
        layers: Number of layers.
        heads: Heads of each layer.
        planes: Planes of each head: half its dimensions, rotated or not.

    Raises:
        ConfigError: If an entry is not of that form or names what is not there.
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
        for part in (form[3] or "").split("+") if form[3] else ():
            first, _, last = part.partition("-")
            chosen[_index(first, planes, "plane", entry).start : _index(last or first, planes, "plane", entry).stop] = (
                True
            )
        allowed[layer, head] = chosen
    return None if bool(allowed.all()) else allowed


def _index(text: str, count: int, what: str, entry: str) -> slice:
    if text == "*":
        return slice(0, count)
    if int(text) >= count:
        raise ConfigError(f"frequencies {entry!r} names {what} {text}: there are {count}, counted from 0")
    return slice(int(text), int(text) + 1)
