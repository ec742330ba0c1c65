"""Check during a capture that the model still computes what was verified."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.calls import Invocation, RotaryCall, version_of
from wherewhat.captures.plan import LayerPlan, Plan, heads_first
from wherewhat.captures.rotation import Identified
from wherewhat.errors import CaptureError

_ROUNDINGS = 3
"""How often a logit is rounded to the model's dtype: after the product, the scale and the bias."""


def output_excess(attention: LayerAttention, rows: slice) -> Tensor:
    """How far the output of some queries is from our weights times the values, beyond what rounding explains.

    Returns:
        ``(batch, heads, rows, d_v)``, at or below zero where rounding explains it.
    """
    dtype = torch.promote_types(attention.value.dtype, torch.float32)
    value = attention.value.to(dtype)
    groups = attention.heads // value.shape[1]
    weights, rounding = (x.to(dtype) for x in rounded_weights(attention, rows, attention.rot_q.dtype))

    def times(weights: Tensor, values: Tensor) -> Tensor:
        """One product per head of the values, which are not repeated."""
        batch, heads, count, keys = weights.shape
        return (weights.reshape(batch, -1, groups * count, keys) @ values).view(batch, heads, count, -1)

    theirs = attention.output.to(dtype).reshape(attention.rot_q.shape[0], attention.n, attention.heads, -1)
    return (times(weights, value) - theirs[:, rows].transpose(1, 2)).abs() - times(rounding, value.abs())


