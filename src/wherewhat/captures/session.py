"""Pass each layer's attention to a reducer while the model runs, and check that it computes what was proved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention, shared_product
from wherewhat.captures.calls import (
    AttentionCall,
    Invocation,
    Observer,
    Repetition,
    RotaryCall,
    observers,
    replaced,
    version_of,
)
from wherewhat.captures.layout import CaptureLayout, LayerLayout, heads_first
from wherewhat.captures.rotation import IdentifiedRotation
from wherewhat.captures.structure import ModelWatch, Route, surroundings
from wherewhat.captures.trace import tracing
from wherewhat.errors import CaptureError

Reducer = Callable[[LayerAttention], None]
"""Called with each layer's attention during the forward pass; tensors that are kept must be copied."""

Editor = Callable[[LayerAttention], Tensor | None]
"""Like a reducer; a returned tensor, shaped like ``output``, replaces the layer's attention output."""

_ROUNDINGS = 3
"""Number of times a logit is rounded to the model's dtype: after the product, the scale and the bias."""

NAN_LOGITS = "the model's logits are NaN: its weights contain NaN or a layer overflows; load it again as float32"
"""Error message for a pass without usable output."""

_ROTATION = (
    "{name} rotates differently from the proof (relative error {error:.2g}): its frequencies depend on the length of "
    "the text, or positions were changed; prove it at this length"
)
_OUTPUT = (
    "the output of {name} is not its attention weights times its values (relative error {error:.2g}): its attention "
    "function does something else at this length; load it with attn_implementation='eager'"
)


def output_excess(attention: LayerAttention, rows: slice) -> Tensor:
    """Return the error of the output of some queries, minus the largest error that rounding explains.

    The error is the distance from the attention weights times the values, ``(batch, heads, rows, d_v)``; the result is
    at most zero where rounding explains it.
    """
    dtype = torch.promote_types(attention.value.dtype, torch.float32)
    value = attention.value.to(dtype)
    weights, rounding = (x.to(dtype) for x in rounded_weights(attention, rows, attention.rot_q.dtype))
    theirs = attention.output.to(dtype).reshape(attention.rot_q.shape[0], attention.n, attention.heads, -1)
    error = (shared_product(weights, value) - theirs[:, rows].transpose(1, 2)).abs()
    return error - shared_product(rounding, value.abs())


