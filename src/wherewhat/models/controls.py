"""Control models: a new random initialisation, or shuffled query and key projections.

The layouts of the projections are listed explicitly, since a wrong guess would silently permute values: separate
projections by name, fused ones by attention class. Rows are output features of a projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wherewhat.errors import LoadError
from wherewhat.models.suitability import is_readable

LARGE = 10**9
"""Parameters above which a random control model for a GPU is drawn there, which takes seconds instead of minutes."""


def random_control(
    config: Any,
    *,
    seed: int,
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Return an untrained model with its own initialisation.

    Weights are drawn on the CPU in float32, so that they are the same for every device and dtype, unless a device is
    given. Global random state is neither read nor changed.

    Args:
        config: transformers config.
        seed: Seed of the control model; the generator starts from :func:`control_seed` of it.
        attn_implementation: Passed to transformers.
        device: A GPU to draw the weights on, in ``dtype``; None for the CPU.
        dtype: Dtype of the weights.
        options: Further options of `AutoModelForCausalLM.from_config`.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[] if device is None else [device]), torch.device(device or "cpu"):
        # Only the generator that is used: torch.manual_seed would also reseed every accelerator.
        if device is None:
            torch.default_generator.manual_seed(control_seed(seed))
        else:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(control_seed(seed))
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation, **options)


def drawn_on(device: torch.device | None, parameters: int | None) -> torch.device | None:
    """Return the GPU that a random control model of so many parameters is drawn on; None for the CPU."""
    return device if device is not None and device.type == "cuda" and (parameters or 0) > LARGE else None


def control_seed(seed: int) -> int:
    """Return the seed of the generator of a random control model.

    It is a hash: a model that was initialised with the same small number, as in most examples, has other weights.
    """
    return _generator_seed(f"wherewhat control {seed}")


def _generator_seed(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little") >> 1


def random_model(
    config: Any, *, seed: int, placement: dict[str, Any], device: torch.device | None = None, **options: Any
) -> Any:
    """Return :func:`random_control` with the dtype, attention implementation and device map of ``placement``."""
    if hasattr(config, "quantization_config"):  # describes the stored weights, which are not used
        del config.quantization_config
    if device is not None:
        return random_control(config, seed=seed, device=device, **placement, **options)
    model = random_control(config, seed=seed, attn_implementation=placement["attn_implementation"], **options)
    if placement["dtype"] == torch.float32 and "device_map" not in placement:
        return model
    # By the loader of transformers, which keeps rotary frequencies in float32 and distributes layers.
    return type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **placement)


_SAMPLED = 64
"""Entries of each tensor by which a control model is compared with its model."""


def check_differs(control: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], *, seed: int) -> None:
    """Refuse a random control model whose weights are those of the model itself, given by name.

    A few entries of each tensor are compared, in the lower precision of the two, up to the first that differ.
    """
    drawn = {**dict(control.named_parameters(remove_duplicate=False)), **dict(control.named_buffers())}
    for name, tensor in tensors:
        own = drawn.get(name)
        if own is None or own.shape != tensor.shape or not is_readable(own) or not is_readable(tensor):
            return  # such as the matrix of an adapter
        coarse = min(own.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(_sample(own).to(coarse).float(), _sample(tensor).to(coarse).float()):
            return
    raise LoadError(f"the random weights of seed {seed} are those of the model itself: give another seed")


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    places = torch.linspace(0, tensor.numel() - 1, min(_SAMPLED, tensor.numel()), dtype=torch.float64).long()
    return tensor.detach().reshape(-1)[places.to(tensor.device)].cpu()


def shuffle_query_key(model: torch.nn.Module, *, seed: int) -> None:
    """Permute, in place, the entries of every layer's query and key projection matrices.

    Entries are permuted within the queries and within the keys of a layer, which keeps the distribution of each matrix
    and removes its structure. Values, outputs and all biases are not changed. Each permutation depends only on the
    seed, the layer's name and the role, so it is the same on every device. A model in which this changes no entry, such
    as one with constant projections, is refused.
    """
    # Weights of some formats get their final shape in the first pass only.
    if getattr(model, "hf_quantizer", None) is not None:
        raise LoadError(
            f"cannot shuffle {type(model).__name__}: its weights are quantised; use the checkpoint before that"
        )
    done: set[tuple[int, str]] = set()
    changed = False
    for name, parts in query_key_parts(model).items():
        for number, part in enumerate(parts):
            parameter = getattr(part.owner, part.parameter)
            # A layer that is used at several depths is shuffled once.
            if (id(parameter), part.role) in done:
                continue
            done.add((id(parameter), part.role))
            if not parameter.is_floating_point() or not is_readable(parameter):
                raise LoadError(
                    f"cannot shuffle {name}: its weights are quantised or offloaded; load it without either"
                )
            start = _generator_seed(f"{seed}/{name}/{part.role}/{number}")
            changed |= _permute(parameter, part, torch.Generator(device="cpu").manual_seed(start))
    if not changed:
        raise LoadError(
            f"shuffling {type(model).__name__} changes nothing: in each query and key projection all entries are equal"
        )


def _permute(parameter: torch.nn.Parameter, part: ProjectionPart, generator: torch.Generator) -> bool:
    """Permute the entries of a part, and return whether one of them changed."""
    old = parameter.detach()
    chosen = old if part.rows is None else old.index_select(part.dim, part.rows.to(old.device))
    order = torch.randperm(chosen.numel(), generator=generator).to(old.device)
    mixed = chosen.flatten()[order].view_as(chosen)
    # A new tensor: the old one may be a file mapped into memory.
    new = mixed if part.rows is None else old.index_copy(part.dim, part.rows.to(old.device), mixed)
    parameter.data = new.contiguous()
    return not torch.equal(mixed, chosen)


_SHARED = "its keys share a projection with queries or values"
_CROSS = "cross-attention is not supported"


class _NotSeparableError(Exception):
    """The entries of queries and keys cannot be separated from others."""


@dataclass(frozen=True)
class ProjectionPart:
    """Entries of one parameter that project to queries or keys.

    Attributes:
        owner: Module of the parameter.
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
# Classes with such projections that are not softmax attention: linear attention and recurrences.
_OTHER_MIXERS = ("DeltaNet", "DeltaAttention", "LightningAttention", "Rwkv")
# Encoders beside the language model.
_OTHER_TOWERS = ("vision", "visual", "image", "audio")


