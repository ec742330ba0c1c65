"""Observe a model inside a context, and track the state of its forward pass."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wherewhat.captures.calls import Observer, observers
from wherewhat.captures.structure import check_mode, structure_of
from wherewhat.errors import CaptureError

Route = Literal["interface", "trace"]
"""``interface`` (transformers' attention interface) or ``trace`` (the model's own code)."""


class ModelWatch:
    """State of a running forward pass: batch, positions and the current attention module.

    Attributes:
        structure: The model's modules.
        names: Paths of the modules by identity.
        batch: Number of sequences of the pass.
        running: Whether a pass is running.
        observer: The observer of the model, while it is observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.structure = structure_of(model)
        self.names = self.structure.names
        self.batch = 1
        self.running = False
        self.observer: Observer | None = None
        self._position_ids: Tensor | None = None
        self._tokens = 0
        self._cached: int | None = None
        self._positions: dict[tuple[int, torch.device], Tensor] = {}
        self._mask: Tensor | None = None
        self._before: Tensor | None = None
        self._histories: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._stack: list[nn.Module] = []
        self._model = model

    def check_mode(self) -> None:
        """Refuse training mode."""
        check_mode(self._model, self.structure)

    def current(self) -> nn.Module | None:
        """Return the innermost attention module that is running."""
        return self._stack[-1] if self._stack else None

    def positions(self, keys: int, device: torch.device) -> Tensor:
        """Return the position of every key of the pass, ``(keys,)`` or ``(batch, keys)``.

        Positions of cached keys are known from captured passes. Others are assumed to be consecutive before the first
        token of the pass. Layers with a window cache fewer keys than tokens.
        """
        if self._cached is not None and keys > self._cached + self._tokens:
            raise CaptureError(
                f"{keys} keys for {self._cached} cached and {self._tokens} new tokens: the cache has empty slots, "
                "whose positions are unknown; use the default (dynamic) cache or use_cache=False"
            )
        if (keys, device) not in self._positions:
            self._positions[keys, device] = self._key_positions(keys, device)
        return self._positions[keys, device]

    def _key_positions(self, keys: int, device: torch.device) -> Tensor:
        new = self._new_positions(device)
        if self._cached and self._before is None:
            self._check_cached(new)
        if new is None or new.shape[-1] > keys:
            first = self._cached + self._tokens - keys if self._cached else 0
            return torch.arange(first, first + keys, device=device)
        if self._before is not None:
            before = self._before.to(device)
            before = before.expand(*new.shape[:-1], -1) if before.ndim < new.ndim else before
            return torch.cat([before, new.expand(*before.shape[:-1], -1)], -1)[..., -keys:]
        earlier = new[..., :1] - torch.arange(keys - new.shape[-1], 0, -1, device=device)
        return torch.cat([earlier, new], -1)

    def _new_positions(self, device: torch.device) -> Tensor | None:
        """Return the positions of the pass's tokens, ``(n,)`` or ``(batch, n)``; None if the cache determines them."""
        given = self._position_ids
        if given is None:
            # Captured tokens may have had other positions; the model counts on from the cached tokens.
            first = self._cached or 0
            return None if self._before is None else torch.arange(first, first + self._tokens, device=device)
        if given.ndim > 2:  # one row per image axis, in some families after one for the text
            rows = given[-3:] if given.shape[0] > 3 else given
            if bool((rows != rows[:1]).any()):
                raise CaptureError(
                    "position_ids differ between their rows, as for images: tokens have no single position"
                )
            given = rows[0]
        return (given[0] if given.ndim == 2 and given.shape[0] == 1 else given).to(device)

    def _check_cached(self, new: Tensor | None) -> None:
        """Refuse cached keys that were not captured and may not be consecutive before the first new token."""
        cached = self._cached or 0
        if self.structure.frequencies_change:
            raise CaptureError(
                f"{cached} cached keys were made before the capture, maybe with other frequencies, which depend on the "
                "length here: open the capture before the first pass, or use use_cache=False"
            )
        if new is None:
            return
        visible = torch.full((1,), cached, device=new.device)
        last = True
        if self._mask is not None and self._mask.ndim == 2 and self._mask.shape[1] >= cached:
            seen = self._mask[:, :cached].to(new.device).bool()
            visible = seen.sum(-1)
            last = bool((seen[:, 1:] | ~seen[:, :-1]).all())  # no hidden key after a visible one
        if not last or not bool((new.reshape(-1, new.shape[-1])[:, 0] == visible).all()):
            raise CaptureError(
                f"{cached} cached keys were made before the capture and may have any position: open the capture "
                "before the first pass, or use use_cache=False"
            )

    def _remember(self, output: Any) -> None:
        """Store the positions of all keys in the cache that a pass returns, for the pass that continues from it."""
        cache = getattr(output, "past_key_values", None)
        if cache is None or not hasattr(cache, "get_seq_length"):
            return
        total = (self._cached or 0) + self._tokens
        whole = next((x for (keys, _), x in self._positions.items() if keys == total), None)
        if whole is None and self._positions:  # layers with a window hold fewer keys
            whole = self._key_positions(total, next(iter(self._positions.values())).device)
        if whole is not None:
            with contextlib.suppress(TypeError):  # a cache without weak references
                self._histories[cache] = whole

    @contextmanager
    def hooked(self, *, modules: bool) -> Iterator[None]:
        """Hook the model, and with ``modules`` its attention modules, inside the context."""
        handles = [
            self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            self._model.register_forward_hook(self._leave_model, always_call=True),
        ]
        if modules:
            for module in (self._model, *self.structure.parts):
                if re.search("att(entio)?n", type(module).__name__, re.IGNORECASE):
                    handles.append(module.register_forward_pre_hook(self._enter))
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _current_observer(self) -> Observer | None:
        """Return the observer unless it is busy or of another context: other threads may run the same model."""
        observer = self.observer
        return None if observer is None or observer.busy or observer not in observers.get() else observer

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer = self._current_observer()
        if observer is None:
            return
        given = dict(zip(self.structure.parameters, args, strict=False)) | kwargs
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        cache = given.get("past_key_values")
        self.batch, self._tokens = inputs.shape[:2] if isinstance(inputs, Tensor) and inputs.ndim > 1 else (1, 0)
        self._cached = int(cache.get_seq_length()) if cache is not None and hasattr(cache, "get_seq_length") else None
        self._position_ids = given.get("position_ids")
        self._mask = given.get("attention_mask")
        self._before = None  # positions of all cached keys, if they were captured
        if self._cached:
            with contextlib.suppress(TypeError):
                before = self._histories.get(cache)
                self._before = before if before is not None and before.shape[-1] == self._cached else None
        self._positions = {}
        self._stack.clear()
        self.running = True
        observer.start_pass()

    def _leave_model(self, _: nn.Module, __: Any, output: Any) -> None:
        observer = self._current_observer()
        if observer is not None:
            self.running = False
            if output is not None:  # None after an exception
                self._remember(output)
                observer.end_pass(output)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._current_observer() is not None:
            self._stack.append(module)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        while self._current_observer() is not None and self._stack and self._stack.pop() is not module:
            pass
