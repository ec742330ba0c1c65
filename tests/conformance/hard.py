"""Weights as trained models have them, and random ones do not.

``harden`` changes a tiny random model in place so that every kind of ``KINDS`` is in it, as far as its
architecture has room for it; ``shown`` tells from a captured pass which kinds its queries and keys have.

=================  ======================================================================================
dead planes        no energy in both dimensions of some RoPE planes, in queries, in keys or in both
dead heads         heads whose queries, or whose keys, are zero
zero norms         entries of the norms of queries and keys that multiply by exactly zero
outlier tokens     a residual channel a thousand times larger in the embeddings of some tokens
outlier dimensions a dimension of a head's queries or keys a thousand times larger than the others
alike keys         a head whose keys before rotation are the same for all tokens, but for a thousandth
dominant head      logits so large that all the weight of a query is on one key
tied layers        two layers that share their key projection; one block that is used at two depths
=================  ======================================================================================

Planes and heads differ from layer to layer, so that layers which rotate alike do not show the same planes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.capturing import Proof, capture
from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.compare import LayerProof
from wherewhat.errors import LoadError
from wherewhat.models.qk_layout import Part, query_key_parts

PLANES, HEADS, NORMS = "dead planes", "dead heads", "zero norms"
TOKENS, DIMENSIONS = "outlier tokens", "outlier dimensions"
ALIKE, DOMINANT, TIED = "alike keys", "dominant head", "tied layers"
KINDS = (PLANES, HEADS, NORMS, TOKENS, DIMENSIONS, ALIKE, DOMINANT, TIED)

OUTLIER = 1000.0
_LOUD = 30.0
_NORM = re.compile(r"^(q|k|query|key)_(layer)?norm(\.norms\.\d+)?$")
# A channel of the residual stream that has the same value for every token, for keys to be alike in.
_CONSTANT, _CONSTANT_CHANNEL, _OUTLIER_CHANNEL = 4.0, 5, 11


@dataclass(frozen=True)
class _Rows:
    """Rows of one parameter, seen as heads.

    Attributes:
        part: The parameter, and whether it makes queries or keys.
        start: First head dimension that the rows make.
        width: How many head dimensions they make.
    """

    part: Part
    start: int
    width: int

    def views(self, *, bias: bool) -> Iterator[tuple[Tensor, int, Tensor]]:
        """The weight, and the bias if asked, with its axis of rows and the rows ``(heads, width)``."""
        weight = getattr(self.part.owner, self.part.parameter)
        dim = 1 if weight.ndim == 3 else self.part.dim
        rows = torch.arange(weight.shape[dim]) if self.part.rows is None else self.part.rows
        yield weight.data, dim, rows.view(-1, self.width)
        other = getattr(self.part.owner, "bias", None)
        if bias and isinstance(other, Tensor):
            yield other.data, 0, rows.view(-1, self.width)

    def scale(self, factor: float, *, head: int | None = None, dims: Tensor | None = None, bias: bool = True) -> None:
        """Multiply the rows of a head (default: of all), or some head dimensions of them."""
        for values, axis, rows in self.views(bias=bias):
            chosen = rows if head is None else rows[head % len(rows)][None]
            if dims is not None:
                inside = dims[(dims >= self.start) & (dims < self.start + self.width)] - self.start
                chosen = chosen[:, inside]
            index = [slice(None)] * axis + [chosen.flatten()]
            values[tuple(index)] *= factor

    @property
    def heads(self) -> int:
        """How many heads the rows make."""
        return len(next(self.views(bias=False))[2])


def harden(model: nn.Module, proof: Proof, *, kinds: tuple[str, ...] = KINDS, seed: int = 0) -> set[str]:
    """Change a model in place so that it has the given kinds of weights where its architecture has room for them.

    Args:
        model: A tiny random model.
        proof: Its proof, which says which dimensions its layers rotate.
        kinds: Which of ``KINDS``.
        seed: Which planes and heads of a layer are chosen.

    Returns:
        The kinds that are in the parameters; ``shown`` finds those that are in queries and keys.
    """
    done: set[str] = set()
    with torch.no_grad():
        layers = _layers(model, proof)
        # Some families have one table per codebook, or none but a list.
        for embedding in (p.data for p in model.get_input_embeddings().parameters() if p.ndim == 2):
            if TOKENS in kinds:
                embedding[3::7, _OUTLIER_CHANNEL] *= OUTLIER
                done.add(TOKENS)
            if ALIKE in kinds:
                embedding[:, _CONSTANT_CHANNEL] = _CONSTANT
        for number, (layer, rows) in enumerate(layers.values(), seed):
            module = model.get_submodule(layer.plan.name)
            _change(module, layer, rows, number, kinds)
            if NORMS in kinds and _zero_norms(module, layer, number):
                done.add(NORMS)
        if TIED in kinds and _tie(model, [*layers.values()]):
            done.add(TIED)
    return done


def _layers(model: nn.Module, proof: Proof) -> dict[str, tuple[LayerProof, list[_Rows]]]:
    """Each attention module's first layer and its rows, by the module's name."""
    try:
        parts = query_key_parts(model)
    except LoadError:  # keys that are values too: here they may change together
        parts = {}
    found = {}
    for layer in proof.layers:
        name, module = layer.plan.name, model.get_submodule(layer.plan.name)
        own = next((parts[key] for key in parts if key == name or key.startswith(f"{name}.")), None)
        if own is None:
            pairs = (("q_proj", "query"), ("k_proj", "key"))
            own = [Part(getattr(module, name), "weight", role) for name, role in pairs if hasattr(module, name)]
        found.setdefault(name, (layer, list(_seen_as_heads(module, layer, own))))
    return found


def _seen_as_heads(module: Any, layer: LayerProof, parts: list[Part]) -> Iterator[_Rows]:
    latent = hasattr(module, "kv_b_proj")
    for part in parts:
        start, width = 0, layer.head_dim
        if latent and part.role == "key":  # per head without position, then one that turns for all heads
            shared = part.owner is module.kv_a_proj_with_mqa
            start = module.qk_nope_head_dim if shared else 0
            width = module.qk_rope_head_dim if shared else module.qk_nope_head_dim
        yield _Rows(part, start, width)


def _change(module: nn.Module, layer: LayerProof, rows: list[_Rows], number: int, kinds: tuple[str, ...]) -> None:
    dead = _dead_dims(layer, number)
    normed = any(_norms(module, "q"))
    for own in rows:
        query = own.part.role == "query"
        others = [d for d in range(own.start, own.start + own.width) if d not in dead[own.part.role]]
        outlier = torch.tensor(others[-1:] if query else others[:1])
        # Key head 0 is alike or dead in turn; the next one, if there is one, has an outlier.
        alike = number % 2 == 0
        if ALIKE in kinds and not query and alike:
            _make_alike(own)
        if DIMENSIONS in kinds:
            if query:
                own.scale(OUTLIER, head=number + 2, dims=outlier)
            else:
                own.scale(OUTLIER, head=1, dims=outlier)
        if DOMINANT in kinds and query and not normed:
            own.scale(_LOUD, head=number + 1)
        if PLANES in kinds:
            own.scale(0.0, dims=dead[own.part.role])
        if HEADS in kinds and query:
            own.scale(0.0, head=number)
        if HEADS in kinds and not query and not alike:
            own.scale(0.0, head=0)
    if DOMINANT in kinds and normed:
        for norm in _norms(module, "q"):
            _scale_norm(norm, _LOUD)
    if DIMENSIONS in kinds and normed:
        free = [d for d in range(layer.head_dim) if d not in dead["key"]]
        for norm in _norms(module, "k"):
            _scale_norm(norm, OUTLIER, torch.tensor(free[:1]), layer.head_dim)


def _dead_dims(layer: LayerProof, number: int) -> dict[str, Tensor]:
    """Head dimensions of the planes that are dead in queries and in keys, in the layout before rotation."""
    rotary = layer.plan.rotary
    if rotary is None:
        pairs = torch.arange(layer.head_dim // 2 * 2).view(2, -1).T
    else:
        first, planes = rotary.rotation.offset, rotary.rotation.planes
        index = torch.arange(first, first + 2 * planes)
        pairs = index.view(2, -1).T if rotary.found.source_pairing == "half" else index.view(-1, 2)
    last, half = len(pairs) - 1, len(pairs) // 2
    query, key = [
        ([1, last], [1, last]),
        ([0], [half]),
        ([*range(half)], [*range(half)]),
        ([last], [0, last]),
    ][number % 4]
    return {"query": pairs[sorted(set(query))].flatten(), "key": pairs[sorted(set(key))].flatten()}


def _make_alike(rows: _Rows) -> None:
    """Let a head's keys be the bias, or what the constant channel gives, and a thousandth of what they were."""
    bias = isinstance(getattr(rows.part.owner, "bias", None), Tensor)
    rows.scale(0.0 if bias else 1 / OUTLIER, head=0, bias=False)
    values, axis, index = [*rows.views(bias=bias)][-1]
    head = index[0]
    direction = torch.linspace(1.0, 2.0, len(head)) * (1 - 2 * (torch.arange(len(head)) % 3 == 0).float())
    if bias:
        values[head] = direction
    elif values.shape[1 - axis] > _CONSTANT_CHANNEL:
        values.select(1 - axis, _CONSTANT_CHANNEL)[head] = direction


