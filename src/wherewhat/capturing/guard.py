"""Watches, while a capture runs, that the model still rotates as it did in the proof."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.capturing.calls import RotaryCall, identities
from wherewhat.capturing.learn import LayerPlan, Plan
from wherewhat.capturing.rotation import Identified
from wherewhat.errors import CaptureError


@dataclass(frozen=True)
class _Glimpse:
    """A few tokens of one call of the rotary function.

    Attributes:
        key: What it was given, see :func:`~wherewhat.capturing.calls.identities`.
        tokens: How many tokens there were.
        known: The rotation with which a call given the same was compared already, if any.
        sample: Those kept, before and after, if none was.
        others: Weak references to the other tensors it was given, likewise.
    """

    key: tuple[Any, ...]
    tokens: int
    known: Identified | None
    sample: tuple[Tensor, Tensor] | None = None
    others: tuple[weakref.ref[Tensor], ...] = ()


class RotationGuard:
    """Compares a few tokens of each rotation with the plan's; the numbers are looked at when the pass ends.

    Looking at a number waits for the device, so that is done once per pass and not per layer. Models that make
    their angles once and hand them to every layer are compared once for all layers.
    """

    def __init__(self, plan: Plan) -> None:
        self._axis = next((p.rotary.token_axis for p in plan.layers if p.rotary is not None), None)
        self._indices: dict[tuple[int, torch.device], Tensor] = {}
        self.start()

    def start(self) -> None:
        """Forget the pass before, which may have broken off."""
        self._pending: list[_Glimpse] = []
        self._mismatch: list[tuple[str, Tensor, float]] = []
        self._compared: dict[tuple[Any, ...], tuple[tuple[weakref.ref[Tensor], ...], Identified]] = {}
        self._given: tuple[Any, ...] = ()
        self._key: tuple[Any, ...] = ()

    def glimpse(self, call: RotaryCall) -> None:
        """Keep what is needed of a rotation until its attention is seen."""
        if self._axis is None:
            return
        axis = min(self._axis, call.after.ndim - 1)
        n = call.after.shape[axis]
        if call.given is not self._given:  # queries and keys of a layer come with the very same
            self._given, self._key = call.given, identities(call.given)
        known = self._alike(self._key)
        if known is not None:
            self._pending.append(_Glimpse(self._key, n, known))
            return
        before, after = (t.index_select(axis, self._index(n, t.device)).detach() for t in (call.before, call.after))
        others = tuple(weakref.ref(x) for x in call.given if isinstance(x, Tensor))
        self._pending.append(_Glimpse(self._key, n, None, (before, after), others))

    def compare(self, plan: LayerPlan, positions: Tensor) -> None:
        """Note how far the rotations since the last attention are from a layer's plan.

        Args:
            plan: The layer.
            positions: Positions of its keys, ``(m,)`` or ``(batch, m)``.

        Raises:
            CaptureError: If there were more or fewer rotations than in the proof.
        """
        pending, self._pending, self._given = self._pending, [], ()
        rotary = plan.rotary
        if rotary is None:
            return
        if len(pending) != rotary.calls_seen:
            raise CaptureError(
                f"{plan.name} called its rotary function {len(pending)} times, {rotary.calls_seen} times in the proof: "
                "it was replaced or the model took another path"
            )
        for glimpse in (pending[index] for index in rotary.calls):
            if glimpse.sample is None:
                if glimpse.known is not rotary.found:
                    self._mismatch.append((plan.name, _difference(glimpse.known, rotary.found, positions), 2e-3))
                continue
            before, after = glimpse.sample
            at = positions[..., positions.shape[-1] - glimpse.tokens :]
            at = at.index_select(-1, self._index(glimpse.tokens, at.device))
            limit = 2e-2 if after.dtype == torch.bfloat16 else 2e-3
            self._mismatch.append((plan.name, rotary.mismatch(before, after, at), limit))
            if glimpse.others:
                self._compared[glimpse.key] = (glimpse.others, rotary.found)

    def expect_numbers(self, output: Tensor) -> None:
        """Refuse, when the pass is checked, an output that holds NaN: some weight does, or a layer overflowed."""
        self._mismatch.insert(0, ("", torch.where(output.isnan().any(), torch.nan, 0.0), 0.0))

    def check(self) -> None:
        """Refuse if the model rotated differently from what was proved, or its output holds NaN.

        Raises:
            CaptureError: With the layer and the numbers.
        """
        mismatch, self._mismatch = self._mismatch, []
        for name, error, limit in mismatch:
            if not float(error) <= limit and not name:
                raise CaptureError(
                    "the model's logits hold NaN: weights hold NaN or a layer overflows; load it again, as float32"
                )
            if not float(error) <= limit:
                raise CaptureError(
                    f"{name} rotates differently from the proof (relative error {float(error):.2g}): its "
                    "frequencies depend on the length of the text, or positions were changed; prove it at this length"
                )

    def _alike(self, key: tuple[Any, ...]) -> Identified | None:
        """The rotation with which a call given the very same things was compared."""
        others, found = self._compared.get(key, ((), None))
        return found if all(ref() is not None for ref in others) else None

    def _index(self, n: int, device: torch.device) -> Tensor:
        """Second, middle and last of n tokens."""
        if (n, device) not in self._indices:
            self._indices[n, device] = torch.tensor(sorted({min(1, n - 1), n // 2, n - 1}), device=device)
        return self._indices[n, device]


def _difference(one: Identified | None, other: Identified, positions: Tensor) -> Tensor:
    """Largest difference that two rotations make at some positions, relative."""
    if one is None or one.source_pairing != other.source_pairing:
        return torch.tensor(torch.inf)
    a, b = one.rotation, other.rotation
    if (a.pairing, a.offset, a.planes) != (b.pairing, b.offset, b.planes):
        return torch.tensor(torch.inf)
    angle = (a.inv_freq - b.inv_freq).abs().max().to(positions.device) * positions.max()
    return angle + abs(a.scaling / b.scaling - 1)
