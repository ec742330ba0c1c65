"""The proof: before a model is measured, one short pass must show that what is captured is what it computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.calls import AttentionCall
from wherewhat.capturing.learn import LayerPlan, Plan, Recorder, plan_from
from wherewhat.capturing.same_token import position_drift
from wherewhat.capturing.session import Capture, Editor, Reducer, capture_with
from wherewhat.capturing.watch import ModelWatch, Route, observing
from wherewhat.errors import CaptureError

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
class LayerProof:
    """How well one layer was reproduced.

    Attributes:
        plan: The layer and its rotation.
        heads: Query heads.
        kv_heads: Key heads.
        head_dim: Dimension of queries and keys.
        rotation_error: Our rotation of the model's pre-rotation tensors against its post-rotation ones, relative.
        weights_error: Softmax of our logits under the model's mask against its own eager attention weights.
        output_error: Our attention output against the model's in its normal implementation, relative.
        drift: How far queries or keys before rotation turn with the position alone, see
            :func:`~wherewhat.capturing.same_token.position_drift`.
        features: What else shapes its logits: ``bias``, ``soft-cap``, ``sinks``, ``window`` (or chunk), ``not causal``.
    """

    plan: LayerPlan
    heads: int
    kv_heads: int
    head_dim: int
    rotation_error: float
    weights_error: float
    output_error: float
    drift: float
    features: tuple[str, ...]


@dataclass(frozen=True)
class Proof:
    """Outcome of the proof for one model.

    Attributes:
        plan: How to capture the model.
        implementation: Attention implementation the model runs with.
        layers: One entry per attention call of the forward pass.
        output_change: Largest change of the model's logits caused by capturing; must be 0.
        tolerance: Limit on the layers' errors for the model's dtype.
    """

    plan: Plan
    implementation: str
    layers: tuple[LayerProof, ...]
    output_change: float
    tolerance: float

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


def prove(model: Any, *, input_ids: Tensor | None = None, length: int = PROMPT_TOKENS) -> Proof:
    """Show on a short prompt that the capture of ``model`` is faithful.

    Three passes: plain, captured, and captured under the eager implementation.

    Args:
        model: A causal language model of transformers, in eval mode.
        input_ids: Prompt ``(1, n)``; by default ``length`` random tokens.
        length: Tokens of the default prompt. Models whose frequencies depend on the length of the text must be
            proved at the length they are used at.

    Raises:
        CaptureError: If there is no softmax attention to capture or a number is out of bounds.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_input_embeddings"):
        raise CaptureError(f"{type(model).__name__} is not a model of transformers: only those can be captured")
    if model.training:
        raise CaptureError("the model is in training mode, where dropout changes every pass: call model.eval() first")
    ids = _prompt(model, length) if input_ids is None else input_ids
    if ids.shape[1] < SHORTEST_PROOF:
        raise CaptureError(f"a prompt of {ids.shape[1]} tokens proves nothing: use {SHORTEST_PROOF} at least")
    tolerance = _tolerance(model)
    with torch.no_grad():
        plain = _logits(model, ids)
        plan, native, captured = _record(model, ids)
        change = _largest_change(model, ids, plain, captured)
        with eager_attention(model):
            _, eager, _ = _record(model, ids)
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
            drifts = position_drift(model, plan, ids, same_input=tolerance)
        layers = tuple(map(_layer_proof, plan.layers, native, eager, drifts))
    proof = Proof(
        plan=plan,
        implementation=str(getattr(model.config, "_attn_implementation", None) or "eager"),
        layers=layers,
        output_change=change,
        tolerance=tolerance,
    )
    if proof.failures:
        more = f" (and {len(proof.failures) - 1} more)" if len(proof.failures) > 1 else ""
        hint = "" if all(x.weights_error > proof.tolerance for x in layers) else _ADVICE.get(proof.implementation, "")
        raise CaptureError(f"the capture of {type(model).__name__} is not faithful: {proof.failures[0]}{more}{hint}")
    _proofs[model] = proof
    return proof


