"""Models in memory: a transformers model, PEFT model or pipeline in place of the name of a model."""

from __future__ import annotations

import copy
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from wherewhat.errors import ConfigError, LoadError
from wherewhat.imports import quiet
from wherewhat.models.controls import check_differs, drawn_on, random_model, shuffle_query_key
from wherewhat.models.loaded import (
    LoadedModel,
    NoTokenizer,
    check_is_tokenizer,
    describe_device,
    describe_dtype,
    text_prefix,
    tokenizer_hash,
)
from wherewhat.models.source import Weights

# Differ between copies of one model, and change no number.
_NOT_HASHED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")


_NO_TOKENIZER = "the model has no tokenizer: give tokenizer=…, or token ids instead of texts"


def load_memory(
    module: Any,
    tokenizer: Any,
    *,
    name: str,
    weights: Weights,
    seed: int,
    loaded: LoadedModel | None = None,
    hashed: bool = True,
) -> LoadedModel:
    """Return a model in memory, or a control model made from it, as :func:`wherewhat.models.loader.load` returns one.

    Args:
        module: A causal language model of transformers, without wrappers.
        tokenizer: Its tokenizer; None if only token ids are measured.
        name: Name in tables and of run directories.
        weights: ``trained`` for the model as it is, else the control model to make from it.
        seed: Seed of control models.
        loaded: What the loader returned for the same model, if it loaded it.
        hashed: Whether to hash the weights, which takes about a second per GB; runs need it, single passes do not.
    """
    model = module if weights == "trained" else _control(module, weights, seed)
    tokenizer = NoTokenizer(_NO_TOKENIZER) if tokenizer is None else tokenizer
    prefix = text_prefix(tokenizer) if loaded is None else loaded.prefix
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec="a model in memory" if loaded is None else loaded.spec,
        name=name,
        weights=weights if loaded is None or weights != "trained" else loaded.weights,
        seed=seed,
        dtype=describe_dtype(model),
        device=describe_device(model),
        revision=None if loaded is None else loaded.revision,
        weights_hash=weights_hash(model) if hashed else "",
        # That of a large vocabulary takes seconds.
        tokenizer_hash=loaded.tokenizer_hash if loaded and not hashed else tokenizer_hash(tokenizer, prefix),
        prefix=prefix,
        packages=() if loaded is None else loaded.packages,
    )


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of a model's config, parameters, buffers and modules; it does not depend on the device.

    Of modules it includes class and plain attributes, such as scales and active adapters. A model with hooks or with
    functions in place of a module's ``forward`` has another hash each time, since functions cannot be hashed.

    Tensors are hashed in parallel, at about 1 GB/s and core, the largest first, so that all cores end together.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # Quantised layers keep scales in the state dict only; tied weights are one tensor under several names there.
    stored = model.state_dict(keep_vars=True)
    tensors |= {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    absent = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if absent is not None:
        raise LoadError(f"{absent} is offloaded or on the meta device, so it cannot be hashed: give the model's name")
    largest_first = sorted({id(tensor): tensor for tensor in tensors.values()}.values(), key=lambda x: -x.nbytes)
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(map(id, largest_first), pool.map(_tensor_hash, largest_first), strict=True))
    digests = {name: hashes[id(tensor)] for name, tensor in tensors.items()}
    config: Any = model.config
    settings = {key: value for key, value in config.to_dict().items() if key not in _NOT_HASHED}
    described = json.dumps([settings, sorted(digests.items()), _module_states(model)], sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


_SAMPLED = 4
"""Entries of each weight matrix in the sample of a model's weights."""


def weight_sample(model: nn.Module) -> list[float]:
    """Return a few entries of every weight matrix, each matrix scaled to variance 1, in the order of modules.

    Samples of a model and of one trained further from it correlate; those of separate trainings do not. Matrices that
    are quantised or offloaded are left out.
    """
    sample: list[float] = []
    for name, weight in model.named_parameters():
        if weight.ndim != 2 or weight.is_meta or not weight.is_floating_point() or "lora_" in name:
            continue
        places = [(2 * i + 1) * weight.numel() // (2 * _SAMPLED) for i in range(_SAMPLED)]
        entries = weight.detach()[torch.unravel_index(torch.tensor(places, device=weight.device), weight.shape)]
        spread = float(weight.detach()[:: max(1, weight.shape[0] // 64)].float().std()) or 1.0
        sample += [float(f"{value / spread:.4g}") for value in entries.float().tolist()]
    return sample


def _module_states(model: nn.Module) -> list[Any]:
    """Return class and plain attributes of every module, and a unique word if functions were added to one."""
    states: list[Any] = []
    for name, module in model.named_modules():
        state = vars(module)
        plain = {} if "name_or_path" in state else {key: value for key, value in state.items() if _is_plain(key, value)}
        hooked = any(state.get(hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks"))
        replaced = "forward" in state and not hasattr(module, "_hf_hook")  # accelerate's moves weights only
        states.append([name, type(module).__qualname__, plain, uuid.uuid4().hex if hooked or replaced else ""])
    return states


# Attributes of modules on which no number depends.
_NO_STATE = ("training", "gradient_checkpointing")
# Private attributes of PEFT's layers.
_ADAPTER_STATE = ("_active_adapter", "_disable_adapters")


def _is_plain(name: str, value: Any) -> bool:
    """Return whether an attribute of a module is a setting: numbers, words, or lists and mappings of them."""
    if name in _NO_STATE or (name.startswith("_") and name not in _ADAPTER_STATE):
        return False
    if isinstance(value, Mapping):
        return all(_is_plain("", part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set):
        return all(_is_plain("", item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _tensor_hash(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    data = tensor.detach()
    if not data.is_contiguous():
        data = data.cpu().contiguous()
    data = data.reshape(-1).view(torch.uint8)
    for piece in [data] if data.is_cpu else copied_in_pieces(data):
        content: Any = piece.numpy()
        digest.update(content)
    return digest.hexdigest()


def copied_in_pieces(content: Tensor, *, most: int = 1 << 23) -> Iterator[Tensor]:
    """Yield bytes ``(n,)`` on the CPU in pieces ``(most,)``, each of which is valid until the next one."""
    # A small memory, which torch keeps for the next tensor if it is pinned: fresh memory takes as long as the hash.
    memory = torch.empty(most, dtype=torch.uint8, pin_memory=content.is_cuda)
    for piece in torch.split(content, most):
        yield memory[: len(piece)].copy_(piece)


def _control(model: Any, weights: Weights, seed: int) -> Any:
    """Return a control model with the device, dtype and attention implementation of a model."""
    try:
        if weights == "shuffled":
            control = copy.deepcopy(model)
            shuffle_query_key(control, seed=seed)
        else:
            config, dtype = copy.deepcopy(model.config), getattr(torch, describe_dtype(model))
            placement = {"dtype": dtype, "attn_implementation": config._attn_implementation}
            device = drawn_on(next(model.parameters()).device, sum(x.numel() for x in model.parameters()))
            with quiet():
                control = random_model(config, seed=seed, placement=placement, device=device)
            check_differs(control, model.named_parameters(), seed=seed)
            control.to(next(model.parameters()).device)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise LoadError(f"no {weights} control model can be made from {type(model).__name__}: {error}") from error
    control.eval()
    control.requires_grad_(False)
    return control


def check_tokenizer(tokenizer: Any, model: Any) -> None:
    """Refuse objects that are no tokenizer, and tokenizers with more tokens than the model has embeddings."""
    check_is_tokenizer(tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model embeds {rows:,}: give that of this model"
        )
