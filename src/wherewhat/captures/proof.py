"""Proofs: short passes show that the captured attention of a model is what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.calls import unobserved
from wherewhat.captures.layer_proofs import (
    LayerProof,
    ProofTable,
    eager_attention,
    input_device,
    largest_change,
    layer_proof,
    layer_values,
    logits_of,
    position_drift,
    random_prompt,
    record_pass,
    runs_eagerly,
)
from wherewhat.captures.layout import CaptureLayout, Unmeasured, layout_from, unmeasured_layers
from wherewhat.captures.session import NAN_LOGITS, Capture, Editor, Reducer, capture_with
from wherewhat.captures.structure import State, opened, state_of, transformers_model, uncompiled, wrapped_model
from wherewhat.errors import CaptureError, one_line
from wherewhat.imports import package_version
from wherewhat.models.loaded import describe_device, describe_dtype, hard_limit, model_name
from wherewhat.numerics import onednn_for, weight_dtypes
from wherewhat.options import checked

TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest error of rotated tensors (relative), attention weights and attention outputs (relative) by dtype.

Models compute rotary angles in float32 for all dtypes, which limits float64."""

DRIFT_ALLOWED = 0.1
"""Largest drift: an unobserved rotation changes queries and keys by 0.2 and more, half precision by up to 0.03."""

SHORTEST_PROOF = 8
"""Smallest number of tokens that distinguishes rotations."""

# Some versions of transformers silently ignore soft-caps or sinks in kernels without support for them.
_ADVICE = {"sdpa": "; its sdpa attention differs from its eager one: load it with attn_implementation='eager'"}

PROMPT_TOKENS = 23
"""Tokens of the default prompt: prime and odd, so that the axis of tokens is not confused with that of heads."""


@dataclass(frozen=True)
class Proof:
    """Outcome of the proof for one model.

    Attributes:
        layout: How to capture the model.
        implementation: Attention implementation the model runs with.
        layers: One entry per attention call of the forward pass.
        output_change: Largest change of the model's logits caused by the capture; must be 0.
        tolerance: Limit on the layers' errors for the model's dtype.
        length: Number of tokens of the prompt.
        state: State on which it depends, see :func:`~wherewhat.captures.structure.state_of`.
        unmeasured: Layers without softmax self-attention, in models that have both.
        name: Name or path the model was loaded from; its class for a model made in memory.
        model_type: Its ``model_type`` in transformers.
        dtype: Dtype of its weights.
        device: Its device, or devices joined by "+".
    """

    layout: CaptureLayout
    implementation: str
    layers: tuple[LayerProof, ...]
    output_change: float
    tolerance: float
    length: int
    state: State = field(repr=False, compare=False)
    unmeasured: tuple[Unmeasured, ...] = ()
    name: str = ""
    model_type: str = ""
    dtype: str = ""
    device: str = ""

    def __repr__(self) -> str:
        return f"Proof of {self._subject}, {self.table().text()}"

    def _repr_html_(self) -> str:
        return f"<p>Proof of {escape(self._subject)}</p>{self.table().html()}"

    @property
    def _subject(self) -> str:
        return f"{self.name} ({self.model_type}, {self.dtype} on {self.device})"

    def table(self, *, each: bool = False) -> ProofTable:
        """Return layers, heads, rotation, features and errors as a table, with equal layers in one row.

        Args:
            each: Whether to show one row per layer, with all errors.
        """
        title = (
            f"{self.layout.route} route, {self.implementation} attention, errors up to {self.tolerance:g} are allowed"
        )
        return ProofTable.of(self.layers, self.unmeasured, title=title, each=each)

    def as_dict(self) -> dict[str, Any]:
        """Return the proof as JSON values, as printed by ``wherewhat check --json``."""
        return {
            "proved": self.ok,
            "name": self.name,
            "model_type": self.model_type,
            "route": self.layout.route,
            "implementation": self.implementation,
            "dtype": self.dtype,
            "device": self.device,
            "tolerance": self.tolerance,
            "tokens": self.length,
            "output_change": self.output_change,
            "layers": layer_values(self.layers),
            "unmeasured": [asdict(layer) for layer in self.unmeasured],
            "versions": {name: package_version(name) for name in ("wherewhat", "torch", "transformers")},
        }

    @property
    def failures(self) -> list[str]:
        """One line for each number that is out of bounds."""
        lines = []
        if self.output_change != 0:
            lines.append(f"capturing changes the model's output by {self.output_change:.3g}")
        for layer in self.layers:
            for what, error in (
                ("rotation", layer.rotation_error),
                ("attention weights", layer.weights_error),
                ("attention output", layer.output_error),
            ):
                if not error <= self.tolerance:
                    lines.append(f"{layer.layout.name}: {what} differ by {error:.3g} (allowed {self.tolerance:g})")
            if not layer.drift <= DRIFT_ALLOWED:
                lines.append(
                    f"{layer.layout.name}: one token at two positions has queries or keys {layer.drift:.3g} apart "
                    f"before rotation (allowed {DRIFT_ALLOWED:g}): it rotates in a way that was not seen"
                )
        return lines

    @property
    def ok(self) -> bool:
        """Whether every number is within its bound."""
        return not self.failures


