"""Work shared out among a processor's cores: each takes whole parts and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

_TOKENS = {"cpu": 2**12, "cuda": 2**18}
"""Tokens of a part: what keeps a processor's caches, or a GPU, busy."""


def rows_in_parts(count: int, n: int, device: torch.device) -> list[slice]:
    """``count`` sequences of ``n`` tokens in parts of about the same size and of bounded memory."""
    most = max(1, _TOKENS.get(device.type, 2**14) // n)
    edges = torch.linspace(0, count, -(-count // most) + 1, dtype=torch.float64).round().long().tolist()
    return [slice(start, stop) for start, stop in pairwise(edges)]


def in_parts(work: Callable[[Part], Result], parts: Sequence[Part], device: torch.device) -> list[Result]:
    """``work`` on every part, in order, without gradients.

    On a CPU as many parts at a time as torch has threads, one thread each: at this size torch's own way, all threads on
    each operation, is mostly waiting, and what comes out would depend on their number.

    Args:
        work: What to do with a part.
        parts: The parts.
        device: Where it is done; on a GPU parts are done one after the other.
    """

    def alone(part: Part) -> Result:
        with torch.no_grad():  # whether gradients are kept is a matter of each thread
            return work(part)

    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return [alone(part) for part in parts]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(threads)