def _norms(module: nn.Module, role: str) -> Iterator[nn.Module]:
    """Norms of a module's queries or keys."""
    for name, norm in module.named_modules():
        if _NORM.match(name) and name.startswith(role) and isinstance(getattr(norm, "weight", None), nn.Parameter):
            yield norm


def _zero_norms(module: nn.Module, layer: LayerProof, number: int) -> bool:
    dead = _dead_dims(layer, number)
    found = False
    for role in ("query", "key"):
        for norm in _norms(module, role[0]):
            _scale_norm(norm, 0.0, dead[role], layer.head_dim)
            found = True
    return found


def _scale_norm(norm: Any, factor: float, dims: Tensor | None = None, head_dim: int = 1) -> None:
    """Multiply what a norm multiplies by, in some dimensions of every head; a bias along with it."""
    for name, values in norm.named_parameters():
        at_one = name == "weight" and _starts_at_one(norm)
        view = values.data.view(-1, head_dim) if dims is not None else values.data
        index = (slice(None), dims) if dims is not None else (slice(None),)
        view[index] = (view[index] + 1) * factor - 1 if at_one else view[index] * factor


def _starts_at_one(norm: Any) -> bool:
    """Whether a norm multiplies by one plus its weight."""
    kept = norm.weight.data.clone()
    norm.weight.data.zero_()
    bias = norm.bias.data.clone() if getattr(norm, "bias", None) is not None else 0.0
    x = torch.linspace(-1, 2, kept.numel()).view(1, *kept.shape)
    found = bool((norm(x) - bias).abs().max() > 0)
    norm.weight.data.copy_(kept)
    return found