def query_key_parts(model: torch.nn.Module) -> dict[str, list[ProjectionPart]]:
    """Return the query and key entries of every softmax-attention module of a model, by the module's name."""
    projections: dict[str, list[ProjectionPart]] = {}
    candidates = [
        (name, module, type(module).__name__)
        for name, module in model.named_modules()
        if not any(word in type(module).__name__ for word in _OTHER_MIXERS)
        and not any(word in name for word in _OTHER_TOWERS)
    ]
    for name, module, kind in candidates:
        try:
            parts = list(_parts(module, kind))
        except _NotSeparableError as error:
            raise LoadError(f"cannot shuffle the queries and keys of {name} ({kind}): {error}") from None
        if parts:
            projections[name] = parts
    for name, module, kind in candidates:
        # Containers such as BertAttention are covered by the module inside them that projects.
        is_attention = kind.endswith(("Attention", "Attn")) and any(True for _ in module.parameters())
        if is_attention and not any(key == name or key.startswith(f"{name}.") for key in projections):
            raise LoadError(f"cannot shuffle the queries and keys of {name} ({kind}): layout not known")
    if not projections:
        raise LoadError(f"cannot shuffle {type(model).__name__}: it has no query and key projections that are known")
    return projections


def _parts(module: Any, kind: str) -> Iterator[ProjectionPart]:
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
        yield ProjectionPart(q, "weight", "query", rows=_query_rows(module, q))
        if k is not None:
            yield ProjectionPart(k, "weight", "key")
        return


