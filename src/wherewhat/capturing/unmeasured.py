"""Layers of a hybrid model that have no attention to measure: state-space, linear-attention or feed-forward layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from wherewhat.capturing.learn import Plan


@dataclass(frozen=True)
class Unmeasured:
    """A block that computes no softmax self-attention.

    Attributes:
        layer: Index of the block in its list.
        name: Path of the block in the model.
        reason: What it has in place of it: its kind, as the config names it, and the class of the module.
    """

    layer: int
    name: str
    reason: str


def unmeasured_layers(model: Any, plan: Plan) -> tuple[Unmeasured, ...]:
    """Blocks beside those of a plan that have none of its attention.

    Blocks are the numbered modules of a list of which at least one holds attention that was captured.
    """
    attention = {id(model.get_submodule(layer.name)) for layer in plan.layers}
    paths = [re.fullmatch(r"(?:(.*?)\.)??(\d+)(?:\.(.*))?", layer.name) for layer in plan.layers]
    # One measured block of each list, to compare the others with.
    lists = {found[1] or "": (found[2], (found[3] or "").partition(".")[0]) for found in paths if found is not None}
    return tuple(
        found for path, (number, child) in lists.items() for found in _others(model, path, number, child, attention)
    )


def _others(model: Any, path: str, number: str, child: str, attention: set[int]) -> Iterator[Unmeasured]:
    blocks = {name: block for name, block in model.get_submodule(path).named_children() if name.isdigit()}
    for other, block in blocks.items():
        # Blocks may share one attention module, which is named after the first of them.
        if attention.isdisjoint(map(id, block.modules())):
            kind = _kind(model, int(other), len(blocks))
            mixer = type(_mixer(block, blocks[number], child)).__name__
            yield Unmeasured(int(other), f"{path}.{other}".lstrip("."), f"{kind} ({mixer})" if kind else mixer)


def _kind(model: Any, index: int, count: int) -> str:
    """The kind of a layer in the model's config, if it has one for every layer."""
    config = model.config.get_text_config()
    for name in ("layers_block_type", "layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            return str(kinds[index])
    return ""


def _mixer(block: nn.Module, measured: nn.Module, attention: str) -> nn.Module:
    """What a block has in the place of a measured block's attention: the same name, or the largest that only it has."""
    children, known = dict(block.named_children()), dict(measured.named_children())
    if attention in children:
        return children[attention]
    own = (child for name, child in children.items() if name not in known)
    return max(own, key=lambda child: sum(parameter.numel() for parameter in child.parameters()), default=block)