def rounded_weights(attention: LayerAttention, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the attention weights of some queries, and bounds on their errors if logits are rounded to ``dtype``.

    If every logit has an error of at most δ, the log-odds of a weight have an error of at most 2δ, which is negligible
    for a weight close to 1, however large its logits and their rounding.
    """
    scores, visible = attention.attn_scores(rows), attention.visible(rows)
    weights = attention.weigh(scores, rows)
    scores = attention.masked(scores, visible)
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # softmax is in float32 even in float64
    off = precision * _ROUNDINGS * scores.abs().masked_fill(scores.isinf(), 0.0).amax(-1, keepdim=True)
    best = scores.argmax(-1, keepdim=True)
    # Sum over the other keys: a difference loses all digits for the best key, and is accurate enough for the others.
    total = scores.logsumexp(-1, keepdim=True)
    others = (total + torch.log1p(-(scores - total).exp().clamp_max(0.5))).scatter(
        -1, best, scores.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    )
    odds = (scores - others)[..., : attention.m]
    rounding = torch.maximum((odds + off).sigmoid() - weights, weights - (odds - off).sigmoid())
    return weights, torch.where(visible.any(-1, keepdim=True), rounding, 0.0)


@dataclass(frozen=True)
class _Sample:
    """A few of the ``tokens`` of one tensor before and after rotation, ``(batch, heads, few, d)``."""

    before: Tensor
    after: Tensor
    invocation: Invocation
    tokens: int


class _Compared:
    """A call of the rotary function that was compared with a layer's rotation."""

    def __init__(self, invocation: Invocation, rotation: IdentifiedRotation) -> None:
        self.rotations = [rotation] * invocation.rotated
        self._invocation = invocation
        self._given = [
            (index, value, version_of(value) if isinstance(value, Tensor) else -1) for index, value in invocation.given
        ]

    def equals(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Return whether another call has the same arguments besides those that it rotates."""
        if function is not self._invocation.function or len(arguments) != self._invocation.count:
            return False
        for index, value, version in self._given:
            other = arguments[index]
            if other is not value or (version >= 0 and other._version != version):
                return False
        return True


def _allowed(x: Tensor) -> float:
    """Return the largest relative error of results computed from a tensor."""
    return 2e-2 if x.dtype == torch.bfloat16 else 2e-3


def _few(n: int) -> slice:
    """Return a slice of three tokens, the last among them; indices would have to be copied to the device."""
    step = max(1, (n - 2) // 2)
    return slice(max(0, n - 1 - 2 * step), None, step)


def _difference(identified: IdentifiedRotation, other: IdentifiedRotation, positions: Tensor) -> Tensor:
    """Return the largest relative difference between two rotations at some positions."""
    if identified.source_pairing != other.source_pairing:
        return torch.tensor(torch.inf)
    a, b = identified.rotation, other.rotation
    if (a.pairing, a.offset, a.planes) != (b.pairing, b.offset, b.planes):
        return torch.tensor(torch.inf)
    angle = (a.inv_freq - b.inv_freq).abs().max().to(positions.device) * positions.max()
    return angle + abs(a.scaling / b.scaling - 1)


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
        self._layouts = {(p.name, p.occurrence): p for p in layout.layers}
        self._axis = next((p.rotary.token_axis for p in layout.layers if p.rotary is not None), None)
        self._seen = layout.seen
        self._surroundings = surroundings(watch.structure)
        self._reset()

    def _reset(self) -> None:
        """Forget the previous pass, which may have failed."""
        self._occurrences: dict[str, int] = {}
        self._in_pass = 0
        self._size: tuple[int, int] | None = None
        self._repeats = Repetition()
        # Rotations since the last attention: a sample, or the rotation of a compared call with the same arguments.
        self._pending: list[_Sample | IdentifiedRotation] = []
        self._compared: list[_Compared] = []
        # Reading a number synchronises with the device, which is done once per pass and not per layer.
        self._checks: list[tuple[str, str, Callable[[], Tensor], float]] = []

    def owns(self, module: nn.Module) -> bool:
        """Return whether the module is part of the captured model and the capture is open."""
        return id(module) in self.names and self._watch.observer is self and not self.busy

    def knows_rotary(self, function: Callable[..., Any], arguments: Sequence[Any]) -> bool:
        """Return whether a rotation with the same arguments was compared in this pass, or is one of the reducer."""
        if self.busy:
            return True
        for compared in self._compared:
            if compared.equals(function, arguments):
                self._pending += compared.rotations
                return True
        return False

    def on_rotary(self, call: RotaryCall) -> None:
        """Keep a few tokens of the rotation until its attention is computed."""
        if not self._watch.running or self._axis is None:
            return
        before, after = heads_first(call.before.detach(), self._axis), heads_first(call.after.detach(), self._axis)
        n = after.shape[2]
        self._pending.append(_Sample(before[:, :, _few(n)].clone(), after[:, :, _few(n)].clone(), call.invocation, n))

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
        layout = self._layouts.get((name, occurrence))
        if layout is None:
            raise CaptureError(
                f"call {occurrence + 1} of attention in {name} did not run in the proof: prove the model again"
            )
        if call.query.dtype != layout.dtype:
            raise CaptureError(
                f"{name} computes in {call.query.dtype}, in the proof in {layout.dtype}: do not change the model while "
                "a capture is open, and use autocast around the capture, not inside it"
            )
        positions = self._watch.positions(call.key.shape[2], call.key.device)
        self._compare_rotations(layout, positions)
        self.layers_seen += 1
        attention = describe(layout, call, positions)
        self._in_pass += 1
        if self._in_pass == len(self._layouts) and not self._edits:
            # The output of the last layer is checked once for passes of one size, on which the kernel may depend.
            self._size = (attention.n, attention.m.bit_length())
            if self._size not in self._seen:
                self._expect_output(attention)
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

    def _compare_rotations(self, layout: LayerLayout, positions: Tensor) -> None:
        """Schedule checks of the rotations since the last attention, those with the same arguments in all layers once.

        ``positions`` are those of the layer's keys, ``(m,)`` or ``(batch, m)``.
        """
        pending, self._pending = self._pending, []
        rotary = layout.rotary
        if rotary is None:
            return
        if len(pending) != rotary.calls_seen:
            raise CaptureError(
                f"{layout.name} called its rotary function {len(pending)} times, {rotary.calls_seen} times in the "
                "proof: it was replaced, or another branch of the model ran"
            )
        new: list[_Sample] = []
        for index in rotary.calls:
            seen = pending[index]
            if isinstance(seen, _Sample):
                new.append(seen)
            elif seen is not rotary.found:
                difference = functools.partial(_difference, seen, rotary.found, positions)
                self._checks.append((_ROTATION, layout.name, difference, 2e-3))
        if not new:
            return
        tokens = new[0].tokens
        at = positions[..., positions.shape[-1] - tokens :][..., _few(tokens)]
        pairs = [(sample.before, sample.after) for sample in new]
        if len({(x.shape[0], x.shape[2:], x.device, x.dtype) for x, _ in pairs}) == 1:  # then all at once
            pairs = [(torch.cat([before for before, _ in pairs], 1), torch.cat([after for _, after in pairs], 1))]
        for before, after in pairs:
            mismatch = functools.partial(rotary.mismatch, before, after, at)
            self._checks.append((_ROTATION, layout.name, mismatch, _allowed(after)))
        for invocation in {id(sample.invocation): sample.invocation for sample in new}.values():
            # Only if all the tensors that it rotates were compared.
            if sum(sample.invocation is invocation for sample in new) == invocation.rotated:
                self._compared = [*self._compared[-3:], _Compared(invocation, rotary.found)]

    def _expect_output(self, attention: LayerAttention) -> None:
        """Schedule a check that the output of the last query is its attention weights times the values.

        This detects attention functions that ignore their arguments, such as a kernel with a built-in window.
        """
        row = slice(attention.n - 1, attention.n)
        with torch.no_grad():
            seen = attention.visible(row).any(-1, keepdim=True)
            excess = torch.where(seen, output_excess(attention, row), 0.0).max()
            error = excess / attention.output[:, row].abs().max().clamp_min(1e-30)
        self._checks.append((_OUTPUT, attention.name, lambda: error, _allowed(attention.rot_q)))

    def start_pass(self) -> None:
        """Reset the state of the previous pass; refuse training mode and changed settings."""
        self._watch.check_mode()
        if surroundings(self._watch.structure) != self._surroundings:
            raise CaptureError(
                "the attention implementation or autocast changed inside an open capture: change it before the capture"
            )
        self._reset()

    def end_pass(self, output: Any) -> None:
        """Run the scheduled checks; refuse a pass that differs from the proof or has NaN logits."""
        seen = sum(self._occurrences.values())
        if seen < len(self._layouts):
            raise CaptureError(
                f"{seen} attention layers were seen, {len(self._layouts)} in the proof: the proof is of another model, "
                "or another branch of the model ran"
            )
        logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.ndim > 1 and not self._edits:
            last = logits[:, -1]
            self._checks.insert(0, (NAN_LOGITS, "", lambda: last.isnan().any(), 0.0))
        size, checks = self._size, [(problem, name, error(), limit) for problem, name, error, limit in self._checks]
        self._reset()
        for problem, name, error, limit in checks:
            if not float(error) <= limit:
                raise CaptureError(problem.format(name=name, error=float(error)))
        if size is not None:
            self._seen.add(size)


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