_proofs: weakref.WeakKeyDictionary[nn.Module, Proof] = weakref.WeakKeyDictionary()


@checked(model=transformers_model)
def prove(model: Any, *, input_ids: Tensor | None = None, length: int = PROMPT_TOKENS) -> Proof:
    """Show on a short prompt that the capture of ``model`` is exact.

    Runs four passes: plain, captured, captured with the eager implementation, and with one token at every position.
    The third is left out for models that run with the eager implementation already.

    Args:
        model: A causal language model of transformers in evaluation mode, which may be wrapped (PEFT,
            ``torch.compile``, ``DataParallel``, a pipeline).
        input_ids: Prompt ``(1, n)``; by default ``length`` random tokens.
        length: Tokens of the default prompt, limited by the model's positions. Models whose frequencies depend on the
            length of the text must be proved at the length at which they are used.

    Raises:
        CaptureError: If there is no softmax attention to capture, the model has too few positions or a number is out
            of bounds.
    """
    _check_weights(model)
    state = state_of(model)
    ids = _prompt(model, input_ids, length)
    limit, needed = hard_limit(model), max(SHORTEST_PROOF, ids.shape[1])
    if limit is not None and limit < needed:
        advice = "it cannot be captured" if limit < SHORTEST_PROOF else "give a shorter prompt"
        raise CaptureError(f"{type(model).__name__} has {limit} positions, but its proof takes {needed}: {advice}")
    if ids.shape[1] < SHORTEST_PROOF:
        raise CaptureError(f"a prompt of {ids.shape[1]} tokens proves nothing: use {SHORTEST_PROOF} at least")
    tolerance = _tolerance(model)
    with torch.no_grad(), uncompiled(), unobserved(), onednn_for(weight_dtypes(model)):
        plain = _first_logits(model, ids)
        if bool(plain.isnan().any()):
            raise CaptureError(NAN_LOGITS)
        record, route, captured = record_pass(model, ids)
        layout, native = layout_from(model, record, route), record.attention
        # Autocast and quantised layers compute in a dtype that is not that of the weights.
        used = {x.dtype for call in native for x in (call.value, call.output)}
        tolerance = max(tolerance, *(TOLERANCE.get(dtype, 0.0) for dtype in used))
        change = largest_change(model, ids, plain, captured)
        eager = native
        if not runs_eagerly(model):
            with eager_attention(model):
                eager = record_pass(model, ids, first=route)[0].attention
        for call, layer in zip(native, layout.layers, strict=True):
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
        if all(layer.rotary is None or layer.rotary.error <= tolerance for layer in layout.layers):
            drifts = position_drift(model, layout, ids)
        layers = tuple(map(layer_proof, layout.layers, native, eager, drifts))
    proof = Proof(
        layout=layout,
        implementation=str(getattr(model.config, "_attn_implementation", None) or "eager"),
        layers=layers,
        output_change=change,
        tolerance=tolerance,
        length=ids.shape[1],
        state=state,
        unmeasured=unmeasured_layers(model, layout),
        name=model_name(model),
        model_type=str(getattr(model.config, "model_type", "")),
        dtype=describe_dtype(model),
        device=describe_device(model),
    )
    if proof.failures:
        more = f" (and {len(proof.failures) - 1} more)" if len(proof.failures) > 1 else ""
        hint = "" if all(x.weights_error > proof.tolerance for x in layers) else _ADVICE.get(proof.implementation, "")
        raise CaptureError(f"the capture of {type(model).__name__} is not faithful: {proof.failures[0]}{more}{hint}")
    _proofs[model] = proof
    return proof


