"""Where each attention module keeps its query and key projection entries.

An explicit table, because a wrong guess would silently permute values: separate projections by name,
fused ones by attention class. Row ranges are output features of the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wherewhat.errors import LoadError

_SHARED = "its keys share a projection with queries or values"


class _NotSeparableError(Exception):
    """The entries of queries and keys cannot be told from others."""


@dataclass(frozen=True)
class Part:
    """Entries of one parameter that make queries or keys.

    Attributes:
        owner: Module that holds the parameter.
        parameter: Name of the parameter in its module.
        role: "query" or "key".
        rows: Indices `(n,)` of output features along `dim`; None for all of them.
        dim: Axis of the output features: 0 for Linear, 1 for Conv1D.
    """

    owner: torch.nn.Module
    parameter: str
    role: str
    rows: torch.Tensor | None = None
    dim: int = 0


# Pairs of modules whose whole weight is the query and the key projection.
_SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("query_proj", "key_proj"),
    ("project_q", "project_k"),
    ("q_lin", "k_lin"),
    ("Wq", "Wk"),
)
# Classes with such names that are not softmax attention: linear attention and recurrences stay as they are.
_OTHER_MIXERS = ("DeltaNet", "DeltaAttention", "LightningAttention", "Rwkv")
# In front of, or beside, the language model.
_OTHER_TOWERS = ("vision", "visual", "image", "audio")


def query_key_parts(model: torch.nn.Module) -> dict[str, list[Part]]:
    """Query and key entries of every softmax-attention module.

    Args:
        model: A causal language model.

    Returns:
        For each attention module's name, its parts.
    """
    found: dict[str, list[Part]] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if any(word in kind for word in _OTHER_MIXERS) or any(word in name for word in _OTHER_TOWERS):
            continue
        try:
            parts = list(_parts(module, kind))
        except _NotSeparableError as error:
            raise LoadError(f"cannot shuffle the queries and keys of {name} ({kind}): {error}") from None
        if parts:
            found[name] = parts
    for name, module in model.named_modules():
        if _is_attention(name, module) and not any(key == name or key.startswith(f"{name}.") for key in found):
            raise LoadError(
                f"cannot shuffle the queries and keys of {name} ({type(module).__name__}): layout not known"
            )
    if not found:
        raise LoadError(f"cannot shuffle {type(model).__name__}: it has no query and key projections that are known")
    return found


def _is_attention(name: str, module: torch.nn.Module) -> bool:
    kind = type(module).__name__
    if any(word in kind for word in _OTHER_MIXERS) or any(word in name for word in _OTHER_TOWERS):
        return False
    # Containers such as BertAttention hold the real one; what counts is who projects.
    return kind.endswith(("Attention", "Attn")) and any(True for _ in module.parameters())


def _parts(module: Any, kind: str) -> Iterator[Part]:
    if kind in _FUSED:
        yield from _FUSED[kind](module)
        return
    if getattr(module, "kv_b_proj", None) is not None:
        yield from _latent(module)
        return
    for query, key in _SEPARATE:
        q, k = _linear(module, query), _linear(module, key)
        if q is None or (k is None and not getattr(module, "is_kv_shared_layer", False)):
            continue
        if hasattr(module, "v_proj") and module.v_proj is None and k is not None:
            raise _NotSeparableError(_SHARED)
        yield Part(q, "weight", "query", rows=_query_rows(module, q))
        if k is not None:
            yield Part(k, "weight", "key")
        return


def _linear(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The child that holds a 2-D weight under a name; Moshi wraps it once more."""
    child = getattr(module, name, None)
    if not isinstance(child, torch.nn.Module):
        return None
    child = getattr(child, "linear", child)
    weight = getattr(child, "weight", None)
    return child if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _query_rows(module: torch.nn.Module, projection: torch.nn.Module) -> torch.Tensor | None:
    """Qwen3-Next's kind fuses an output gate into the query projection, per head: [query | gate]."""
    if not type(module).__name__.startswith(("Qwen3Next", "Qwen3_5", "Qwen4Exp")):
        return None
    rows, head = _rows(projection), int(module.head_dim)  # type: ignore[arg-type]
    return torch.arange(rows).view(-1, 2, head)[:, 0].flatten()


def _rows(projection: Any, dim: int = 0) -> int:
    return int(projection.weight.shape[dim])


def _per_head(name: str) -> Callable[[Any], Iterator[Part]]:
    """Each head's rows in turn: [query | key | value] of head 0, then of head 1, ..."""

    def parts(module: Any) -> Iterator[Part]:
        fused = getattr(module, name)
        head = getattr(module, "head_dim", None) or module.head_size
        index = torch.arange(_rows(fused)).view(-1, 3, int(head))
        yield Part(fused, "weight", "query", index[:, 0].flatten())
        yield Part(fused, "weight", "key", index[:, 1].flatten())

    return parts


