"""The proof: before a model is measured, one short pass must show that what is captured is what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.calls import unobserved
from wherewhat.captures.comparison import (
    LayerProof,
    eager_attention,
    largest_change,
    layer_proof,
    position_drift,
    record_pass,
)
from wherewhat.captures.plan import Plan, Unmeasured, unmeasured_layers
from wherewhat.captures.session import Capture, Editor, Reducer, capture_with
from wherewhat.captures.structure import State, state_of
from wherewhat.captures.wrappers import (
    check_present,
    first_logits,
    opened,
    proof_prompt,
    transformers_model,
    uncompiled,
    wrapped_model,
)
from wherewhat.errors import CaptureError
from wherewhat.models.positions import hard_limit
from wherewhat.numerics import onednn_for, weight_dtypes
from wherewhat.options import checked

TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest error on rotated tensors (relative), attention weights and attention outputs (relative) by dtype.

Models compute rotary angles in float32 whatever their dtype, which is what limits float64."""

DRIFT_ALLOWED = 0.1
"""A rotation that was not seen turns queries and keys by 0.2 and more, rounding by 0.03 even in half precision."""

SHORTEST_PROOF = 8
"""Tokens below which a rotation cannot be told from another."""

# Some versions of transformers leave out soft-caps or sinks in kernels that cannot do them, without a word.
_ADVICE = {"sdpa": "; its sdpa attention differs from its eager one: load it with attn_implementation='eager'"}

PROMPT_TOKENS = 23
"""Prime and odd, so that it is not mistaken for a number of heads when axes are told apart."""


@dataclass(frozen=True)
class Proof:
    """Outcome of the proof for one model.

    Attributes:
        plan: How to capture the model.
        implementation: Attention implementation the model runs with.
        layers: One entry per attention call of the forward pass.
        output_change: Largest change of the model's logits caused by capturing; must be 0.
        tolerance: Limit on the layers' errors for the model's dtype.
        length: Tokens it was proved on.
        state: What it depends on, see :func:`~wherewhat.captures.structure.state_of`.
        unmeasured: Layers without softmax self-attention, in models that have both.
    """

    plan: Plan
    implementation: str
    layers: tuple[LayerProof, ...]
    output_change: float
    tolerance: float
    length: int
    state: State = field(repr=False, compare=False)
    unmeasured: tuple[Unmeasured, ...] = ()

    @property
    def failures(self) -> list[str]:
        """One line per number that is out of bounds."""
        found = []
        if self.output_change != 0:
            found.append(f"capturing changes the model's output by {self.output_change:.3g}")
        for layer in self.layers:
            for what, error in (
                ("rotation", layer.rotation_error),
                ("attention weights", layer.weights_error),
                ("attention output", layer.output_error),
            ):
                if not error <= self.tolerance:
                    found.append(f"{layer.plan.name}: {what} differ by {error:.3g} (allowed {self.tolerance:g})")
            if not layer.drift <= DRIFT_ALLOWED:
                found.append(
                    f"{layer.plan.name}: one token at two positions has queries or keys {layer.drift:.3g} apart before "
                    f"rotation (allowed {DRIFT_ALLOWED:g}): it rotates in a way that was not seen"
                )
        return found

    @property
    def ok(self) -> bool:
        """Whether every number is within its bound."""
        return not self.failures


_proofs: weakref.WeakKeyDictionary[nn.Module, Proof] = weakref.WeakKeyDictionary()


