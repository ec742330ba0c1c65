"""The keys beyond a window, and how many queries to treat at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing import LayerAttention
from wherewhat.extend.parts import placed, working

Choice = Callable[[Tensor, slice], Tensor]
"""Of queries ``(batch, heads, rows, d)`` placed for the far keys: the blocks or keys each of them may see."""


@dataclass(frozen=True)
class Far:
    """The first keys of a text as seen from beyond the window.

    Attributes:
        count: How many of the first keys can be seen from beyond the window.
        query: Position from which a query looks at them, from its index ``(rows,)``.
        key: Position at which a key stands then, from its index ``(c,)``.
        choose: Keys that single queries may see, ``(batch, rows, count)`` bool, from the placed queries and the rows;
            None for all.
    """

    count: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    choose: Choice | None = None


def capped(count: int, window: int) -> Far:
    """The first keys, all at distance ``window``."""
    return Far(count=count, query=lambda i: torch.full_like(i, window), key=torch.zeros_like)


def far_keys(attention: LayerAttention, far: Far) -> Tensor:
    """The first keys where the far queries see them, ``(batch, kv_heads, count, d)``."""
    j = torch.arange(min(far.count, attention.m), device=attention.rot_k.device)
    return placed(attention, attention.rot_k[:, :, : len(j)], j, far.key(j))


def blocks(attention: LayerAttention, keys: int, *, block_mib: int, most: int | None = None) -> Iterator[slice]:
    """Blocks of queries whose logits over ``keys`` keys fit into some MiB."""
    batch, heads, n = attention.rot_q.shape[:3]
    width = torch.finfo(working(attention)).bits // 8
    rows = max(1, block_mib * 2**20 // (width * batch * heads * max(1, keys)))
    rows = rows if most is None else min(rows, most)
    for start in range(0, n, rows):
        yield slice(start, min(n, start + rows))
