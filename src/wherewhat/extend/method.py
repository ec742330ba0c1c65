"""The interface of a length method, and the context manager that runs a model with one."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof, intervene, prove
from wherewhat.captures.session import Capture
from wherewhat.captures.wrappers import unwrapped
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.extend.attention import capped
from wherewhat.extend.visibility import Sight, Windowed
from wherewhat.models.positions import hard_limit, trained_length


@contextmanager
def positions_checked(model: nn.Module) -> Iterator[None]:
    """Refuse, until the context ends, texts longer than the model's table of positions."""
    limit = hard_limit(model)
    if limit is None:
        yield
        return

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        length = cached + inputs.shape[1] if isinstance(inputs, Tensor) and inputs.ndim == 2 else 0
        if length > limit:
            raise MeasureError(
                f"a text of {length} tokens is longer than the table of {limit} positions of {type(model).__name__}: "
                "no method can run it; give a shorter text"
            )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


BLOCK_MIB = 64
"""Default memory for one block of logits, in MiB."""


@dataclass(frozen=True)
class LengthMethod(ABC):
    """A rule by which a trained model attends in texts longer than those it was trained on.

    The first sentence of a method's docstring is its rule. Positions are counted in tokens from the first key, so a
    constant shift of the model's positions changes nothing. Layers that do not rotate keep the rule's choice of keys
    and have no distances to change.
    """

    name: ClassVar[str]
    rotary: ClassVar[bool] = True
    """Whether the rule is about distances, which only rotating layers have."""
    cacheable: ClassVar[bool] = True
    """Whether cached keys and the new queries are enough to attend."""

    @classmethod
    def rule(cls) -> str:
        """The rule in one sentence."""
        return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())

    @property
    def is_open(self) -> bool:
        """Whether a parameter is open that the model or the text must settle: see :meth:`fitted`."""
        return any(value is None for value in vars(self).values())

    def sight(self, attention: LayerAttention) -> Sight | None:
        """What the rule lets the layer's queries see; None where it changes nothing.

        By default the last ``window`` keys and, if the method has ``sinks``, so many first keys at the window's edge.
        """
        if not hasattr(self, "window"):
            return None
        window = settled(self.name, "window", self.window)
        if attention.m <= window:
            return None
        sinks = getattr(self, "sinks", 0)
        return Windowed(window, capped(sinks, window) if sinks else None)

    def attend(self, attention: LayerAttention, *, block_mib: int = BLOCK_MIB) -> Tensor | None:
        """The layer's attention by this rule, a block of queries at a time.

        Args:
            attention: One layer; its queries are the last of its keys.
            block_mib: Memory for one block of logits; the result does not depend on it.

        Returns:
            Output ``(batch, n, heads, d_v)``, or None where the rule changes nothing.
        """
        sight = self.sight(attention)
        return None if sight is None else sight.attend(attention, block_mib=block_mib)

    def scores(self, attention: LayerAttention, rows: slice) -> Tensor:
        """Logits of some queries under the rule, as they enter softmax.

        Their softmax (with the layer's sink column, where it has one) times the values is what :meth:`attend` gives.

        Args:
            attention: One layer; its queries are the last of its keys.
            rows: Which queries, with a start and a stop.

        Returns:
            Logits ``(batch, heads, rows, m)``, -inf where a key is not seen.
        """
        sight = self.sight(attention)
        if sight is None:
            return attention.attn_scores(rows).masked_fill(~attention.visible(rows), -torch.inf)
        return sight.scores(attention, rows)

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """The method with its open parameters settled.

        Args:
            trained: Length the model was trained on.
            length: Length of the text to come, if it is to be told now; otherwise that of each pass.
        """
        del trained, length
        return self

    def check(self, length: int) -> None:
        """Refuse a text so short that the rule does nothing."""
        window = getattr(self, "window", None)
        if window is not None and window >= length:
            raise MeasureError(
                f"{self.name} with window={window} sees all of a text of {length} tokens: choose a window below "
                f"{length} or a longer text"
            )


@contextmanager
def extended(model: Any, method: LengthMethod, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Let ``model`` attend by ``method`` while it runs inside the context, in texts of any length.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        method: The rule; what it leaves open is filled in from the model's training length.
        proof: The model's proof; by default a new one, which costs four short passes.

    Examples:
        >>> with extended(model, LMInfinite(window=4096)):
        ...     model(input_ids)
    """
    inner = unwrapped(model)
    found = proof or prove(inner)
    if method.rotary and all(layer.rotation is None for layer in found.plan.layers):
        raise MeasureError(
            f"{method.name} changes distances, and no layer of {type(inner).__name__} rotates its queries and keys: "
            "choose none or sliding-window"
        )
    fitted = method.fitted(trained=trained_length(inner)) if method.is_open else method
    with positions_checked(inner), intervene(model, fitted.attend, proof=found, blind=True) as session:
        yield session


def positive(name: str, **values: float | None) -> None:
    """Refuse parameters below one."""
    for key, value in values.items():
        if value is not None and not value >= 1:
            raise ConfigError(f"{name} with {key}={value} makes no sense: give 1 or more")


def settled(name: str, key: str, value: int | None) -> int:
    """A parameter that must be known by now."""
    if value is None:
        raise ConfigError(f"{name} does not know its {key}: give one, or run it by extended(model, method)")
    return value
