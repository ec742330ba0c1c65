"""Identify, from one short pass, how each layer rotates and which route shows its attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.calls import AttentionCall, Repetition, RotaryCall
from wherewhat.captures.rotation import Identified, LiveFrequencies, Rotation, identify_rotation
from wherewhat.captures.watch import ModelWatch, Route
from wherewhat.errors import CaptureError

_RESCALED = "queries are rescaled after rotation"


class Recorder:
    """Observer that keeps everything of one short pass."""

    blind = False

    def __init__(self, watch: ModelWatch) -> None:
        self._watch = watch
        self.attention: list[AttentionCall] = []
        self.rotary: list[list[RotaryCall]] = []
        self._pending: list[RotaryCall] = []
        self._repeats = Repetition()

    def owns(self, module: nn.Module) -> bool:
        """Whether the module is part of the watched model."""
        return id(module) in self._watch.names

    def knows_rotary(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Everything is kept."""
        return False

    def on_rotary(self, call: RotaryCall) -> None:
        """Keep the rotation until the attention it belongs to is seen."""
        if self._watch.running:
            self._pending.append(call)

    def on_attention(self, call: AttentionCall) -> None:
        """Keep the attention with the rotations seen since the last one."""
        if self._repeats(call):
            return
        self.attention.append(call)
        self.rotary.append(self._pending)
        self._pending = []


@dataclass(frozen=True)
class RotaryPlan:
    """How a layer's rotary function acts on the tensors it gets, and where they end up in queries and keys.

    Attributes:
        found: The rotation in terms of the rotary function's own tensors.
        token_axis: Axis of the tokens in them.
        offset: Where they start in the head dimension of queries and keys.
        calls_seen: How many tensors went through the rotary function for this attention.
        calls: Which of them are its queries and keys; sparse attention also rotates those of its indexer.
        error: Largest relative error of our rotation against the model's.
    """

    found: Identified
    token_axis: int
    offset: int
    calls_seen: int
    calls: tuple[int, ...]
    error: float

    @cached_property
    def rotation(self) -> Rotation:
        """The rotation in terms of the layer's queries and keys."""
        return replace(self.found.rotation, offset=self.found.rotation.offset + self.offset)

    def mismatch(self, before: Tensor, after: Tensor, positions: Tensor) -> Tensor:
        """Largest relative deviation, a scalar tensor, of ``after`` from our rotation of ``before``.

        Args:
            before: Some tokens of a tensor entering the rotary function, ``(batch, heads, tokens, d)``.
            after: The same tokens of the tensor leaving it.
            positions: Their positions, ``(tokens,)`` or ``(batch, tokens)``.
        """
        return self.found.deviation(before, after, positions if positions.ndim == 1 else positions[:, None])


@dataclass(frozen=True)
class LayerPlan:
    """What is known of one attention call of the forward pass before it happens.

    Attributes:
        name: Path of the attention module.
        occurrence: How many times the module was called before in the same pass (shared blocks).
        layer: Index shown to users: the block's index, or the order of the call where that is not unique.
        dtype: Dtype of its queries.
        rotary: How it rotates; None if it does not, or not in a way that can be undone.
        note: What a reader must know about this layer's rotation, if anything.
    """

    name: str
    occurrence: int
    layer: int
    dtype: torch.dtype
    rotary: RotaryPlan | None
    note: str = ""

    @property
    def rotation(self) -> Rotation | None:
        """The rotation in terms of the layer's queries and keys."""
        return None if self.rotary is None else self.rotary.rotation


@dataclass(frozen=True)
class Plan:
    """How to capture one model.

    Attributes:
        route: How attention is seen.
        layers: What is known of every attention call.
        seen: Sizes of passes in which the last layer's output was compared.
    """

    route: Route
    layers: tuple[LayerPlan, ...]
    seen: set[tuple[int, int]] = field(default_factory=set, repr=False, compare=False)


def plan_from(model: nn.Module, watch: ModelWatch, record: Recorder, route: Route) -> Plan:
    """Work out each layer's rotation from a recorded pass."""
    live = list(_live_frequencies(model))
    seen: dict[str, int] = {}
    plans: list[LayerPlan] = []
    for call, rotations in zip(record.attention, record.rotary, strict=True):
        name = watch.layer_name(call.module)
        occurrence = seen.get(name, 0)
        seen[name] = occurrence + 1
        rotary, note = _layer_rotary(call, rotations, live)
        plans.append(LayerPlan(name, occurrence, _block_index(name), call.query.dtype, rotary, note))
    plans = _agreed(plans, record.rotary)
    indices = [plan.layer for plan in plans]
    if -1 in indices or len(set(indices)) < len(indices):
        plans = [replace(plan, layer=order) for order, plan in enumerate(plans)]
    return Plan(route, tuple(plans))


