"""Pass each layer's attention to a reducer while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import AttentionCall, Observer, Repetition, RotaryCall, observers, replaced
from wherewhat.captures.guard import RotationGuard
from wherewhat.captures.layout import CaptureLayout, LayerLayout
from wherewhat.captures.structure import surroundings
from wherewhat.captures.trace import tracing
from wherewhat.captures.watch import ModelWatch, Route
from wherewhat.errors import CaptureError

Reducer = Callable[[LayerAttention], None]
"""Called with each layer's attention during the forward pass; tensors that are kept must be copied."""

Editor = Callable[[LayerAttention], Tensor | None]
"""Like a reducer; a returned tensor, shaped like ``output``, replaces the layer's attention output."""


class Capture(Observer):
    """An open capture.

    Attributes:
        layers_seen: Number of layers passed to the reducer since it was opened.
    """

    def __init__(
        self,
        watch: ModelWatch,
        layout: CaptureLayout,
        reducer: Reducer | Editor,
        *,
        edits: bool = False,
        blind: bool = False,
    ) -> None:
        super().__init__(watch.names)
        self.layers_seen = 0
        self.blind = blind
        self._watch = watch
        self._reducer = reducer
        self._edits = edits
        self._plans = {(p.name, p.occurrence): p for p in layout.layers}
        self._occurrences: dict[str, int] = {}
        self._in_pass = 0
        self._size: tuple[int, int] | None = None
        self._guard = RotationGuard(layout)
        self._seen = layout.seen
        self._surroundings = surroundings(watch.structure)
        self._repeats = Repetition()

    def owns(self, module: nn.Module) -> bool:
        """Return whether the module is part of the captured model and the capture is open."""
        return id(module) in self.names and self._watch.observer is self and not self.busy

    def knows_rotary(self, function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Return whether a rotation with the same arguments was compared in this pass, or is one of the reducer."""
        return self.busy or self._guard.knows(function, arguments)

    def on_rotary(self, call: RotaryCall) -> None:
        """Keep a few tokens of the rotation until its attention is computed."""
        if self._watch.running:
            self._guard.record(call)

    def on_attention(self, call: AttentionCall) -> Tensor | None:
        """Pass the layer to the reducer; return the output of an editor."""
        if self._repeats(call):
            if self._edits:
                raise CaptureError(f"{type(call.module).__name__} applies its attention twice: it cannot be edited")
            return None
        name = self.names[id(call.module)]
        if not self._watch.running:
            raise CaptureError(f"{name} was run apart from its model: run the whole model inside its capture")
        occurrence = self._occurrences.get(name, 0)
        self._occurrences[name] = occurrence + 1
        layout = self._plans.get((name, occurrence))
        if layout is None:
            raise CaptureError(
                f"attention of {name} (call {occurrence + 1}) was not part of the proof: the model took another path"
            )
        if call.query.dtype != layout.dtype:
            raise CaptureError(
                f"{name} computes in {call.query.dtype}, in the proof in {layout.dtype}: do not change the model while "
                "a capture is open, and use autocast around the capture, not inside it"
            )
        positions = self._watch.positions(call.key.shape[2], call.key.device)
        self._guard.compare(layout, positions)
        self.layers_seen += 1
        attention = describe(layout, call, positions)
        self._in_pass += 1
        if self._in_pass == len(self._plans) and not self._edits:
            # The output of the last layer is checked once for passes of one size, on which the kernel may depend.
            self._size = (attention.n, attention.m.bit_length())
            if self._size not in self._seen:
                self._guard.expect_output(attention)
        self.busy = True
        try:
            edited = self._reducer(attention)
        finally:
            self.busy = False
        if not self._edits or edited is None:
            return None
        if edited.shape != (attention.rot_q.shape[0], attention.n, attention.heads, attention.value.shape[-1]):
            raise CaptureError(f"the edited output of {name} has shape {tuple(edited.shape)}, not that of its output")
        return edited.to(call.query.dtype if self.blind else call.output.dtype)

    def start_pass(self) -> None:
        """Reset the state of the previous pass, which may have failed; refuse training mode and changed settings."""
        self._watch.check_mode()
        if surroundings(self._watch.structure) != self._surroundings:
            raise CaptureError(
                "the attention implementation or autocast changed inside an open capture: change it before the capture"
            )
        self._occurrences = {}
        self._in_pass, self._size = 0, None
        self._guard.start()
        self._repeats = Repetition()

    def end_pass(self, output: Any) -> None:
        """Refuse a pass that differs from the proof or has NaN logits."""
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
    model: nn.Module, layout: CaptureLayout, reducer: Reducer | Editor, *, edits: bool = False, blind: bool = False
) -> Iterator[Capture]:
    """Open a capture of ``model`` with a known layout; with ``edits`` the reducer is an :data:`Editor`."""
    watch = ModelWatch(model)
    session = Capture(watch, layout, reducer, edits=edits, blind=blind and layout.route == "interface")
    with observing(watch, session, route=layout.route):
        yield session


@contextmanager
def observing(watch: ModelWatch, observer: Observer, *, route: Route) -> Iterator[None]:
    """Report the model's rotations and attention to ``observer`` inside the context."""
    targets = watch.structure.rotary if observer.rotations else ()
    targets += watch.structure.interface if route == "interface" else ()
    with ExitStack() as stack:
        watch.observer = observer
        # Not kept: the reference cycle would keep the model until garbage collection.
        stack.callback(setattr, watch, "observer", None)
        observers.set((*observers.get(), observer))
        # Not by a token, which would also undo changes of overlapping captures.
        stack.callback(lambda: observers.set(tuple(o for o in observers.get() if o is not observer)))
        stack.enter_context(watch.hooked(modules=route == "trace"))
        stack.enter_context(replaced(targets))
        if route == "trace":
            stack.enter_context(tracing(watch))
        yield


def describe(layout: LayerLayout, call: AttentionCall, positions: Tensor) -> LayerAttention:
    """Return a layer's attention from its layout and an observed call."""
    attention = object.__new__(LayerAttention)
    # All at once: this runs for every layer, and a frozen dataclass sets its fields one by one, ten times as slowly.
    vars(attention).update(
        layer=layout.layer,
        name=layout.name,
        rot_q=call.query,
        rot_k=call.key,
        value=call.value,
        output=call.output,
        scale=call.scale,
        mask=layout.hiding.applied(call.mask, layout.name, call.key.shape[2]),
        rotation=layout.rotation,
        positions=positions,
        softcap=call.softcap,
        sinks=call.sinks,
        declared_window=call.window,
    )
    return attention
