"""The small operations around a layer's attention as a few GPU kernels of their own, by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wherewhat.multihop.block import Block
from wherewhat.multihop.model import LabModel


@contextmanager
def fused(model: LabModel, wanted: bool = True) -> Iterator[None]:
    """Run what comes before and after each layer's attention compiled; attention is left to its own kernel.

    Only for the time of the context, so that passes of other shapes do not compile theirs.

    Args:
        model: The model.
        wanted: Whether to; if not, nothing changes.
    """
    blocks = [block for block in model.blocks if isinstance(block, Block)] if wanted else []
    for block in blocks:
        block.__dict__["enter"] = torch.compile(block.enter, dynamic=False)
        block.__dict__["combine"] = torch.compile(block.combine, dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.__dict__["enter"], block.__dict__["combine"]
