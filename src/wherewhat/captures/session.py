"""``capture``: each layer's attention, one at a time, handed to a reducer while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import AttentionCall, Repetition, RotaryCall, observers
from wherewhat.captures.guard import RotationGuard
from wherewhat.captures.plan import LayerPlan, Plan
from wherewhat.captures.structure import surroundings
from wherewhat.captures.watch import ModelWatch, observing
from wherewhat.errors import CaptureError

Reducer = Callable[[LayerAttention], None]
"""Called with each layer's attention while the forward pass runs; what it wants to keep it must copy."""

Editor = Callable[[LayerAttention], Tensor | None]
"""Like a reducer; a tensor it returns, shaped like ``output``, takes the place of the layer's attention output."""


class Capture:
    """An open capture. ``layers_seen`` counts the layers handed to the reducer since it was opened."""

    def __init__(
        self, watch: ModelWatch, plan: Plan, reducer: Reducer | Editor, *, edits: bool = False, blind: bool = False
    ) -> None:
        self.layers_seen = 0
        self.blind = blind
        self._watch = watch
        self._reducer = reducer
        self._edits = edits
        self._plans = {(p.name, p.occurrence): p for p in plan.layers}
        self._occurrences: dict[str, int] = {}
        self._in_pass = 0
        self._size: tuple[int, int] | None = None
        self._guard = RotationGuard(plan)
        self._seen = plan.seen
        self._surroundings = surroundings(watch.structure)
        self._repeats = Repetition()
        watch.on_enter = self._start_pass
        watch.on_leave = self._end_pass

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is part of the captured model; none is once the capture is closed."""
        return id(module) in self._watch.names and self._watch.observer is self

    def knows_rotary(self, function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Whether a rotation given the same was compared in this pass already."""
        return self._watch.running and self._guard.knows(function, arguments)

    def on_rotary(self, call: RotaryCall) -> None:
        """Keep a glimpse of the rotation until its attention is seen."""
        if self._watch.running:
            self._guard.glimpse(call)

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Describe the layer and hand it to the reducer; return what an editor puts in place of its output."""
        if self._repeats(call):
            if self._edits:
                raise CaptureError(f"{type(call.module).__name__} applies its attention twice: it cannot be edited")
            return None
        name = self._watch.layer_name(call.module)
        if not self._watch.running:
            raise CaptureError(f"{name} was run apart from its model: run the whole model inside its capture")
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        plan = self._plans.get((name, occurrence))
        if plan is None:
            raise CaptureError(
                f"attention of {name} (call {occurrence + 1}) was not part of the proof: the model took another path"
            )
        if call.query.dtype != plan.dtype:
            raise CaptureError(
                f"{name} computes in {call.query.dtype}, in the proof in {plan.dtype}: leave the model as it is while "
                "a capture is open, and use autocast around the capture, not inside it"
            )
        positions = self._watch.positions(call.key.shape[2], call.key.device)
        self._guard.compare(plan, positions)
        self.layers_seen += 1
        attention = describe(plan, call, positions)
        self._in_pass += 1
        if self._in_pass == len(self._plans) and not self._edits:
            self._check_output(attention)
        # What a reducer runs is its own affair, be it this very model.
        listening = observers.get()
        token = observers.set(() if len(listening) == 1 else tuple(o for o in listening if o is not self))
        try:
            edited = self._reducer(attention)
        finally:
            observers.reset(token)
        if not self._edits or edited is None:
            return None
        if edited.shape != (attention.rot_q.shape[0], attention.n, attention.heads, attention.value.shape[-1]):
            raise CaptureError(f"the edited output of {name} has shape {tuple(edited.shape)}, not that of its output")
        return edited.to(call.query.dtype if self.blind else call.output.dtype)

    def _check_output(self, attention: LayerAttention) -> None:
        """Have the output of the last layer compared, once for passes of one size: a kernel may depend on that."""
        self._size = (attention.n, attention.m.bit_length())
        if self._size not in self._seen:
            self._guard.expect_output(attention)

    def _start_pass(self) -> None:
        """Forget what a pass that broke off may have left, and refuse one in training mode."""
        self._watch.check_mode()
        if surroundings(self._watch.structure) != self._surroundings:
            raise CaptureError(
                "the attention implementation or autocast changed inside an open capture: change it before the capture"
            )
        self._occurrences = {}
        self._in_pass, self._size = 0, None
        self._guard.start()
        self._repeats = Repetition()

    def _end_pass(self, output: Any) -> None:
        """Refuse if the model took another path, rotated differently from what was proved, or gives no numbers."""
        seen = sum(self._occurrences.values())
        if seen < len(self._plans):
            raise CaptureError(
                f"{seen} attention layers were seen, {len(self._plans)} in the proof: the proof is of another model, "
                "or the model took another path"
            )
        logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.ndim > 1 and not self._edits:
            self._guard.expect_numbers(logits[:, -1])
        self._guard.check()
        if self._size is not None:
            self._seen.add(self._size)


@contextmanager
def capture_with(
    model: nn.Module, plan: Plan, reducer: Reducer | Editor, *, edits: bool = False, blind: bool = False
) -> Iterator[Capture]:
    """Open a capture of ``model`` by a known plan; with ``edits`` the reducer is an :data:`Editor`."""
    watch = ModelWatch(model)
    session = Capture(watch, plan, reducer, edits=edits, blind=blind and plan.route == "interface")
    with observing(watch, session, route=plan.route):
        yield session


def describe(plan: LayerPlan, call: AttentionCall, positions: Tensor) -> LayerAttention:
    """One layer's attention, from what is known of the layer and what was seen of the call."""
    attention = object.__new__(LayerAttention)
    # At once: this is done for every layer, and a frozen dataclass sets its fields one by one, ten times as slowly.
    vars(attention).update(
        layer=plan.layer,
        name=plan.name,
        rot_q=call.query,
        rot_k=call.key,
        value=call.value,
        output=call.output,
        scale=call.scale,
        mask=call.mask,
        rotation=plan.rotation,
        positions=positions,
        softcap=call.softcap,
        sinks=call.sinks,
        declared_window=call.window,
    )
    return attention