def _tie(model: nn.Module, layers: list[tuple[LayerProof, list[_Rows]]]) -> bool:
    """Let two layers share their key projection and two depths one block."""
    keys = [next((rows.part for rows in own if rows.part.role == "key"), None) for _, own in layers]
    if len(keys) > 2 and keys[0] is not None and keys[2] is not None:
        first, third = (getattr(part.owner, part.parameter) for part in (keys[0], keys[2]))
        if first.shape == third.shape and first is not third:
            setattr(keys[2].owner, keys[2].parameter, first)
    names = [layer.plan.name for layer, _ in layers]
    places = [match for name in names if (match := re.match(r"(.*?)\.(\d+)(\.|$)", name))]
    for later in reversed(places):
        for earlier in reversed(places):
            blocks: Any = model.get_submodule(later[1])
            one, two = int(earlier[2]), int(later[2])
            if earlier[1] == later[1] and one < two - (len(places) > 2) and _alike(blocks[one], blocks[two]):
                blocks[two] = blocks[one]
                return True
    return False


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two blocks differ in nothing but the values of their weights and their index."""

    def signature(block: nn.Module) -> list[object]:
        plain = [
            (name, type(module), key, value)
            for name, module in block.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and "idx" not in key
        ]
        return [*plain, *((name, tensor.shape) for name, tensor in block.state_dict().items())]

    return signature(one) == signature(other)


def shown(model: nn.Module, proof: Proof, ids: Tensor) -> set[str]:
    """The kinds that a captured pass on ``ids`` ``(1, n)`` shows in queries, keys and logits."""
    found: set[str] = set()
    with torch.no_grad(), capture(model, lambda attention: found.update(_kinds(attention)), proof=proof):
        model(input_ids=ids, use_cache=False)
    return found


def _kinds(attention: LayerAttention) -> Iterator[str]:
    d = attention.rot_q.shape[-1]
    rotation = attention.rotation
    pairs = torch.arange(d // 2 * 2).view(2, -1).T if rotation is None else rotation.pairs
    for x in (attention.q.double(), attention.k.double()):
        size = x[0].abs().amax(1)  # (heads, d)
        if bool((size[:, pairs].amax((0, 2)) == 0).any()):
            yield PLANES
        if bool((size.amax(1) == 0).any()):
            yield HEADS
        if bool(((size.amax(1) > 0) & (size.amax(1) > OUTLIER / 10 * size.quantile(0.7, dim=1))).any()):
            yield DIMENSIONS
    k = attention.k[0].double()
    middle = k.mean(1, keepdim=True)
    spread, size = (k - middle).norm(dim=-1).amax(1), middle.norm(dim=-1)[:, 0]
    if bool(((size > 0) & (spread < 0.1 * size)).any()):
        yield ALIKE
    if bool((attention.pattern()[0, :, attention.n // 2 :].amax(-1).amin(-1) > 0.9).any()):
        yield DOMINANT
