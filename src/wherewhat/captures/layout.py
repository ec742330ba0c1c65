"""Identify from one short pass how each layer rotates its queries and keys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.captures.attention import LOW, Mask
from wherewhat.captures.calls import AttentionCall, Observer, Repetition, RotaryCall
from wherewhat.captures.rotation import IdentifiedRotation, LiveFrequencies, Rotation, identify_rotation, over_heads
from wherewhat.captures.structure import ModelWatch, Route
from wherewhat.errors import CaptureError

_RESCALED = "queries are rescaled after rotation"


@dataclass(frozen=True)
class RotaryLayout:
    """How a layer's rotary function acts on its tensors, and their location in queries and keys.

    Attributes:
        found: The rotation of the rotary function's tensors.
        token_axis: Axis of the tokens in them.
        offset: Their first dimension in the head dimension of queries and keys.
        calls_seen: Number of tensors rotated for this attention.
        calls: Indices of its queries and keys among them; sparse attention also rotates those of its indexer.
        error: Largest relative error of this rotation compared with the model's.
    """

    found: IdentifiedRotation
    token_axis: int
    offset: int
    calls_seen: int
    calls: tuple[int, ...]
    error: float

    @cached_property
    def rotation(self) -> Rotation:
        """The rotation of the layer's queries and keys."""
        return replace(self.found.rotation, offset=self.found.rotation.offset + self.offset)

    def mismatch(self, before: Tensor, after: Tensor, positions: Tensor) -> Tensor:
        """Return the largest relative deviation, a scalar tensor, of ``after`` from the rotation of ``before``.

        Both are some tokens ``(batch, heads, tokens, d)`` at ``positions`` ``(tokens,)`` or ``(batch, tokens)``.
        """
        return self.found.deviation(before, after, over_heads(positions))


@dataclass(frozen=True)
class Hiding:
    """How the additive terms of a layer hide keys, as a short pass shows it.

    Attributes:
        below: Entries at or below it hide a key; None for half the minimum of the dtype, which no bias reaches.
        reach: Most keys at which the layer's bias stays above ``below``; None if there is no limit.
    """

    below: float | None = None
    reach: int | None = None

    def applied(self, mask: Mask, name: str, m: int) -> Mask:
        """Return the mask of a call with ``m`` keys, with this threshold."""
        if self.below is None or not mask.added:
            return mask
        if self.reach is not None and m > self.reach:
            raise CaptureError(
                f"{name} hides keys by adding about {2 * self.below:,.0f}, which its bias reaches in long texts: give "
                f"at most {self.reach:,} tokens (now {m:,})"
            )
        return replace(mask, hides=self.below)


_SHORT = 32
"""Keys among which no bias falls below a hidden key."""


def hiding_of(mask: Mask, n: int, m: int) -> Hiding:
    """Return how the additive terms of a mask of ``n`` queries and ``m`` keys hide keys.

    Only the first queries and keys are read, among which a bias is small: what lies far below the best key is hidden.
    Without a bias, every such number hides. With one, only the number that the model itself uses does.
    """
    hidden, slope, biased = -torch.inf, 0.0, False
    for term in mask.added:
        values = _few(term, n, m).double()
        best = values.amax(-1, keepdim=True)
        low = values < best + LOW
        lowest = torch.finfo(term.dtype).min / 2
        hidden = max([hidden, *values[low & (values > lowest)].tolist()])
        bias = values.masked_fill(low | (values <= lowest), torch.nan)
        biased = biased or bool(bias.nan_to_num().any())
        slope += float(bias.diff(dim=-1).abs().nan_to_num().amax()) if bias.shape[-1] > 1 else 0.0
    if not biased:
        return Hiding(LOW)
    return Hiding() if hidden == -torch.inf else Hiding(hidden / 2, int(-hidden / 2 / slope) if slope else None)


