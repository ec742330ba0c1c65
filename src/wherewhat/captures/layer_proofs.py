"""Layers of a proof: recorded passes compared with attention recomputed from their capture, and their table."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.calls import AttentionCall
from wherewhat.captures.layout import CaptureLayout, LayerLayout, PassRecorder, Unmeasured, hiding_of
from wherewhat.captures.rotation import Rotation
from wherewhat.captures.session import capture_with, describe, observing, output_excess, rounded_weights
from wherewhat.captures.structure import ModelWatch, Route
from wherewhat.errors import CaptureError
from wherewhat.models.loaded import hard_limit


def input_device(model: Any) -> torch.device:
    """Return the device of the embedding, or the CPU if it is offloaded and a hook moves the tokens."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def last_logits(model: Any, count: int) -> dict[str, int]:
    """Return the argument for logits of the last ``count`` tokens only; none if the model always computes all."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}


def random_prompt(model: Any, length: int) -> Tensor:
    """Return random tokens ``(1, length)`` without special ones; fewer if the model has fewer positions."""
    length = min(length, hard_limit(model) or length)
    config = model.config.get_text_config()
    embedding = next(model.get_input_embeddings().parameters())
    special: set[Any] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list | tuple) else [value])  # Llama 3 has several ends of a text
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, embedding.shape[0], (1, 4 * length), generator=generator, device="cpu")
    ordinary = [i for i in ids[0].tolist() if i not in special][:length]
    return torch.tensor([ordinary], device=input_device(model))


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Run one pass and return its logits, ``(1, n, vocabulary)``."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if not isinstance(logits, Tensor):
        raise CaptureError(f"{type(model).__name__} returns no logits: it is not a causal language model")
    return logits


def record_pass(model: Any, ids: Tensor, *, first: Route = "interface") -> tuple[PassRecorder, Route, Tensor]:
    """Record one pass by the ``first`` route or, if that shows nothing, by the other one; return its logits last."""
    routes: tuple[Route, ...] = ("interface", "trace") if first == "interface" else ("trace", "interface")
    for route in routes:
        watch = ModelWatch(model)
        record = PassRecorder(watch)
        with observing(watch, record, route=route):
            logits = logits_of(model, ids)
        if record.attention:
            return record, route, logits
    raise CaptureError(f"{type(model).__name__} shows no softmax attention: there is nothing to measure")


def largest_change(model: Any, ids: Tensor, plain: Tensor, captured: Tensor) -> float:
    """Return the change of the logits by the capture; 0 if it is within the variation between two plain passes."""
    change = float((plain.float() - captured.float()).abs().max())
    if change == 0:
        return 0.0
    own = float((plain.float() - logits_of(model, ids).float()).abs().max())
    return 0.0 if 0 < change <= own else change


def runs_eagerly(model: Any) -> bool:
    """Return whether all parts of the model use their own eager attention."""
    return all(getattr(c, "_attn_implementation_internal", None) == "eager" for c in _configs(model).values())


def _configs(model: Any) -> dict[int, Any]:
    return {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Use the model's own eager attention inside the context."""
    configs = _configs(model)
    before = {key: getattr(c, "_attn_implementation_internal", None) for key, c in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@dataclass(frozen=True)
class LayerProof:
    """Errors of one recomputed layer.

    Attributes:
        layout: The layer and its rotation.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        head_dim: Dimension of queries and keys.
        rotation_error: Relative error of the rotated tensors.
        weights_error: Error of the attention weights compared with the model's eager implementation.
        output_error: Relative error of the attention output compared with the model's normal implementation.
        drift: Change of queries or keys before rotation with the position alone, see :func:`position_drift`.
        features: Other effects on its logits: ``bias``, ``soft-cap``, ``sinks``, ``window`` (or chunk), ``not causal``.
        window: Sliding window that the model declares for it, even if the prompt is shorter.
    """

    layout: LayerLayout
    heads: int
    kv_heads: int
    head_dim: int
    rotation_error: float
    weights_error: float
    output_error: float
    drift: float
    features: tuple[str, ...]
    window: int | None = None

    def __repr__(self) -> str:
        kv = "" if self.heads == self.kv_heads else f" / {self.kv_heads} kv"
        rotation = "no rotation" if self.layout.rotation is None else f"RoPE {self.layout.rotation}"
        error = max(self.rotation_error, self.weights_error, self.output_error)
        shown = [
            f"layer {self.layout.layer}",
            f"{self.heads} heads{kv}",
            f"d {self.head_dim}",
            rotation,
            *self.features,
        ]
        return f"LayerProof({', '.join(shown)}, error {error:.0e})"


def layer_proof(layout: LayerLayout, native: AttentionCall, eager: AttentionCall, drift: float) -> LayerProof:
    """Compare one layer's normal and eager attention with the recomputed one."""
    positions = torch.arange(native.key.shape[2], device=native.key.device)
    hiding = hiding_of(eager.mask, eager.query.shape[2], eager.key.shape[2])
    normal, slow = describe(layout, native, positions), describe(replace(layout, hiding=hiding), eager, positions)
    return LayerProof(
        layout=layout,
        heads=normal.heads,
        kv_heads=normal.kv_heads,
        head_dim=normal.rot_q.shape[-1],
        rotation_error=0.0 if layout.rotary is None else layout.rotary.error,
        weights_error=_weights_error(slow, eager),
        output_error=_output_error(normal),
        drift=drift,
        features=tuple(_features(normal)),
        window=normal.declared_window,
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
    causal = Mask(causal=True, device=visible.device).visible(slice(None), attention.n, attention.m)
    if bool((causal & ~visible).any()):
        yield "window"
    if bool((visible & ~causal).any()):
        yield "not causal"


def _weights_error(attention: LayerAttention, call: AttentionCall) -> float:
    """Return the error of the attention weights that rounding of the model's logits does not explain."""
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    again = call.reweigh if half else None
    weights = call.weights if again is None else again()
    if weights is None or weights.shape != (attention.rot_q.shape[0], attention.heads, attention.n, attention.m):
        return torch.inf
    dtype = call.query.dtype if again is None else torch.float32

    def error(layer: LayerAttention) -> float:
        parts = ((rows, *rounded_weights(layer, rows, dtype)) for rows in blocks_of_rows(layer.n))
        return max(_largest((ours - weights[:, :, rows]).abs() - rounding) for rows, ours, rounding in parts)

    if attention.sinks is None:
        return error(attention)
    # Some families return the weights without the sink column, although it affects the output.
    return min(error(attention), error(replace(attention, sinks=None)))


def _output_error(attention: LayerAttention) -> float:
    """Return the error of the attention output that rounding does not explain, relative to its largest entry."""
    if attention.output.numel() != attention.value[0, 0, 0].numel() * attention.rot_q[..., 0].numel():
        return torch.inf
    largest = max(_largest(output_excess(attention, rows)) for rows in blocks_of_rows(attention.n))
    return largest / float(attention.output.abs().max().clamp_min(1e-30))


def blocks_of_rows(n: int, size: int = 256) -> Iterator[slice]:
    """Return ``n`` queries in blocks of which the logits fit into memory."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _largest(excess: Tensor) -> float:
    """Return the largest entry; zero if none is positive, and infinite if one is NaN."""
    return float(excess.nan_to_num(nan=torch.inf).max().clamp_min(0))


_STEP = 8
"""Distance of compared positions, larger than the width of convolutions."""


def position_drift(model: Any, layout: CaptureLayout, ids: Tensor) -> list[float]:
    """Return the change of queries or keys before rotation between two positions with equal hidden states.

    For each attention call this is the norm of the difference of the two directions, between 0 and 2; 0 for calls
    without a tensor before rotation. The last of the tokens ``ids`` ``(1, n)`` is used at every position.
    """
    n = ids.shape[1]
    now, earlier = n - 1, n - 1 - min(_STEP, n // 2)
    drifts: list[float] = []
    undefined = {layer.name for layer in layout.layers if layer.rotary is None and layer.note}

    def compare(attention: LayerAttention) -> None:
        both = (_change(x, now, earlier) for x in (attention.q, attention.k))
        drifts.append(0.0 if attention.name in undefined else max(both))

    with ExitStack() as stack:
        for name in {layer.name for layer in layout.layers}:
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(_repeat_last_token, with_kwargs=True).remove)
        stack.enter_context(capture_with(model, layout, compare))
        model(input_ids=ids[:, -1:].expand(-1, n).contiguous(), use_cache=False, **last_logits(model, 1))
    return drifts


def _repeat_last_token(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the hidden states ``(1, n, width)`` of all positions by those of the last token (a hook).

    Embeddings and other layers may also depend on the position, with effects as small as rounding beside a channel that
    is a thousand times larger.
    """

    def repeated(x: Any) -> Any:
        hidden = isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3
        return x[:, -1:].expand_as(x).contiguous() if hidden else x

    return tuple(map(repeated, args)), {name: repeated(x) for name, x in kwargs.items()}


def _change(x: Tensor, now: int, earlier: int) -> float:
    """Return the largest change over heads of the direction of ``x`` ``(batch, heads, n, d)`` between two tokens."""
    x = x.double()
    x = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return float((x[:, :, now] - x[:, :, earlier]).norm(dim=-1).max())


Kinds = dict[str, list[int]]
"""Layers by the name of their kind, in the order of the first layer; empty where all layers are alike."""


def layer_kinds(layers: Sequence[LayerProof]) -> Kinds:
    """Group layers by attention window and rotation; the name of each group states what differs."""
    windows, ropes = [_window(layer) for layer in layers], [_rope(layer.layout.rotation) for layer in layers]
    differing = [names for names in (windows, ropes) if len(set(names)) > 1]
    kinds: Kinds = {}
    for layer, *names in zip(layers, *differing, strict=True):
        indices = kinds.setdefault(", ".join(names), [])
        if layer.layout.layer not in indices:
            indices.append(layer.layout.layer)
    return kinds if differing else {}


def _window(layer: LayerProof) -> str:
    if layer.window is not None:
        return f"window {layer.window:,}"
    return "window" if "window" in layer.features else "full"


def _rope(rotation: Rotation | None) -> str:
    """Return the RoPE base, from the ratio of frequencies; ``÷ s`` where the fastest plane is s times slower."""
    turning = [] if rotation is None else sorted((abs(x) for x in rotation.inv_freq.tolist() if x), reverse=True)
    if rotation is None or not turning:
        return "no RoPE"
    base = (turning[0] / turning[-1]) ** (rotation.planes / max(1, len(turning) - 1))
    slowed = "" if math.isclose(turning[0], 1, rel_tol=1e-3) else f" ÷ {1 / turning[0]:.3g}"
    return f"RoPE base {float(f'{base:.3g}'):,.0f}{slowed}"


@dataclass(frozen=True)
class ProofTable:
    """The numbers of a proof as text, ready to be drawn.

    Attributes:
        title: Attention modules, route, implementation and tolerance.
        columns: Names of the columns.
        rows: Cells of each row, one row per group of equal layers or per layer; then the layers not measured.
        remarks: Notes on the rotation of layers, and why layers are not measured, one line each.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls, layers: Sequence[LayerProof], unmeasured: Sequence[Unmeasured], *, title: str, each: bool = False
    ) -> ProofTable:
        """Return the table of a proof; with ``each`` one row per layer, with all errors."""
        modules = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", layer.layout.name) for layer in layers))
        errors = ("rot. err", "wts. err", "out. err") if each else ("error",)
        others = _by_reason(layers, unmeasured)
        columns = ("layer", "heads", "rotation", "also", *errors)
        not_measured = [(places, "", "not measured") + ("",) * (len(columns) - 3) for places in others.values()]
        return cls(
            title=f"{modules}: {title}",
            columns=columns,
            rows=(*_rows(layers, each=each), *not_measured),
            remarks=(
                *_notes(layers),
                *(f"Layers {places}: no softmax self-attention: {reason}." for reason, places in others.items()),
            ),
        )

    def text(self) -> str:
        """Return the table as aligned plain text, with title and remarks."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *(line.rstrip() for line in drawn), *self.remarks])

    def html(self) -> str:
        """Return the table as an HTML fragment."""
        header, *rows = (
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>"
            for tag, line in (("th", self.columns), *(("td", row) for row in self.rows))
        )
        remarks = "".join(f"<p>{escape(remark)}</p>" for remark in self.remarks)
        return (
            f"<table><caption>{escape(self.title)}</caption><thead>{header}</thead>"
            f"<tbody>{''.join(rows)}</tbody></table>{remarks}"
        )


def layer_values(layers: Sequence[LayerProof]) -> list[dict[str, Any]]:
    """Return what was proved of each layer as JSON values."""
    kinds = _kind_of(layers)
    return [
        {
            "layer": layer.layout.layer,
            "name": layer.layout.name,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "rotation": _rotation_values(layer.layout.rotation),
            "window": layer.window,
            "kind": kinds.get(layer.layout.layer),
            "features": list(layer.features),
            "note": layer.layout.note or None,
            "errors": {
                "rotation": layer.rotation_error,
                "weights": layer.weights_error,
                "output": layer.output_error,
                "drift": layer.drift,
            },
        }
        for layer in layers
    ]


def _rotation_values(rotation: Rotation | None) -> dict[str, Any] | None:
    if rotation is None:
        return None
    return {"pairing": rotation.pairing, "planes": rotation.planes, "turning": rotation.turning}


def _kind_of(layers: Sequence[LayerProof]) -> dict[int, str]:
    return {layer: kind for kind, members in layer_kinds(layers).items() for layer in members}


def _rows(layers: Sequence[LayerProof], *, each: bool) -> Iterator[tuple[str, ...]]:
    """Yield the row of each group of layers: number or range, heads, rotation, features and errors."""
    kinds = _kind_of(layers)
    groups: dict[Any, list[LayerProof]] = {}
    for layer in layers:
        cells = _cells(layer, kinds.get(layer.layout.layer, ""))
        groups.setdefault((layer.layout.layer, *cells) if each else ("", *cells), []).append(layer)
    for (_, *cells), members in groups.items():
        numbers = [[x.rotation_error, x.weights_error, x.output_error] for x in members]
        shown = [max(column) for column in zip(*numbers, strict=True)] if each else [max(map(max, numbers))]
        yield _ranges([x.layout.layer for x in members]), *cells, *(f"{x:.0e}" for x in shown)


def _cells(layer: LayerProof, kind: str) -> tuple[str, str, str]:
    """Return heads, rotation, and kind and further features of a layer."""
    kind = kind.replace("RoPE base", "base")
    features = [feature for feature in layer.features if feature != "window" or "window" not in kind]
    heads = str(layer.heads) if layer.heads == layer.kv_heads else f"{layer.heads} / {layer.kv_heads} kv"
    return heads, str(layer.layout.rotation or "none"), ", ".join([kind, *features] if kind else features)


def _notes(layers: Sequence[LayerProof]) -> Iterator[str]:
    noted: dict[str, list[int]] = {}
    for layer in layers:
        noted.setdefault(layer.layout.note, []).append(layer.layout.layer)
    noted.pop("", None)
    return (f"Layers {_ranges(numbers)}: {note}." for note, numbers in noted.items())


def _by_reason(layers: Sequence[LayerProof], unmeasured: Sequence[Unmeasured]) -> dict[str, str]:
    """Return the layers that are not measured, by the reason.

    They are named where measured layers are numbered by the order of their calls and not by their block.
    """
    by_block = all(str(layer.layout.layer) in layer.layout.name.split(".") for layer in layers)
    by_reason: dict[str, list[Unmeasured]] = {}
    for layer in unmeasured:
        by_reason.setdefault(layer.reason, []).append(layer)
    return {
        reason: _ranges([x.layer for x in members]) if by_block else ", ".join(x.name for x in members)
        for reason, members in by_reason.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ``0-4, 6``."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
