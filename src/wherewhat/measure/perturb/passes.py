"""A model run on a disturbed text, and the loss of each of its targets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.base import Subject
from wherewhat.measure.losses import token_losses
from wherewhat.measure.perturb.change import Change


def ignore(_: LayerAttention) -> None:
    """A reducer for passes whose layers are of no interest."""


def perform(
    subject: Subject,
    change: Change,
    reducer: Callable[[LayerAttention], None] = ignore,
    *,
    targets: Tensor | None = None,
) -> Tensor:
    """Loss of each target of a disturbed text in nats, ``(m - 1,)`` float64.

    Args:
        subject: The model.
        change: The disturbed text.
        reducer: Called with each layer.
        targets: Tokens ``(m,)`` to score in place of those of the text.
    """
    with subject.reordered(change.orders) if change.orders else nullcontext():
        logits = subject.run(change.ids[None], reducer, logits=True, positions=change.positions)
    assert logits is not None
    return token_losses(logits, (change.ids if targets is None else targets)[None])
