"""Loss by position far beyond the context, under every length method that applies."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.encodings.scoring import memory_for, next_losses
from wherewhat.extend import LengthMethod, Untouched, find
from wherewhat.measure.base import Subject
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.subject import LabSubject
from wherewhat.store.profiles import Profile

BUCKETS = 4
"""Stretches of text that a context is divided into."""


def applicable(model: LabModel, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the methods that make sense for a model.

    Learned positions end with the context, and no rule makes more of them. Rules about distances need rotation.
    """
    if model.positions is not None:
        return ()
    return tuple(name for name in methods if model.rotation is not None or not find(name).rotary)


def loss_by_position(model: LabModel, windows: Tensor, *, context: int, methods: tuple[str, ...]) -> dict[str, Profile]:
    """Losses of texts in nats, by text and stretch of a quarter context, under each method that applies.

    Args:
        model: The trained model.
        windows: Texts ``(texts, n)``.
        context: Length it was trained on.
        methods: Names of length methods.

    Returns:
        ``position``, the middle of each stretch, and ``loss_by_position_<method>``, ``(texts, stretches)``. A model
        with learned positions has no text but that of its context, untouched.
    """
    names = applicable(model, methods)
    if model.positions is not None:
        windows, names = windows[:, :context], (Untouched.name,)
    subject = LabSubject(model, trained_length=context)
    found: dict[str, Profile] = {}
    for name in names:
        method = find(name)().fitted(trained=context, length=windows.shape[1])
        losses = _losses(subject, windows, method)
        position, buckets = _stretches(losses, max(1, context // BUCKETS))
        found["position"] = Profile(position, ("stretch",))
        found[f"loss_by_position_{name}"] = Profile(buckets, ("document", "stretch"))
    return found


def _losses(subject: Subject, windows: Tensor, method: LengthMethod) -> Tensor:
    """Loss at every position but the first, ``(texts, n - 1)`` on the CPU."""

    def attend(attention: LayerAttention) -> Tensor | None:
        output = method.attend(attention, block_mib=memory_for(attention))
        return None if output is None else output.to(attention.value.dtype)

    return next_losses(subject.edited(windows, attend), windows).cpu()


def _stretches(losses: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Middle position and mean loss of each stretch of ``size`` positions, ``(stretches,)`` and ``(texts, …)``."""
    parts = torch.split(losses.double(), size, 1)
    starts = [index * size for index in range(len(parts))]
    middles = [start + 1 + (part.shape[1] - 1) / 2 for start, part in zip(starts, parts, strict=True)]
    return torch.tensor(middles), torch.stack([part.mean(1) for part in parts], 1).float()