def _agreed(plans: list[LayerPlan], rotations: list[list[RotaryCall]]) -> list[LayerPlan]:
    """The plans with one rotation for all layers that rotate alike.

    A layer without energy in a plane does not show how fast it turns; others that were given the very same angles do.
    So of the rotations found in layers that share their angles the one that fits all of them best is taken. Others are
    shared where they are equal.
    """
    given: dict[tuple[object, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        if plan.rotary is not None:
            source = rotations[index][plan.rotary.calls[0]].invocation
            key = (plan.rotary.token_axis, id(source.function), *(id(value) for _, value in source.given))
            given.setdefault(key, []).append(index)
    plans = list(plans)
    distinct: list[Identified] = []
    for group in given.values():
        rotaries = [rotary for index in group if (rotary := plans[index].rotary) is not None]
        best: list[RotaryPlan] = []
        for found in _distinct(rotary.found for rotary in rotaries):
            trial = [
                _measured(replace(rotary, found=found), rotations[i]) for i, rotary in zip(group, rotaries, strict=True)
            ]
            if not best or max(x.error for x in trial) < max(x.error for x in best):
                best = trial
        for index, rotary in zip(group, best, strict=True):
            shared = next((known for known in distinct if _equal(known, rotary.found)), rotary.found)
            distinct.append(shared)
            plans[index] = replace(plans[index], rotary=replace(rotary, found=shared))
    return plans


def _measured(plan: RotaryPlan, rotations: list[RotaryCall]) -> RotaryPlan:
    """The plan with its error on what was recorded."""
    errors = []
    for call in (rotations[index] for index in plan.calls):
        before, after = (heads_first(t, plan.token_axis).cpu() for t in (call.before, call.after))
        errors.append(float(plan.mismatch(before, after, torch.arange(after.shape[2], device="cpu"))))
    return replace(plan, error=max(errors))


def _distinct(found: Iterable[Identified]) -> list[Identified]:
    """Rotations that differ from each other."""
    kept: list[Identified] = []
    for one in found:
        if not any(_equal(one, other) for other in kept):
            kept.append(one)
    return kept


def _equal(one: Identified, other: Identified) -> bool:
    """Whether two rotations are the same."""

    def signature(x: Identified) -> tuple[object, ...]:
        return (x.rotation.pairing, x.rotation.offset, x.rotation.planes, x.rotation.scaling, x.source_pairing)

    return signature(one) == signature(other) and torch.equal(one.rotation.inv_freq, other.rotation.inv_freq)


def heads_first(x: Tensor, token_axis: int) -> Tensor:
    """A rotary function's tensor as ``(batch, heads, n, d)``."""
    if x.ndim == 3:
        return x.unsqueeze(1)
    return x.transpose(1, 2) if token_axis == 1 else x


def _block_index(name: str) -> int:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found.group(1)) if found else -1


def _live_frequencies(model: nn.Module) -> Iterator[LiveFrequencies]:
    for module in model.modules():
        for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and isinstance(value, Tensor):
                scaling = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                yield LiveFrequencies(value, float(scaling))


def _token_axes(x: Tensor, n: int) -> list[int]:
    """Axes of a rotary function's tensor that may be the tokens; two if there are as many heads."""
    return [axis for axis in {3: (1,), 4: (2, 1)}.get(x.ndim, ()) if x.shape[axis] == n]


def _layer_rotary(
    call: AttentionCall, rotations: list[RotaryCall], live: list[LiveFrequencies]
) -> tuple[RotaryPlan | None, str]:
    n = call.query.shape[2]
    positions = torch.arange(n, device="cpu")
    placed: list[RotaryPlan] = []
    loose: tuple[RotaryPlan, Tensor] | None = None
    for index, rotary in enumerate(rotations):
        for axis in _token_axes(rotary.after, n):
            before, after = (heads_first(t, axis).cpu() for t in (rotary.before, rotary.after))
            offset = _place(after, call)
            like_query = after.shape[-1] == call.query.shape[-1] and after.shape[1] == call.query.shape[1]
            if offset is None and not like_query:
                continue
            found = identify_rotation(before, after, positions, widths=rotary.widths, live=live)
            plan = RotaryPlan(found, axis, offset or 0, len(rotations), (index,), found.error)
            if offset is not None:
                placed.append(plan)
                break
            loose = loose or (plan, found.to_rotated_layout(before))
    if placed:
        # Where queries or keys are all zero, the others show where they stand and how they turn.
        axis = placed[0].token_axis
        calls = tuple(p.calls[0] for p in placed if p.token_axis == axis)
        alive = [p for p in placed if p.token_axis == axis and bool(rotations[p.calls[0]].after.any())] or placed[:1]
        plan = min((_measured(replace(p, calls=calls), rotations) for p in alive), key=lambda p: p.error)
        return plan, _RESCALED if loose and _is_rescaled(call, *loose) else ""
    if loose is None:
        if not rotations:
            return None, ""
        raise CaptureError(
            f"what the rotary function of {type(call.module).__name__} returns is found in neither queries nor keys: "
            "how they were rotated is unknown"
        )
    if _is_rescaled(call, *loose):
        return loose[0], _RESCALED
    return None, "a norm with weights follows the rotation: there is no pre-rotation tensor"


def _is_rescaled(call: AttentionCall, plan: RotaryPlan, before: Tensor) -> bool:
    """Whether the queries are those that were rotated but for a factor on each."""
    unrotated = plan.rotation.unrotate(call.query.cpu(), torch.arange(call.query.shape[2], device="cpu"))
    coarse = call.query.dtype in (torch.float16, torch.bfloat16)
    return _direction_error(unrotated, before) < (2e-2 if coarse else 1e-3)


def _place(after: Tensor, call: AttentionCall) -> int | None:
    """First dimension at which a rotated tensor stands in the queries or keys; None if it does not."""
    width = after.shape[-1]
    for target in (call.query.cpu(), call.key.cpu()):
        if after.shape[1] not in (1, target.shape[1]) or width > target.shape[-1] or after.shape[2] != target.shape[2]:
            continue
        spare = target.shape[-1] - width
        candidates: list[int] = [0, spare, *range(1, spare)]
        for offset in candidates:
            if torch.allclose(
                target[..., offset : offset + width].to(after.dtype), after, rtol=1e-5, atol=1e-6, equal_nan=True
            ):
                return offset
    return None


def _direction_error(x: Tensor, y: Tensor) -> float:
    """Largest deviation between the directions of ``x`` and ``y`` ``(..., d)``."""
    x, y = (t.double() / t.double().norm(dim=-1, keepdim=True).clamp_min(1e-30) for t in (x, y))
    return float((x - y).abs().max())


@dataclass(frozen=True)
class Unmeasured:
    """A block that computes no softmax self-attention.

    Attributes:
        layer: Index of the block in its list.
        name: Path of the block in the model.
        reason: What it has in place of it: its kind, as the config names it, and the class of the module.
    """

    layer: int
    name: str
    reason: str


def unmeasured_layers(model: Any, plan: Plan) -> tuple[Unmeasured, ...]:
    """Blocks beside those of a plan that have none of its attention.

    Blocks are the numbered modules of a list of which at least one holds attention that was captured.
    """
    attention = {id(model.get_submodule(layer.name)) for layer in plan.layers}
    paths = [re.fullmatch(r"(?:(.*?)\.)??(\d+)(?:\.(.*))?", layer.name) for layer in plan.layers]
    # One measured block of each list, to compare the others with.
    lists = {found[1] or "": (found[2], (found[3] or "").partition(".")[0]) for found in paths if found is not None}
    return tuple(
        found for path, (number, child) in lists.items() for found in _others(model, path, number, child, attention)
    )


def _others(model: Any, path: str, number: str, child: str, attention: set[int]) -> Iterator[Unmeasured]:
    blocks = {name: block for name, block in model.get_submodule(path).named_children() if name.isdigit()}
    for other, block in blocks.items():
        # Blocks may share one attention module, which is named after the first of them.
        if attention.isdisjoint(map(id, block.modules())):
            kind = _kind(model, int(other), len(blocks))
            mixer = type(_mixer(block, blocks[number], child)).__name__
            yield Unmeasured(int(other), f"{path}.{other}".lstrip("."), f"{kind} ({mixer})" if kind else mixer)


def _kind(model: Any, index: int, count: int) -> str:
    """The kind of a layer in the model's config, if it has one for every layer."""
    config = model.config.get_text_config()
    for name in ("layers_block_type", "layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            return str(kinds[index])
    return ""


def _mixer(block: nn.Module, measured: nn.Module, attention: str) -> nn.Module:
    """What a block has in the place of a measured block's attention: the same name, or the largest that only it has."""
    children, known = dict(block.named_children()), dict(measured.named_children())
    if attention in children:
        return children[attention]
    own = (child for name, child in children.items() if name not in known)
    return max(own, key=lambda child: sum(parameter.numel() for parameter in child.parameters()), default=block)
