"""Weights as trained models have them, and random ones do not.

``harden`` changes a tiny random model in place so that every kind of ``KINDS`` is in it, as far as its
architecture has room for it; ``shown`` tells from a captured pass which kinds its queries and keys have, and
``WITHOUT`` says why where there is no room.

Planes and heads differ from layer to layer, so that layers which rotate alike do not show the same planes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conformance.tiny_config import HIDDEN, VOCAB
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.layer_proofs import LayerProof
from wherewhat.captures.proof import Proof, capture
from wherewhat.errors import LoadError
from wherewhat.models.controls import ProjectionPart, query_key_parts

PLANES, HEADS, NORMS = "dead planes", "dead heads", "zero norms"
TOKENS, DIMENSIONS = "outlier tokens", "outlier dimensions"
ALIKE, DOMINANT, TIED = "alike keys", "dominant head", "tied layers"
KINDS = {
    PLANES: "no energy in both dimensions of some RoPE planes, in queries, in keys or in both;",
    HEADS: "heads whose queries, or whose keys, are zero;",
    NORMS: "entries of the norms of queries and keys that multiply by exactly zero;",
    TOKENS: "residual channels a thousand times larger in the embeddings of some tokens;",
    DIMENSIONS: "a dimension of a head's queries or keys a thousand times larger than the others;",
    ALIKE: "a head whose keys before rotation have the same direction for all tokens;",
    DOMINANT: "logits so large that nearly all the weight of a query is on one key;",
    TIED: "one block that is used at two depths, or two layers that share parameters.",
}

NO_NORM = "no norm with weights on queries and keys"
_CLIP = "clips queries and keys at ±1.5"
_CAP = "a soft-cap keeps its logits below 3"
_BIAS = "its norms of queries and keys have a bias"
_AFTER = "a norm follows the rotation: keys before it are not seen"
_ONE = "has one attention layer"
_ADAPTER = "adds the output of an adapter to its queries and keys"
_MIXED = "mixes queries and keys over tokens and heads by convolutions, then makes them unit vectors"
WITHOUT: dict[str, dict[str, str]] = {
    PLANES: {"zamba2": _ADAPTER, "zaya": _MIXED},
    HEADS: {"fuyu": _BIAS, "persimmon": _BIAS, "phi": _BIAS, "zamba2": _ADAPTER, "zaya": _MIXED},
    DIMENSIONS: {"dbrx": _CLIP, "mpt:clip": _CLIP, "olmo": _CLIP, "olmoe": _CLIP, "zaya": _MIXED},
    ALIKE: {
        "hunyuan_v1_dense": _AFTER,
        "hunyuan_v1_moe": _AFTER,
        "olmoe": _CLIP,
        "zamba2": _ADAPTER,
        "zaya": _MIXED,
    },
    DOMINANT: {
        "dbrx": _CLIP,
        "gemma2": _CAP,
        "mpt:clip": _CLIP,
        "nanochat": "norms without weights undo the size of queries and keys",
        "olmo": _CLIP,
        "olmoe": _CLIP,
        "vaultgemma": _CAP,
        "zaya": _MIXED,
    },
    TIED: {"nemotron_h": _ONE, "recurrent_gemma": _ONE},
}
"""Models that have no room for a kind, and why; for ``NORMS`` it is ``NO_NORM`` of all of them."""

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

    part: ProjectionPart
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


def harden(model: nn.Module, proof: Proof, *, kinds: Collection[str] = KINDS, seed: int = 0) -> set[str]:
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
        # One table, or one per codebook, or one per model inside the model.
        tables = (m.weight.data for m in model.modules() if isinstance(m, nn.Embedding))
        for embedding in (x for x in tables if len(x) >= VOCAB and x.shape[1] >= 2 * _OUTLIER_CHANNEL):
            if ALIKE in kinds:
                embedding[:, _CONSTANT_CHANNEL] = _CONSTANT
            if TOKENS in kinds:
                loud = embedding[3::7]
                loud[:, _OUTLIER_CHANNEL] *= OUTLIER
                # Its opposite in the next one, or norms that subtract the mean would spread it over all channels.
                loud[:, _OUTLIER_CHANNEL + 1] = -loud[:, _OUTLIER_CHANNEL]
                if ALIKE in kinds:  # constant after the norm
                    loud[:, _CONSTANT_CHANNEL] = loud[:, _OUTLIER_CHANNEL].abs()
                done.add(TOKENS)
        for number, (layer, rows) in enumerate(layers, seed):
            module = model.get_submodule(layer.layout.name)
            _change(module, layer, rows, number, kinds)
            if NORMS in kinds and _zero_norms(module, layer, number):
                done.add(NORMS)
        if TIED in kinds and (len(layers) < len(proof.layers) or _tie(model, layers)):
            done.add(TIED)
    return done


def _layers(model: nn.Module, proof: Proof) -> list[tuple[LayerProof, list[_Rows]]]:
    """The layers and their rows; of those that share their weights the first."""
    try:
        parts = query_key_parts(model)
    except LoadError:  # keys that are values too: here they may change together
        parts = {}
    found: dict[tuple[int, ...], tuple[LayerProof, list[_Rows]]] = {}
    for layer in proof.layers:
        name, module = layer.layout.name, model.get_submodule(layer.layout.name)
        own = next((parts[key] for key in parts if key == name or key.startswith(f"{name}.")), None)
        if own is None:
            pairs = (("q_proj", "query"), ("k_proj", "key"))
            own = [
                ProjectionPart(getattr(module, name), "weight", role) for name, role in pairs if hasattr(module, name)
            ]
        weights = tuple(id(getattr(part.owner, part.parameter)) for part in own)
        found.setdefault(weights, (layer, list(_seen_as_heads(module, layer, own))))
    return [*found.values()]


def _seen_as_heads(module: Any, layer: LayerProof, parts: list[ProjectionPart]) -> Iterator[_Rows]:
    latent = hasattr(module, "kv_b_proj")
    for part in parts:
        start, width = 0, layer.head_dim
        if latent and part.role == "key":  # per head without position, then one that turns for all heads
            shared = part.owner is module.kv_a_proj_with_mqa
            start = module.qk_nope_head_dim if shared else 0
            width = module.qk_rope_head_dim if shared else module.qk_nope_head_dim
        yield _Rows(part, start, width)


def _change(module: nn.Module, layer: LayerProof, rows: list[_Rows], number: int, kinds: Collection[str]) -> None:
    dead = _dead_dims(layer, number)
    normed = any(_norms(module, "q"))
    for own in rows:
        query = own.part.role == "query"
        others = [d for d in range(own.start, own.start + own.width) if d not in dead[own.part.role]]
        outlier = torch.tensor(others[-1:] if query else others[:1])
        # Key head 0 is alike, dead and plain in turn; the next one, if there is one, has an outlier.
        alike, dead_key = number % 3 == 0, number % 3 == 1
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
        if HEADS in kinds and not query and dead_key:
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
    rotary = layer.layout.rotary
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
    """Let a head's keys be the bias, or what the constant channel gives and a trace of what they were."""
    bias = isinstance(getattr(rows.part.owner, "bias", None), Tensor)
    rows.scale(0.0 if bias else 0.1 / OUTLIER, head=0, bias=False)
    values, axis, index = [*rows.views(bias=bias)][-1]
    head = index[0]
    direction = torch.linspace(1.0, 2.0, len(head)) * (1 - 2 * (torch.arange(len(head)) % 3 == 0).float())
    if bias:
        values[head] = direction
    elif values.shape[1 - axis] >= HIDDEN:
        # Some families give their attention the embeddings beside the hidden states.
        values.select(1 - axis, values.shape[1 - axis] - HIDDEN + _CONSTANT_CHANNEL)[head] = direction


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
    """Let two depths share one block; where there is no such pair, two layers all but their queries and keys."""
    names = [layer.layout.name for layer, _ in layers]
    places = [match for name in names if (match := re.match(r"(.*?)\.(\d+)(\.|$)", name))]
    for apart, later in itertools.product((2, 1), reversed(places)):
        for earlier in places:
            blocks: Any = model.get_submodule(later[1])
            one, two = int(earlier[2]), int(later[2])
            if earlier[1] == later[1] and two - one == apart and len(places) > 2 and _alike(blocks[one], blocks[two]):
                blocks[two] = blocks[one]
                return True
    kept = {id(getattr(rows.part.owner, rows.part.parameter)) for _, own in layers for rows in own}
    tied = False
    for first, second in itertools.combinations(names, 2):
        target = model.get_submodule(second)
        for name, parameter in [*model.get_submodule(first).named_parameters()]:
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in kept and getattr(_find(target, name), "shape", None) == parameter.shape:
                setattr(target.get_submodule(owner), leaf, parameter)
                tied = True
    return tied


def _find(module: nn.Module, name: str) -> Any:
    return dict(module.named_parameters()).get(name)


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
    k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    if bool(((k - k[:, :1]).norm(dim=-1).amax(1) < 0.1 * k.norm(dim=-1).amin(1)).any()):
        yield ALIKE
    weights = attention.pattern()[0, :, attention.n // 2 :]
    if bool((torch.maximum(weights.amax(-1), 1 - weights.sum(-1)).mean(-1) > 0.9).any()):
        yield DOMINANT