def _blocks(name: str, dim: int = 0) -> Callable[[Any], Iterator[Part]]:
    """All queries, then all keys, then all values; keys and values are equally wide."""

    def parts(module: Any) -> Iterator[Part]:
        fused = getattr(module, name)
        total = _rows(fused, dim)
        keys = _key_width(module, total)
        queries = total - 2 * keys
        yield Part(fused, "weight", "query", torch.arange(queries), dim)
        yield Part(fused, "weight", "key", torch.arange(queries, queries + keys), dim)

    return parts


def _key_width(module: Any, total: int) -> int:
    heads = getattr(module, "num_key_value_heads", None)
    return int(heads) * int(module.head_dim) if heads is not None else total // 3


def _gpt2(module: Any) -> Iterator[Part]:
    if getattr(module, "is_cross_attention", False):
        raise _NotSeparableError("cross-attention is not in the table")
    yield from _blocks("c_attn", dim=1)(module)


def _falcon(module: Any) -> Iterator[Part]:
    fused, head = module.query_key_value, int(module.head_dim)
    # Every Falcon groups its rows: some query heads, one key head, one value head, and again.
    if module.new_decoder_architecture:
        group = module.num_heads // module.num_kv_heads + 2
    else:
        group = module.num_heads + 2 if module.multi_query else 3
    index = torch.arange(_rows(fused)).view(-1, group, head)
    yield Part(fused, "weight", "query", index[:, :-2].flatten())
    yield Part(fused, "weight", "key", index[:, -2].flatten())


def _gpt_bigcode(module: Any) -> Iterator[Part]:
    if module.is_cross_attention:
        raise _NotSeparableError("cross-attention is not in the table")
    heads = module.num_heads if module.multi_query else 1
    index = torch.arange(_rows(module.c_attn)).view(-1, heads + 2, int(module.head_dim))
    yield Part(module.c_attn, "weight", "query", index[:, :-2].flatten())
    yield Part(module.c_attn, "weight", "key", index[:, -2].flatten())


def _codegen(module: Any) -> Iterator[Part]:
    """Four slices, as trained on four devices, each [query | value | key]."""
    index = torch.arange(_rows(module.qkv_proj)).view(4, 3, -1)
    yield Part(module.qkv_proj, "weight", "query", index[:, 0].flatten())
    yield Part(module.qkv_proj, "weight", "key", index[:, 2].flatten())


def _jetmoe(module: Any) -> Iterator[Part]:
    """Every expert has its own queries, `(experts, out, in)`; keys and values are shared, [key | value]."""
    yield Part(module.experts.input_linear, "weight", "query")
    yield Part(module.kv_proj, "weight", "key", torch.arange(_rows(module.kv_proj) // 2))


def _xlnet(module: Any) -> Iterator[Part]:
    yield Part(module, "q", "query")
    yield Part(module, "k", "key")


def _shared_key_value(module: Any) -> Iterator[Part]:
    raise _NotSeparableError(_SHARED)


def _latent(module: Any) -> Iterator[Part]:
    """Multi-head latent attention: up-projections per head, and one rotary key shared by all heads.

    `kv_b_proj` gives each head [key without position | value]; `kv_a_proj_with_mqa` gives
    [latent | rotary key]. The latent feeds keys and values alike and stays as it is.
    """
    nope, value = int(module.qk_nope_head_dim), int(module.v_head_dim)
    if getattr(module, "q_gate_proj", None) is not None:  # per head [query | gate]
        wide = nope + int(module.qk_rope_head_dim)
        index = torch.arange(_rows(module.q_gate_proj)).view(-1, wide + value)
        yield Part(module.q_gate_proj, "weight", "query", index[:, :wide].flatten())
    else:
        up = getattr(module, "q_b_proj", None)
        yield Part(up if up is not None else module.q_proj, "weight", "query")
    index = torch.arange(_rows(module.kv_b_proj)).view(-1, nope + value)
    yield Part(module.kv_b_proj, "weight", "key", index[:, :nope].flatten())
    latent = int(module.kv_lora_rank)
    yield Part(module.kv_a_proj_with_mqa, "weight", "key", torch.arange(latent, _rows(module.kv_a_proj_with_mqa)))


_FUSED: dict[str, Callable[[Any], Iterator[Part]]] = {
    "GPTNeoXAttention": _per_head("query_key_value"),
    "GPTNeoXJapaneseAttention": _per_head("query_key_value"),
    "BloomAttention": _per_head("query_key_value"),
    "PersimmonAttention": _per_head("query_key_value"),
    "FalconAttention": _falcon,
    "GPTBigCodeAttention": _gpt_bigcode,
    "CodeGenAttention": _codegen,
    "Phi3Attention": _blocks("qkv_proj"),
    "Phi4MultimodalAttention": _blocks("qkv_proj"),
    "MptAttention": _blocks("Wqkv"),
    "DbrxAttention": _blocks("Wqkv"),
    "GPT2Attention": _gpt2,
    "Attention": _blocks("c_attn", dim=1),  # OpenAI GPT calls it just that
    "JetMoeAttention": _jetmoe,
    "XLNetRelativeAttention": _xlnet,
    "DeepseekV4Attention": _shared_key_value,
    "LSHSelfAttention": _shared_key_value,
}