@contextmanager
def capture(model: Any, reducer: Reducer, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Hand each layer's attention to ``reducer`` while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        reducer: Called once per layer and forward pass, with that layer's :class:`LayerAttention`.
        proof: The model's proof; by default the last one of this model, or a new one.

    Example:
        >>> norms = []
        >>> with capture(model, lambda a: norms.append(a.rot_q.norm(dim=-1).mean())):
        ...     model(input_ids)
    """
    found = proof or _proofs.get(model) or prove(model)
    with capture_with(model, found.plan, reducer) as session:
        yield session


@contextmanager
def intervene(model: Any, editor: Editor, *, proof: Proof | None = None) -> Iterator[Capture]:
    """Let ``editor`` replace the attention output of layers while ``model`` runs inside the context.

    Args:
        model: A causal language model of transformers.
        editor: Called once per layer and forward pass. It returns the output ``(batch, n, heads, d_v)`` to go on with,
            or None to leave the layer as it is.
        proof: The model's proof; by default the last one of this model, or a new one.

    Example:
        >>> with intervene(model, lambda a: torch.zeros_like(a.output) if a.layer == 3 else None):
        ...     model(input_ids)  # layer 3 attends to nothing
    """
    found = proof or _proofs.get(model) or prove(model)
    with capture_with(model, found.plan, editor, edits=True) as session:
        yield session


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Run the model's own eager attention until the context ends."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: getattr(c, "_attn_implementation_internal", None) for key, c in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _prompt(model: Any, length: int) -> Tensor:
    config = model.config.get_text_config()
    embedding = next(model.get_input_embeddings().parameters())
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, embedding.shape[0], (1, 4 * length), generator=generator)
    ordinary = [i for i in ids[0].tolist() if i not in special][:length]
    return torch.tensor([ordinary], device=embedding.device)


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if not isinstance(logits, Tensor):
        raise CaptureError(f"{type(model).__name__} returns no logits: it is not a causal language model")
    return logits


def _tolerance(model: Any) -> float:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if dtype not in TOLERANCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise CaptureError(f"there is no proof for weights of type {dtype}: load the model as {known}")
    return TOLERANCE[dtype]


def _record(model: Any, ids: Tensor) -> tuple[Plan, list[AttentionCall], Tensor]:
    """Run once with everything recorded; tries the attention interface first, then tracing."""
    routes: tuple[Route, ...] = ("interface", "trace")
    for route in routes:
        watch = ModelWatch(model)
        record = Recorder(watch)
        with observing(model, watch, record, route=route):
            logits = _logits(model, ids)
        if record.attention:
            return plan_from(model, watch, record, route), record.attention, logits
    raise CaptureError(f"{type(model).__name__} shows no softmax attention: there is nothing to measure")


def _largest_change(model: Any, ids: Tensor, plain: Tensor, captured: Tensor) -> float:
    """Change of the logits by capturing, beyond what the model itself varies between two plain passes."""
    change = float((plain.float() - captured.float()).abs().max())
    if change == 0:
        return 0.0
    own = float((plain.float() - _logits(model, ids).float()).abs().max())
    return 0.0 if 0 < change <= own else change


def _layer_proof(plan: LayerPlan, native: AttentionCall, eager: AttentionCall, drift: float) -> LayerProof:
    normal, slow = _describe(plan, native), _describe(plan, eager)
    half = eager.query.dtype in (torch.float16, torch.bfloat16)
    weights = eager.reweigh() if half and eager.reweigh is not None else eager.weights
    weights_error = torch.inf
    if weights is not None and weights.shape == (slow.rot_q.shape[0], slow.heads, slow.n, slow.m):
        ours = slow.pattern()
        weights_error = float((ours - weights).abs().max())
        if slow.sinks is not None:
            # Some families return the weights before the sink takes its share; the output shows it is taken.
            without = ours / ours.sum(-1, keepdim=True)
            weights_error = min(weights_error, float((without - weights).abs().max()))
    return LayerProof(
        plan=plan,
        heads=normal.heads,
        kv_heads=normal.kv_heads,
        head_dim=normal.rot_q.shape[-1],
        rotation_error=0.0 if plan.rotary is None else plan.rotary.error,
        weights_error=weights_error,
        output_error=_output_error(normal),
        drift=drift,
        features=tuple(_features(normal)),
    )


def _features(attention: LayerAttention) -> Iterator[str]:
    visible = attention.visible()
    bias = attention.bias()
    if bias is not None and bool((bias * visible).any()):
        yield "bias"
    if attention.softcap is not None:
        yield "soft-cap"
    if attention.sinks is not None:
        yield "sinks"
    causal = torch.ones(attention.n, attention.m, dtype=torch.bool, device=visible.device).tril(
        attention.m - attention.n
    )
    if bool((causal & ~visible).any()):
        yield "window"
    if bool((visible & ~causal).any()):
        yield "not causal"


def _describe(plan: LayerPlan, call: AttentionCall) -> LayerAttention:
    return LayerAttention(
        layer=plan.layer,
        name=plan.name,
        rot_q=call.query,
        rot_k=call.key,
        value=call.value,
        output=call.output,
        scale=call.scale,
        mask=call.mask,
        rotation=plan.rotation,
        positions=torch.arange(call.key.shape[2], device=call.key.device),
        softcap=call.softcap,
        sinks=call.sinks,
        declared_window=call.window,
    )


def _output_error(attention: LayerAttention) -> float:
    """Our attention output against the model's, relative to the largest entry."""
    groups = attention.heads // attention.value.shape[1]
    pattern = attention.pattern()
    value = attention.value.to(pattern.dtype).repeat_interleave(groups, 1)
    ours = (pattern @ value).transpose(1, 2)
    theirs = attention.output.to(pattern.dtype)
    if theirs.numel() != ours.numel():
        return torch.inf
    theirs = theirs.reshape(ours.shape)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