def rounded_weights(attention: LayerAttention, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention weights of some queries, and how far each may be off where logits are rounded to ``dtype``.

    With every logit off by at most δ, the log-odds of a weight are off by at most 2δ: nothing where a query is sure of
    its key, however large its logits and thus their rounding.
    """
    scores, visible = attention.attn_scores(rows), attention.visible(rows)
    weights = attention.weigh(scores, rows)
    scores = scores.masked_fill(~visible, -torch.inf)
    if attention.sinks is not None:
        scores = torch.cat([scores, attention.sinks.to(scores.dtype).view(1, -1, 1, 1).expand_as(scores[..., :1])], -1)
    precision = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # softmax is in float32 even in float64
    off = precision * _ROUNDINGS * scores.abs().masked_fill(scores.isinf(), 0.0).amax(-1, keepdim=True)
    best = scores.argmax(-1, keepdim=True)
    # Sum of the other keys: a difference loses all digits for the best key, and is exact enough for the others.
    total = scores.logsumexp(-1, keepdim=True)
    others = (total + torch.log1p(-(scores - total).exp().clamp_max(0.5))).scatter(
        -1, best, scores.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
    )
    odds = (scores - others)[..., : attention.m]
    rounding = torch.maximum((odds + off).sigmoid() - weights, weights - (odds - off).sigmoid())
    return weights, torch.where(visible.any(-1, keepdim=True), rounding, 0.0)


_NAN = "the model's logits hold NaN: weights hold NaN or a layer overflows; load it again, as float32"
_ROTATION = (
    "{name} rotates differently from the proof (relative error {error:.2g}): its frequencies depend on the length of "
    "the text, or positions were changed; prove it at this length"
)
_OUTPUT = (
    "the output of {name} is not its attention weights times its values (relative error {error:.2g}): its attention "
    "function does something else at this length; load it with attn_implementation='eager'"
)


@dataclass(frozen=True)
class _Glimpse:
    """A few tokens of one tensor that went through the rotary function.

    Attributes:
        known: The rotation with which a call given the very same was compared already, if any.
        sample: Those tokens before and after, ``(batch, heads, tokens, d)``, if none was.
        invocation: The call, likewise.
        tokens: How many tokens there were.
    """

    known: Identified | None
    sample: tuple[Tensor, Tensor] | None = None
    invocation: Invocation | None = None
    tokens: int = 0


class _Compared:
    """A call of the rotary function that was compared with a layer's plan."""

    def __init__(self, invocation: Invocation, found: Identified) -> None:
        self.glimpses = [_Glimpse(found)] * invocation.rotated
        self._invocation = invocation
        self._given = [
            (index, value, version_of(value) if isinstance(value, Tensor) else -1) for index, value in invocation.given
        ]

    def equals(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Whether another call is given the very same besides what it rotates."""
        if function is not self._invocation.function or len(arguments) != self._invocation.count:
            return False
        for index, value, version in self._given:
            other = arguments[index]
            if other is not value or (version >= 0 and other._version != version):
                return False
        return True


class RotationGuard:
    """Compares a few tokens of each rotation with the plan's; the numbers are looked at when the pass ends.

    Looking at a number waits for the device, so that is done once per pass and not per layer. Models that make
    their angles once and hand them to every layer are compared once for all layers.
    """

    def __init__(self, plan: Plan) -> None:
        self._axis = next((p.rotary.token_axis for p in plan.layers if p.rotary is not None), None)
        self.start()

    def start(self) -> None:
        """Forget the pass before, which may have broken off."""
        self._pending: list[_Glimpse] = []
        self._open: list[tuple[str, str, Callable[[], Tensor], float]] = []
        self._compared: list[_Compared] = []

    def knows(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Take note of a call that is given what a compared one was; False if there was none."""
        for compared in self._compared:
            if compared.equals(function, arguments):
                self._pending += compared.glimpses
                return True
        return False

    def glimpse(self, call: RotaryCall) -> None:
        """Keep what is needed of a rotation until its attention is seen."""
        if self._axis is None:
            return
        before, after = heads_first(call.before.detach(), self._axis), heads_first(call.after.detach(), self._axis)
        n = after.shape[2]
        sample = before[:, :, _few(n)].clone(), after[:, :, _few(n)].clone()
        self._pending.append(_Glimpse(None, sample, call.invocation, n))

    def compare(self, plan: LayerPlan, positions: Tensor) -> None:
        """Note how far the rotations since the last attention are from a layer's plan.

        Args:
            plan: The layer.
            positions: Positions of its keys, ``(m,)`` or ``(batch, m)``.
        """
        pending, self._pending = self._pending, []
        rotary = plan.rotary
        if rotary is None:
            return
        if len(pending) != rotary.calls_seen:
            raise CaptureError(
                f"{plan.name} called its rotary function {len(pending)} times, {rotary.calls_seen} times in the proof: "
                "it was replaced or the model took another path"
            )
        used = [pending[index] for index in rotary.calls if pending[index].known is not rotary.found]
        for glimpse in used:
            if glimpse.known is not None:
                difference = functools.partial(_difference, glimpse.known, rotary.found, positions)
                self._open.append((_ROTATION, plan.name, difference, 2e-3))
        new = [glimpse for glimpse in used if glimpse.sample is not None]
        if new:
            self._look(plan, new, positions)
            for invocation in {id(g.invocation): g.invocation for g in new}.values():
                # Only if all that it rotates was compared.
                if invocation is not None and sum(g.invocation is invocation for g in new) == invocation.rotated:
                    self._compared = [*self._compared[-3:], _Compared(invocation, rotary.found)]

    def _look(self, plan: LayerPlan, glimpses: list[_Glimpse], positions: Tensor) -> None:
        """Have samples compared with a plan at the end of the pass, all at once if they are alike.

        A GPU is given work faster than it is done, but for the first layers, when it has nothing to do yet.
        """
        assert plan.rotary is not None
        samples = [glimpse.sample for glimpse in glimpses if glimpse.sample is not None]
        tokens = glimpses[0].tokens
        if len({(before.shape[0], before.shape[2:], before.device, before.dtype) for before, _ in samples}) == 1:
            samples = [(torch.cat([before for before, _ in samples], 1), torch.cat([after for _, after in samples], 1))]
        at = positions[..., positions.shape[-1] - tokens :][..., _few(tokens)]
        for before, after in samples:
            mismatch = functools.partial(plan.rotary.mismatch, before, after, at)
            self._open.append((_ROTATION, plan.name, mismatch, _allowed(after)))

    def expect_output(self, attention: LayerAttention) -> None:
        """Refuse, when the pass is checked, an output of the last query that its pattern and the values do not give.

        This shows an attention function that does not do what it is told, such as a kernel with a window of its own.
        """
        row = slice(attention.n - 1, attention.n)
        with torch.no_grad():
            seen = attention.visible(row).any(-1, keepdim=True)
            excess = torch.where(seen, output_excess(attention, row), 0.0).max()
            error = excess / attention.output[:, row].abs().max().clamp_min(1e-30)
        self._open.append((_OUTPUT, attention.name, lambda: error, _allowed(attention.rot_q)))

    def expect_numbers(self, output: Tensor) -> None:
        """Refuse, when the pass is checked, an output that holds NaN: some weight does, or a layer overflowed."""
        self._open.insert(0, (_NAN, "", lambda: output.isnan().any(), 0.0))

    def check(self) -> None:
        """Refuse if the model rotated differently from what was proved, or its output holds NaN."""
        found = [(problem, name, error(), limit) for problem, name, error, limit in self._open]
        self.start()
        for problem, name, error, limit in found:
            if not float(error) <= limit:
                raise CaptureError(problem.format(name=name, error=float(error)))


def _allowed(x: Tensor) -> float:
    """Largest relative error of what is computed from a tensor."""
    return 2e-2 if x.dtype == torch.bfloat16 else 2e-3


def _few(n: int) -> slice:
    """The last of n tokens, the middle one and one of the first. A slice: indices would have to go to the device."""
    step = max(1, (n - 2) // 2)
    return slice(max(0, n - 1 - 2 * step), None, step)


def _difference(one: Identified, other: Identified, positions: Tensor) -> Tensor:
    """Largest difference that two rotations make at some positions, relative."""
    if one.source_pairing != other.source_pairing:
        return torch.tensor(torch.inf)
    a, b = one.rotation, other.rotation
    if (a.pairing, a.offset, a.planes) != (b.pairing, b.offset, b.planes):
        return torch.tensor(torch.inf)
    angle = (a.inv_freq - b.inv_freq).abs().max().to(positions.device) * positions.max()
    return angle + abs(a.scaling / b.scaling - 1)