@checked(model=transformers_model)
def prove(model: Any, *, input_ids: Tensor | None = None, length: int = PROMPT_TOKENS) -> Proof:
    """Show on a short prompt that the capture of ``model`` is faithful.

    Four passes: plain, captured, captured under the eager implementation, and with one token at every position.

    Args:
        model: A causal language model of transformers in eval mode, or one in a wrapper that is known (PEFT,
            ``torch.compile``, ``DataParallel``, a pipeline).
        input_ids: Prompt ``(1, n)``; by default ``length`` random tokens.
        length: Tokens of the default prompt, or as many as the model has positions for. Models whose frequencies
            depend on the length of the text must be proved at the length they are used at.

    Raises:
        CaptureError: If there is no softmax attention to capture, the model has too few positions or a number is out
            of bounds.
    """
    check_present(model)
    state = state_of(model)
    ids = proof_prompt(model, input_ids, length)
    limit, needed = hard_limit(model), max(SHORTEST_PROOF, ids.shape[1])
    if limit is not None and limit < needed:
        way_out = "it cannot be captured" if limit < SHORTEST_PROOF else "give a shorter prompt"
        raise CaptureError(f"{type(model).__name__} has {limit} positions, but its proof takes {needed}: {way_out}")
    if ids.shape[1] < SHORTEST_PROOF:
        raise CaptureError(f"a prompt of {ids.shape[1]} tokens proves nothing: use {SHORTEST_PROOF} at least")
    tolerance = _tolerance(model)
    with torch.no_grad(), uncompiled(), unobserved(), onednn_for(weight_dtypes(model)):
        plain = first_logits(model, ids)
        if bool(plain.isnan().any()):
            raise CaptureError(
                f"{type(model).__name__} gives NaN for logits: weights hold NaN, or a layer overflows: load it "
                "again, as float32"
            )
        plan, native, captured = record_pass(model, ids)
        # Autocast and quantised layers compute in a dtype that is not that of the weights.
        used = {x.dtype for call in native for x in (call.value, call.output)}
        tolerance = max(tolerance, *(TOLERANCE.get(dtype, 0.0) for dtype in used))
        change = largest_change(model, ids, plain, captured)
        with eager_attention(model):
            _, eager, _ = record_pass(model, ids)
        for call, layer in zip(native, plan.layers, strict=True):
            if call.key.shape[2] != call.query.shape[2]:
                raise CaptureError(
                    f"{layer.name} attends to {call.key.shape[2]} keys from {call.query.shape[2]} tokens: its keys are "
                    "not the tokens themselves (compressed or added ones), so they have no positions"
                )
        if len(eager) != len(native):
            raise CaptureError(
                f"the eager implementation has {len(eager)} attention calls, the normal one {len(native)}"
            )
        drifts = [0.0] * len(native)
        if all(layer.rotary is None or layer.rotary.error <= tolerance for layer in plan.layers):
            drifts = position_drift(model, plan, ids)
        layers = tuple(map(layer_proof, plan.layers, native, eager, drifts))
    proof = Proof(
        plan=plan,
        implementation=str(getattr(model.config, "_attn_implementation", None) or "eager"),
        layers=layers,
        output_change=change,
        tolerance=tolerance,
        length=ids.shape[1],
        state=state,
        unmeasured=unmeasured_layers(model, plan),
    )
    if proof.failures:
        more = f" (and {len(proof.failures) - 1} more)" if len(proof.failures) > 1 else ""
        hint = "" if all(x.weights_error > proof.tolerance for x in layers) else _ADVICE.get(proof.implementation, "")
        raise CaptureError(f"the capture of {type(model).__name__} is not faithful: {proof.failures[0]}{more}{hint}")
    _proofs[model] = proof
    return proof


def _current(model: Any, proof: Proof | None) -> Proof:
    """Return a proof of the model as it is: the given or last one if nothing it depends on changed, or a new one."""
    found = proof or _proofs.get(model)
    if found is None:
        return prove(model)
    return found if found.state == state_of(model) else prove(model, length=found.length)


@checked(model=wrapped_model)
@contextmanager
def capture(model: Any, reducer: Reducer, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Hand each layer's attention to ``reducer`` while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        reducer: Called once per layer and forward pass, with that layer's :class:`LayerAttention`.
        proof: The model's proof; by default its last one. If the model changed since, it is proved again.

    Examples:
        >>> norms = []
        >>> with capture(model, lambda a: norms.append(a.rot_q.norm(dim=-1).mean())):
        ...     model(input_ids)
    """
    with opened(model) as inner:
        found = _current(inner, proof)
        with capture_with(inner, found.plan, reducer) as session:
            yield session


@checked(model=wrapped_model)
@contextmanager
def intervene(model: Any, editor: Editor, *, proof: Proof | None = None, blind: bool = False) -> Iterator[Capture]:
    """Let ``editor`` replace the attention output of layers while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        editor: Called once per layer and forward pass. It returns the output ``(batch, n, heads, d_v)`` to go on with,
            or None to leave the layer as it is.
        proof: The model's proof; by default its last one. If the model changed since, it is proved again.
        blind: The editor does not look at ``output``: where the model goes through transformers' attention interface,
            its own attention is then computed only for layers that the editor leaves as they are.

    Examples:
        >>> with intervene(model, lambda a: torch.zeros_like(a.output) if a.layer == 3 else None):
        ...     model(input_ids)  # layer 3 attends to nothing
    """
    with opened(model) as inner:
        found = _current(inner, proof)
        with capture_with(inner, found.plan, editor, edits=True, blind=blind) as session:
            yield session


def _tolerance(model: Any) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype not in TOLERANCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise CaptureError(f"there is no proof for weights of type {dtype}: load the model as {known}")
    return TOLERANCE[dtype]