def _linear(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """Return the child with a 2-D weight under a name, which Moshi wraps in another module; None if there is none."""
    child = getattr(module, name, None)
    if not isinstance(child, torch.nn.Module):
        return None
    child = getattr(child, "linear", child)
    weight = getattr(child, "weight", None)
    return child if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _query_rows(module: torch.nn.Module, projection: torch.nn.Module) -> torch.Tensor | None:
    """Return the query rows of models like Qwen3-Next, whose query projection is [query | gate] for each head."""
    if not type(module).__name__.startswith(("Qwen3Next", "Qwen3_5", "Qwen4Exp")):
        return None
    rows, head = _rows(projection), int(module.head_dim)  # type: ignore[arg-type]
    return torch.arange(rows).view(-1, 2, head)[:, 0].flatten()


def _rows(projection: Any, dim: int = 0) -> int:
    return int(projection.weight.shape[dim])


_Layout = Callable[[Any], Iterator[ProjectionPart]]


def _fused(projection: Any, queries: torch.Tensor, keys: torch.Tensor, dim: int = 0) -> Iterator[ProjectionPart]:
    """Yield the query and key rows of a fused projection."""
    yield ProjectionPart(projection, "weight", "query", queries.flatten(), dim)
    yield ProjectionPart(projection, "weight", "key", keys.flatten(), dim)


def _per_head(name: str) -> _Layout:
    """Return the layout [query | key | value] for each head."""

    def parts(module: Any) -> Iterator[ProjectionPart]:
        yield from _grouped(getattr(module, name), 3, getattr(module, "head_dim", None) or module.head_size)

    return parts


def _blocks(name: str, dim: int = 0) -> _Layout:
    """Return the layout of all queries, then all keys, then all values; keys and values are equally wide."""

    def parts(module: Any) -> Iterator[ProjectionPart]:
        if getattr(module, "is_cross_attention", False):
            raise _NotSeparableError(_CROSS)
        fused = getattr(module, name)
        total = _rows(fused, dim)
        heads = getattr(module, "num_key_value_heads", None)
        keys = int(heads) * int(module.head_dim) if heads is not None else total // 3
        queries = total - 2 * keys
        yield from _fused(fused, torch.arange(queries), torch.arange(queries, queries + keys), dim)

    return parts


def _grouped(projection: Any, group: int, head_dim: Any) -> Iterator[ProjectionPart]:
    """Yield the rows of a projection made of groups of query heads, one key head and one value head."""
    index = torch.arange(_rows(projection)).view(-1, group, int(head_dim))
    yield from _fused(projection, index[:, :-2], index[:, -2])


def _falcon(module: Any) -> Iterator[ProjectionPart]:
    if module.new_decoder_architecture:
        group = module.num_heads // module.num_kv_heads + 2
    else:
        group = module.num_heads + 2 if module.multi_query else 3
    yield from _grouped(module.query_key_value, group, module.head_dim)


def _gpt_bigcode(module: Any) -> Iterator[ProjectionPart]:
    if module.is_cross_attention:
        raise _NotSeparableError(_CROSS)
    yield from _grouped(module.c_attn, 2 + (module.num_heads if module.multi_query else 1), module.head_dim)


def _codegen(module: Any) -> Iterator[ProjectionPart]:
    """Yield the rows of four slices, each [query | value | key]."""
    index = torch.arange(_rows(module.qkv_proj)).view(4, 3, -1)
    yield from _fused(module.qkv_proj, index[:, 0], index[:, 2])


def _jetmoe(module: Any) -> Iterator[ProjectionPart]:
    """Yield the queries of every expert, `(experts, out, in)`, and the shared keys, [key | value]."""
    yield ProjectionPart(module.experts.input_linear, "weight", "query")
    yield ProjectionPart(module.kv_proj, "weight", "key", torch.arange(_rows(module.kv_proj) // 2))


def _xlnet(module: Any) -> Iterator[ProjectionPart]:
    yield ProjectionPart(module, "q", "query")
    yield ProjectionPart(module, "k", "key")


def _shared_key_value(module: Any) -> Iterator[ProjectionPart]:
    raise _NotSeparableError(_SHARED)


def _latent(module: Any) -> Iterator[ProjectionPart]:
    """Yield the parts of multi-head latent attention: projections per head, and a rotary key shared by all heads.

    `kv_b_proj` is [key without position | value] for each head, `kv_a_proj_with_mqa` is [latent | rotary key]. The
    latent is projected to both keys and values and is not permuted.
    """
    nope, value = int(module.qk_nope_head_dim), int(module.v_head_dim)
    if getattr(module, "q_gate_proj", None) is not None:  # per head [query | gate]
        wide = nope + int(module.qk_rope_head_dim)
        index = torch.arange(_rows(module.q_gate_proj)).view(-1, wide + value)
        yield ProjectionPart(module.q_gate_proj, "weight", "query", index[:, :wide].flatten())
    else:
        up = getattr(module, "q_b_proj", None)
        yield ProjectionPart(up if up is not None else module.q_proj, "weight", "query")
    index = torch.arange(_rows(module.kv_b_proj)).view(-1, nope + value)
    yield ProjectionPart(module.kv_b_proj, "weight", "key", index[:, :nope].flatten())
    latent = int(module.kv_lora_rank)
    yield ProjectionPart(
        module.kv_a_proj_with_mqa, "weight", "key", torch.arange(latent, _rows(module.kv_a_proj_with_mqa))
    )


_FUSED: dict[str, _Layout] = {
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
    "GPT2Attention": _blocks("c_attn", dim=1),
    "Attention": _blocks("c_attn", dim=1),  # OpenAI GPT
    "JetMoeAttention": _jetmoe,
    "XLNetRelativeAttention": _xlnet,
    "DeepseekV4Attention": _shared_key_value,
    "LSHSelfAttention": _shared_key_value,
}