@checked(model=wrapped_model)
@contextmanager
def capture(model: Any, reducer: Reducer, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Pass each layer's attention to ``reducer`` while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        reducer: Called once per layer and forward pass, with that layer's :class:`LayerAttention`.
        proof: The model's proof; by default its last one. If the model has changed since, it is proved again.

    Examples:
        >>> norms = []
        >>> with capture(model, lambda a: norms.append(a.rot_q.norm(dim=-1).mean())):
        ...     model(input_ids)
    """
    with opened(model) as inner:
        proof = current_proof(inner, proof)
        with capture_with(inner, proof.layout, reducer) as session:
            yield session


@checked(model=wrapped_model)
@contextmanager
def intervene(model: Any, editor: Editor, *, proof: Proof | None = None, blind: bool = False) -> Iterator[Capture]:
    """Replace the attention output of layers by that of ``editor`` while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        editor: Called once per layer and forward pass. It returns the new output ``(batch, n, heads, d_v)``, or None to
            leave the layer unchanged.
        proof: The model's proof; by default its last one. If the model has changed since, it is proved again.
        blind: The editor does not read ``output``: models that use transformers' attention interface then compute their
            own attention only for layers that the editor leaves unchanged.

    Examples:
        >>> with intervene(model, lambda a: torch.zeros_like(a.output) if a.layer == 3 else None):
        ...     model(input_ids)  # without attention in layer 3
    """
    with opened(model) as inner:
        proof = current_proof(inner, proof)
        with capture_with(inner, proof.layout, editor, edits=True, blind=blind) as session:
            yield session


def current_proof(model: Any, proof: Proof | None = None) -> Proof:
    """Return the given or last proof if the model's state is unchanged, else a new one."""
    proof = proof or _proofs.get(model)
    if proof is None:
        return prove(model)
    return proof if proof.state == state_of(model) else prove(model, length=proof.length)


def _tolerance(model: Any) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype not in TOLERANCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise CaptureError(f"there is no proof for weights of type {dtype}: load the model as {known}")
    return TOLERANCE[dtype]


def _check_weights(model: nn.Module) -> None:
    """Refuse weights on the meta device, unless they are offloaded and loaded when used."""
    absent = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if absent is not None and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise CaptureError(
            f"{absent} of {type(model).__name__} is on the meta device and holds no numbers: load weights"
        )


def _prompt(model: Any, input_ids: Tensor | None, length: int) -> Tensor:
    """Return the prompt of a proof, ``(batch, n)``, on the model's device."""
    if input_ids is None:
        if length < 1:
            raise CaptureError(f"length is {length}: a prompt of no tokens proves nothing, 23 are usual")
        return random_prompt(model, length)
    shape, dtype = tuple(input_ids.shape), input_ids.dtype
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_meta:
        raise CaptureError(f"input_ids has shape {shape} on {input_ids.device}: give token ids of shape (1, n)")
    if dtype not in (torch.int64, torch.int32):
        raise CaptureError(f"input_ids has dtype {str(dtype).removeprefix('torch.')}: give token ids in int64")
    rows = next(model.get_input_embeddings().parameters()).shape[0]
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= rows:
        raise CaptureError(f"input_ids holds {low if low < 0 else high}: token ids of this model are 0 to {rows - 1}")
    return input_ids.to(input_device(model))


def _first_logits(model: Any, ids: Tensor) -> Tensor:
    try:
        return logits_of(model, ids)
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise any exception
        raise CaptureError(f"{type(model).__name__} cannot be run on token ids alone: {one_line(error)}") from error
