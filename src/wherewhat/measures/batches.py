"""Rows of a batch: texts and variants of a model that run together, as many as memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.session import Editor
from wherewhat.numerics import free_memory
from wherewhat.scores import copied_at_once

Value = TypeVar("Value")

_TOKENS = 512
"""Tokens that a CPU runs at once; it computes more of them no faster."""


def batch_mib(device: torch.device) -> int:
    """Return the memory for the logits of one batch in MiB: an eighth of a GPU's free memory, 1,024 elsewhere.

    At most 16 GiB, since larger batches are not faster.
    """
    if device.type != "cuda":
        return 1024
    return max(1, min(16 * 1024, free_memory(device) // 8 // 2**20))


def rows_at_once(logits: Tensor, *, tokens: int | None = None) -> int:
    """Return the number of texts to run at once.

    Args:
        logits: Logits ``(texts, n, vocabulary)`` of an earlier pass.
        tokens: Tokens of each text; n by default.
    """
    tokens = tokens or logits.shape[1]
    if logits.device.type != "cuda":
        return max(1, _TOKENS // tokens)
    # As much again as the logits take is left for the hidden states of the batch.
    return max(1, batch_mib(logits.device) * 2**20 // (2 * tokens * logits[0, 0].nbytes))


def chunks(count: int, most: int) -> list[slice]:
    """Return consecutive slices of at most ``most`` of ``count`` items."""
    return [slice(start, min(count, start + most)) for start in range(0, count, most)]


def equal_runs(values: Sequence[Value]) -> Iterator[tuple[Value, slice]]:
    """Yield each run of equal values with its place."""
    at = 0
    for value, same in itertools.groupby(values):
        count = len(list(same))
        yield value, slice(at, at + count)
        at += count


def in_order(hidden: Tensor, order: Tensor) -> Tensor:
    """Return hidden states ``(texts, n, d)`` in another order of the tokens, ``(n,)`` or ``(texts, n)``."""
    return hidden[:, order] if order.ndim == 1 else hidden.take_along_dim(order[..., None], 1)


def edited_rows(
    edited: Callable[[Tensor, Editor], Tensor],
    ids: Tensor,
    editor: Callable[[LayerAttention, slice], Tensor | None],
    read: Callable[[Tensor, slice], Sequence[Tensor]],
    *,
    most: int,
) -> list[Tensor]:
    """Run texts under an editor, some rows at a time, and return numbers of each row on the CPU, read at once.

    Args:
        edited: Returns logits of texts with layers replaced by an editor, as ``subject.edited`` does.
        ids: Tokens ``(rows, n)``.
        editor: Called with each layer and its rows; returns the output ``(rows, n, heads, d_v)``, or None.
        read: Returns numbers of each row from the logits ``(rows, n, vocabulary)`` of some rows, on their device.
        most: Largest number of rows of a pass.
    """
    numbers: list[Tensor] = []
    for rows in chunks(len(ids), most):
        logits = edited(ids[rows], lambda attention, own=rows: editor(attention, own))  # type: ignore[misc]
        numbers += read(logits, rows)
        del logits  # logits of long texts are gigabytes, and are freed before the next pass
    return read_at_once(numbers)


def read_at_once(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of any shapes as float64 on the CPU; those of each device are copied at once."""
    copies: dict[int, Tensor] = {}
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            copies[index] = tensor.double().cpu()
        else:
            by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        copies |= zip(indices, copied_at_once([tensors[index].double() for index in indices]), strict=True)
    return [copies[index] for index in range(len(tensors))]
