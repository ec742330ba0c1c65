"""The interface of length methods, the context manager that applies one to a model, and generation with it."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from wherewhat.caches.attention import FarKeys, default_block_mib
from wherewhat.caches.kept_keys import keys_kept
from wherewhat.caches.visibility import Queries, Visibility, Windowed, query_rows
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof, current_proof, intervene, prove
from wherewhat.captures.session import Capture
from wherewhat.captures.structure import unwrapped
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.models.loaded import hard_limit, trained_length


@dataclass(frozen=True)
class LengthMethod(ABC):
    """A rule for attention in texts longer than the training length.

    The first sentence of a method's docstring is its rule, and its fields are its parameters, of 1 or more; None is
    replaced by a default for the model and text. Positions are counted in tokens from the first key, so a constant
    shift of the model's positions has no effect. For layers without rotation only the choice of keys applies.
    """

    name: ClassVar[str]
    """Name of the method."""
    rotary: ClassVar[bool] = True
    """Whether the method changes distances, which only layers with rotation have."""

    def __post_init__(self) -> None:
        """Refuse a method without a name, and parameters below 1."""
        if not isinstance(getattr(self, "name", None), str):
            raise ConfigError(
                f"the length method {type(self).__name__} has no name: give one, such as name = 'my-method'"
            )
        check_positive(self.name, **vars(self))

    @classmethod
    def rule(cls) -> str:
        """Return the rule in one sentence."""
        return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())

    @property
    def is_open(self) -> bool:
        """Whether a parameter is None and depends on the model or the text: see :meth:`fitted`."""
        return any(value is None for value in vars(self).values())

    def fitted(self, *, trained: int, length: int | None = None) -> Self:
        """Return the method with its open parameters set.

        Args:
            trained: Training length of the model.
            length: Length of the text; None to use that of each pass.
        """
        del length
        window: dict[str, Any] = {"window": self.default_window(trained)}
        return replace(self, **window) if getattr(self, "window", 0) is None else self

    def default_window(self, trained: int) -> int:
        """Return the window for a training length, for methods with a window."""
        return trained

    def visibility(self, attention: LayerAttention) -> Visibility | None:
        """Return how the layer's queries see keys; None if the method changes nothing.

        By default the last ``window`` keys and, if the method has ``sinks``, that many first keys at distance
        ``window``.
        """
        if not hasattr(self, "window"):
            return None
        window = required(self.name, "window", self.window)
        if attention.m <= window:
            return None
        sinks = getattr(self, "sinks", 0)
        return Windowed(window, FarKeys.capped(sinks, window) if sinks else None)

    def attend(self, attention: LayerAttention, *, block_mib: int | None = None) -> Tensor | None:
        """Return the layer's attention under this method, computed by blocks of queries.

        Args:
            attention: One layer, whose queries belong to the last keys.
            block_mib: Memory for one block of logits, by default :func:`default_block_mib`; without effect on the
                result.

        Returns:
            Output ``(batch, n, heads, d_v)``, or None if the method changes nothing.
        """
        visibility = self.visibility(attention)
        if visibility is None:
            return None
        return visibility.attend(attention, block_mib=block_mib or default_block_mib(attention.rot_q.device))

    def scores(self, attention: LayerAttention, rows: Queries) -> Tensor:
        """Return the logits of some queries under this method.

        The result of :meth:`attend` is their softmax (with the layer's sink column, if it has one) times the values.

        Args:
            attention: One layer, whose queries belong to the last keys.
            rows: The queries: a slice with a start and a stop, or their indices, ascending.

        Returns:
            Logits ``(batch, heads, rows, m)``, -inf where a key is not visible.
        """
        visibility = self.visibility(attention)
        if visibility is None:
            chosen = query_rows(rows, attention.rot_q.device)
            return attention.attn_scores(chosen).masked_fill(~attention.visible(chosen), -torch.inf)
        return visibility.scores(attention, rows)

    def check_model(self, model: nn.Module, proof: Proof) -> None:
        """Refuse a model to which the method cannot be applied."""
        if self.rotary and all(layer.rotation is None for layer in proof.layout.layers):
            raise MeasureError(
                f"{self.name} changes distances, and no layer of {type(model).__name__} rotates its queries and keys: "
                "choose none or sliding-window"
            )

    def check(self, length: int) -> None:
        """Refuse a text that is too short for the method to change anything."""
        window = getattr(self, "window", None)
        if window is not None and window >= length:
            raise MeasureError(
                f"{self.name} with window={window} sees all of a text of {length} tokens: choose a window below "
                f"{length} or a longer text"
            )


@contextmanager
def extended(model: Any, method: LengthMethod, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Apply ``method`` to the attention of ``model`` inside the context, for texts of any length.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        method: The method; open parameters are set from the model's training length.
        proof: The model's proof; by default its last one. If the model has changed since, it is proved again.

    Examples:
        >>> with extended(model, LMInfinite(window=4096)):
        ...     model(input_ids)
    """
    inner = unwrapped(model)
    proved = current_proof(inner, proof)
    method.check_model(inner, proved)
    fitted = method.fitted(trained=trained_length(inner)) if method.is_open else method
    with _limited_positions(inner), intervene(model, fitted.attend, proof=proved, blind=True) as session:
        yield session


@contextmanager
def _limited_positions(model: nn.Module) -> Iterator[None]:
    """Refuse texts longer than the model's table of positions inside the context."""
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


def check_positive(name: str, **values: float | None) -> None:
    """Refuse parameters below 1."""
    for key, value in values.items():
        if value is not None and not value >= 1:
            raise ConfigError(f"{name} with {key}={value} makes no sense: give 1 or more")


def required(name: str, key: str, value: int | None) -> int:
    """Return a parameter that must not be None."""
    if value is None:
        raise ConfigError(f"{name} does not know its {key}: give one, or run it by extended(model, method)")
    return value


def generate(model: Any, ids: Tensor, method: LengthMethod, steps: int, *, proof: Proof | None = None) -> Tensor:
    """Continue texts by greedy decoding under a length method.

    Each new token is the most likely one in a single pass over the finished text up to it. Parameters that depend on
    the length are set once, for the length of the finished text. Keys are cached unless the model has windows of its
    own; then each token takes a pass over the whole text.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        ids: Texts ``(batch, n)`` of one length.
        method: The length method.
        steps: Number of tokens to generate.
        proof: The model's proof; by default a new one.

    Returns:
        Texts ``(batch, n + steps)``.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: give 1 or more tokens to generate")
    inner = unwrapped(model)
    proved = proof or prove(inner)
    if method.is_open:
        method = method.fitted(trained=trained_length(inner), length=ids.shape[1] + steps)
    # Caches of layers with a window drop keys and no longer count the text's tokens.
    cached = not _has_window(inner)
    kept = keys_kept() if cached else nullcontext()
    with torch.no_grad(), extended(model, method, proof=proved), kept:
        cache, fresh = None, ids
        for _ in range(steps):
            cached_keys: dict[str, Any] = {"past_key_values": cache} if cache is not None else {}
            out = model(input_ids=fresh, use_cache=cached, **cached_keys)
            best = out.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, best.to(ids.device)], -1)
            cache = getattr(out, "past_key_values", None) if cached else None
            fresh = best if cache is not None else ids
    return ids


def _has_window(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in kinds)