def _few(term: Tensor, n: int, m: int) -> Tensor:
    """Return the first entries of a broadcastable term: of the queries whose keys are the first ones, and of these."""
    term = term[(None,) * (4 - term.ndim)][..., :m][..., :_SHORT]
    return term if term.shape[-2] == 1 else term[..., : min(n, _SHORT), :]


@dataclass(frozen=True)
class LayerLayout:
    """One expected attention call of the forward pass.

    Attributes:
        name: Path of the attention module.
        occurrence: Number of earlier calls of the module in the same pass (shared blocks).
        layer: Index shown to users: the block's index, or the index of the call if that is not unique.
        dtype: Dtype of its queries.
        rotary: Its rotation; None if there is none, or none that can be undone.
        note: Remark on the layer's rotation, or empty.
        hiding: How its additive terms hide keys, see :class:`Hiding`.
    """

    name: str
    occurrence: int
    layer: int
    dtype: torch.dtype
    rotary: RotaryLayout | None
    note: str = ""
    hiding: Hiding = Hiding()

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of the layer's queries and keys; None if there is none."""
        return None if self.rotary is None else self.rotary.rotation


@dataclass(frozen=True)
class CaptureLayout:
    """How to capture one model.

    Attributes:
        route: How attention is observed.
        layers: The attention calls of a forward pass.
        seen: Sizes of passes in which the last layer's output was checked.
    """

    route: Route
    layers: tuple[LayerLayout, ...]
    seen: set[tuple[int, int]] = field(default_factory=set, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"CaptureLayout({self.route} route, {len(self.layers)} layers)"


class PassRecorder(Observer):
    """Records all attention and rotations of a short pass.

    Attributes:
        attention: The attention calls in order.
        rotary: For each of them, the rotations since the one before.
    """

    def __init__(self, watch: ModelWatch) -> None:
        super().__init__(watch.names)
        self.attention: list[AttentionCall] = []
        self.rotary: list[list[RotaryCall]] = []
        self._watch = watch
        self._pending: list[RotaryCall] = []
        self._repeats = Repetition()

    def knows_rotary(self, function: Any, arguments: Sequence[Any]) -> bool:
        """Return False, since every rotation is recorded."""
        return False

    def on_rotary(self, call: RotaryCall) -> None:
        """Record a rotation."""
        if self._watch.running:
            self._pending.append(call)

    def on_attention(self, call: AttentionCall) -> None:
        """Record the attention with the rotations since the last one."""
        if not self._repeats(call):
            self.attention.append(call)
            self.rotary.append(self._pending)
            self._pending = []


def layout_from(model: nn.Module, record: PassRecorder, route: Route) -> CaptureLayout:
    """Identify each layer's rotation from a recorded pass."""
    live = list(_live_frequencies(model))
    names = [record.names[id(call.module)] for call in record.attention]
    # Blocks are numbered in the path of their modules, unless modules are shared or not in a list.
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    layers = [int(number[1]) for number in numbers if number is not None]
    if len(set(layers)) < len(names):
        layers = list(range(len(names)))
    layouts: list[LayerLayout] = []
    for index, (call, rotations) in enumerate(zip(record.attention, record.rotary, strict=True)):
        rotary, note = _layer_rotary(call, rotations, live)
        occurrence = names[:index].count(names[index])
        hiding = hiding_of(call.mask, call.query.shape[2], call.key.shape[2])
        layouts.append(LayerLayout(names[index], occurrence, layers[index], call.query.dtype, rotary, note, hiding))
    return CaptureLayout(route, tuple(_agreed(layouts, record.rotary)))


def _agreed(layouts: list[LayerLayout], rotations: list[list[RotaryCall]]) -> list[LayerLayout]:
    """Return the layouts with one rotation for all layers with the same rotation.

    A layer without energy in a plane does not show its frequency, but other layers with the same angles do. Of the
    rotations found in layers that share their angles, the one that fits all of them best is used. Equal rotations of
    other layers are shared.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, layout in enumerate(layouts):
        if layout.rotary is not None:
            source = rotations[index][layout.rotary.calls[0]].invocation
            key = (layout.rotary.token_axis, id(source.function), *(id(value) for _, value in source.given))
            groups.setdefault(key, []).append(index)
    layouts = list(layouts)
    distinct: list[IdentifiedRotation] = []
    for group in groups.values():
        rotaries = [rotary for index in group if (rotary := layouts[index].rotary) is not None]
        trials = (
            [_with_rotation(rotary, layout.found, rotations[i]) for i, rotary in zip(group, rotaries, strict=True)]
            for layout in _distinct(rotaries)
        )
        best = min(trials, key=lambda trial: max(rotary.error for rotary in trial))
        for index, rotary in zip(group, best, strict=True):
            shared = next(filter(rotary.found.equals, distinct), None)
            if shared is None:
                shared = rotary.found
                distinct.append(shared)
            layouts[index] = replace(layouts[index], rotary=replace(rotary, found=shared))
    return layouts


def _distinct(layouts: list[RotaryLayout]) -> list[RotaryLayout]:
    """Return the first layout with each rotation."""
    distinct: list[RotaryLayout] = []
    for layout in layouts:
        if not any(layout.found.equals(other.found) for other in distinct):
            distinct.append(layout)
    return distinct


def _with_rotation(layout: RotaryLayout, rotation: IdentifiedRotation, rotations: list[RotaryCall]) -> RotaryLayout:
    """Return the layout with another rotation and its error on recorded rotations."""
    other = replace(layout, found=rotation)
    return other if layout.found.equals(rotation) else _measured(other, rotations)


def _measured(layout: RotaryLayout, rotations: list[RotaryCall]) -> RotaryLayout:
    """Return the layout with its error on recorded rotations."""
    errors = []
    for call in (rotations[index] for index in layout.calls):
        before, after = (heads_first(t, layout.token_axis).cpu() for t in (call.before, call.after))
        errors.append(float(layout.mismatch(before, after, torch.arange(after.shape[2], device="cpu"))))
    return replace(layout, error=max(errors))


def heads_first(x: Tensor, token_axis: int) -> Tensor:
    """Return a rotary function's tensor as ``(batch, heads, n, d)``."""
    if x.ndim == 3:
        return x.unsqueeze(1)
    return x.transpose(1, 2) if token_axis == 1 else x


def _live_frequencies(model: nn.Module) -> Iterator[LiveFrequencies]:
    for module in model.modules():
        for name, value in itertools.chain(vars(module).items(), module._buffers.items()):
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and isinstance(value, Tensor):
                scaling = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                yield LiveFrequencies(value, float(scaling))


def _layer_rotary(
    call: AttentionCall, rotations: list[RotaryCall], live: list[LiveFrequencies]
) -> tuple[RotaryLayout | None, str]:
    """Return the rotation of an attention call and a remark on it."""
    n = call.query.shape[2]
    positions = torch.arange(n, device="cpu")
    located: list[RotaryLayout] = []
    unlocated: tuple[RotaryLayout, Tensor] | None = None
    for index, rotary in enumerate(rotations):
        # Both axes may be the tokens if there are as many heads.
        axes = [axis for axis in {3: (1,), 4: (2, 1)}.get(rotary.after.ndim, ()) if rotary.after.shape[axis] == n]
        for axis in axes:
            before, after = (heads_first(t, axis).cpu() for t in (rotary.before, rotary.after))
            offset = _offset(after, call)
            like_query = after.shape[-1] == call.query.shape[-1] and after.shape[1] == call.query.shape[1]
            if offset is None and not like_query:
                continue
            rotation = identify_rotation(before, after, positions, widths=rotary.widths, live=live)
            layout = RotaryLayout(rotation, axis, offset or 0, len(rotations), (index,), rotation.error)
            if offset is not None:
                located.append(layout)
                break
            unlocated = unlocated or (layout, rotation.to_rotated_layout(before))
    if located:
        # If queries or keys are all zero, only the others show the rotation.
        axis = located[0].token_axis
        same = [p for p in located if p.token_axis == axis]
        calls = tuple(p.calls[0] for p in same)
        nonzero = [p for p in same if bool(rotations[p.calls[0]].after.any())] or same[:1]
        measured = (_measured(replace(p, calls=calls), rotations) for p in _distinct(nonzero))
        layout = min(measured, key=lambda p: p.error)
        return layout, _RESCALED if unlocated and _is_rescaled(call, *unlocated) else ""
    if unlocated is None:
        if not rotations:
            return None, ""
        raise CaptureError(
            f"the output of the rotary function of {type(call.module).__name__} is found in neither queries nor keys: "
            "their rotation is unknown"
        )
    if _is_rescaled(call, *unlocated):
        return _measured(unlocated[0], rotations), _RESCALED
    return None, "a norm with weights follows the rotation: there is no pre-rotation tensor"


def _is_rescaled(call: AttentionCall, layout: RotaryLayout, before: Tensor) -> bool:
    """Return whether the queries are the rotated ones up to a factor on each."""
    unrotated = layout.rotation.unrotate(call.query.cpu(), torch.arange(call.query.shape[2], device="cpu"))
    coarse = call.query.dtype in (torch.float16, torch.bfloat16)
    x, y = (t.double() / t.double().norm(dim=-1, keepdim=True).clamp_min(1e-30) for t in (unrotated, before))
    return float((x - y).abs().max()) < (2e-2 if coarse else 1e-3)


def _offset(after: Tensor, call: AttentionCall) -> int | None:
    """Return the first dimension of a rotated tensor in the queries or keys; None if they do not contain it."""
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


@dataclass(frozen=True)
class Unmeasured:
    """A block without softmax self-attention.

    Attributes:
        layer: Index of the block in its list.
        name: Path of the block in the model.
        reason: Its kind in the config, if any, and the class of the module in place of attention.
    """

    layer: int
    name: str
    reason: str


def unmeasured_layers(model: Any, layout: CaptureLayout) -> tuple[Unmeasured, ...]:
    """Return the blocks without captured attention.

    Blocks are the numbered modules of a list in which at least one has captured attention.
    """
    attention = {id(model.get_submodule(layer.name)) for layer in layout.layers}
    paths = [re.fullmatch(r"(?:(.*?)\.)??(\d+)(?:\.(.*))?", layer.name) for layer in layout.layers]
    # One measured block of each list, to compare the others with.
    lists = {match[1] or "": (match[2], (match[3] or "").partition(".")[0]) for match in paths if match is not None}
    unmeasured = []
    for path, (number, child) in lists.items():
        blocks = {name: block for name, block in model.get_submodule(path).named_children() if name.isdigit()}
        kinds = _block_kinds(model, len(blocks))
        for other, block in blocks.items():
            # Blocks may share one attention module, which is named after the first of them.
            if attention.isdisjoint(map(id, block.modules())):
                mixer = type(_mixer(block, blocks[number], child)).__name__
                reason = f"{kinds[int(other)]} ({mixer})" if kinds else mixer
                unmeasured.append(Unmeasured(int(other), f"{path}.{other}".lstrip("."), reason))
    return tuple(unmeasured)


def _block_kinds(model: Any, count: int) -> Sequence[str]:
    """Return the kinds of all blocks in the model's config; empty if it has none."""
    config = model.config.get_text_config()
    for name in ("layers_block_type", "layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            return kinds
    return ()


def _mixer(block: nn.Module, measured: nn.Module, attention: str) -> nn.Module:
    """Return the module in place of a measured block's attention: of the same name, or the largest other one."""
    children, known = dict(block.named_children()), dict(measured.named_children())
    if attention in children:
        return children[attention]
    own = (child for name, child in children.items() if name not in known)
    return max(own, key=lambda child: sum(parameter.numel() for parameter in child.parameters()), default=block)
