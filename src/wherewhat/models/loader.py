"""Load a model and its tokenizer from a name, a folder or a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from wherewhat.errors import LoadError, one_line
from wherewhat.hashes import sha256_file, sha256_json, sha256_tokenizer
from wherewhat.imports import quiet
from wherewhat.models.controls import random_twin, shuffle_query_key
from wherewhat.models.folder import adapter_identity, apply_adapter, check_tokenizer_files, weight_files
from wherewhat.models.gguf import converted
from wherewhat.models.loaded import (
    LoadedModel,
    check_device_map,
    describe_device,
    describe_dtype,
    resolve_device,
    resolve_dtype,
)
from wherewhat.models.source import EMBEDDED, Source, Weights, cache_root, not_loaded, resolve, torch_name
from wherewhat.models.suitability import check_finite, check_loaded, out_of_reach, read_config, stored_tensors
from wherewhat.options import check_seed, checked

_PROBE = "a"


def load_tokenizer(folder: Path, spec: str, *, trust_remote_code: bool, local_only: bool) -> Any:
    """The tokenizer of a model folder, checked to produce tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=local_only
        )
        works = bool(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    except Exception as error:  # noqa: BLE001 - the Rust tokenizers raise bare Exception
        reason = one_line(error)
        raise LoadError(f"the tokenizer of {spec!r} cannot be read: {reason}") from None
    if not works:
        raise LoadError(f"the tokenizer of {spec!r} is empty: {_PROBE!r} gives no tokens")
    return tokenizer


def text_prefix(tokenizer: Any) -> tuple[int, ...]:
    """The ids a tokenizer puts in front of a text of its own accord; what it appends is left out.

    Mostly BOS or nothing; GLM has two tokens.
    """
    body = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(_PROBE, add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(body) + 1):
        if full[start : start + len(body)] == body:
            return tuple(full[:start])
    return ()


@checked(spec=not_loaded, device=torch_name, dtype=torch_name)
def load(
    spec: str | os.PathLike[str] = EMBEDDED,
    *,
    weights: Weights = "trained",
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    device_map: Any = None,
    offline: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer, ready to be measured.

    Args:
        spec: `smollm2` (the embedded default), a Hugging Face id, a folder (of a model, or of a PEFT adapter that
            names its base model) or a `.gguf` file. A path that exists wins over a hub id. Only a hub id can cause a
            download.
        weights: "trained", "random" (freshly initialised from the config; of an adapter, its base model's) or
            "shuffled" (trained, adapter included, with the entries of each query and key projection permuted).
        seed: Seed of the twins.
        device: "auto" (CUDA where there is one, else CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16", "float16" or "float64".
        device_map: Passed to accelerate, e.g. "auto" for models larger than one GPU.
        offline: Never open a connection.
        trust_remote_code: Let a model's own Python code run.
        revision: Branch, tag or commit of a hub id.
        attn_implementation: Passed to transformers; its own choice if None.
        cache_dir: Where converted GGUF files are kept; $WHEREWHAT_CACHE or the user's cache if None.
        progress: Called with one line before a step that can take long.
    """
    check_seed(seed)
    target_dtype = resolve_dtype(dtype)
    check_device_map(device_map, device)
    target = resolve_device(device) if device_map is None else None
    source = resolve(
        spec,
        offline=offline,
        revision=revision,
        with_weights=weights != "random",
        with_code=trust_remote_code,
    )
    cache = cache_root(cache_dir)
    folder, identity, bos = _files(source, weights, cache, progress, with_code=trust_remote_code)
    if source.adapter is not None and weights != "random":
        identity |= adapter_identity(source.adapter, source.spec, memo=cache / "digests")
    # The files are here by now: only foreign Python code could still need the network.
    local_only = offline or not trust_remote_code
    with quiet(), torch.random.fork_rng(devices=[]):
        config = read_config(folder, source.spec, trust_remote_code=trust_remote_code, local_only=local_only)
        check_tokenizer_files(folder, source.spec)
        tokenizer = load_tokenizer(folder, source.spec, trust_remote_code=trust_remote_code, local_only=local_only)
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        place: dict[str, Any] = {"dtype": target_dtype, "attn_implementation": attn_implementation}
        if device_map is not None:
            place["device_map"] = device_map
        try:
            if weights == "random":
                model = _random(config, seed, options, place)
            else:
                options["local_files_only"] = local_only
                model = _trained(folder, source.spec, config, options, place)
                if source.adapter is not None:
                    model = apply_adapter(model, source.adapter, source.spec)
            if weights == "shuffled":
                shuffle_query_key(model, seed=seed)
            if target is not None:
                model.to(target)
        except LoadError:
            raise
        except (
            RuntimeError,
            OSError,
            ValueError,
            ImportError,
            KeyError,
            TypeError,
            SafetensorError,
        ) as error:
            raise LoadError(f"{source.spec!r} could not be loaded: {one_line(error, most=300)}") from error
        check_finite(model.state_dict().items(), source.spec, dtype)
        if weights != "random" and any(map(out_of_reach, model.parameters())):
            # accelerate moved some layers, or they are quantised: look at them where they came from.
            check_finite(stored_tensors(weight_files(folder, source.spec)), source.spec, "stored")
    model.eval()
    model.requires_grad_(False)
    prefix = text_prefix(tokenizer) if source.gguf is None else (() if bos is None else (bos,))
    twin = {"weights": weights, "seed": None if weights == "trained" else seed}
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        spec=source.spec,
        name=source.name,
        weights=weights,
        seed=seed,
        dtype=describe_dtype(model),
        device=describe_device(model),
        revision=source.revision,
        weights_hash=sha256_json({"files": identity, **twin}),
        tokenizer_hash=sha256_tokenizer(tokenizer, prefix),
        prefix=prefix,
    )


def _files(
    source: Source, weights: Weights, cache: Path, progress: Callable[[str], None] | None, *, with_code: bool
) -> tuple[Path, dict[str, str], int | None]:
    """The folder to load from, what identifies its weights and the code it brings, and a GGUF file's BOS id."""
    if source.gguf is not None:
        conversion = converted(source.gguf, cache, sha256=source.sha256, progress=progress)
        return conversion.folder, {"gguf": conversion.sha256}, conversion.bos
    folder = source.folder
    assert folder is not None
    config = folder / "config.json"
    if not config.is_file():
        raise LoadError(f"{source.spec!r} has no config.json in {str(folder)!r}: is it a model folder?")
    files = weight_files(folder, source.spec) if weights != "random" else []
    code = sorted(folder.rglob("*.py")) if with_code else []
    identity = {
        file.relative_to(folder).as_posix(): sha256_file(file, memo=cache / "digests")
        for file in [config, *files, *code]
    }
    return folder, identity, None


def _trained(folder: Path, spec: str, config: Any, options: dict[str, Any], place: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        use_safetensors=True,
        output_loading_info=True,
        # Reported and then refused by name, instead of a table on stderr and a pointer to it.
        ignore_mismatched_sizes=True,
        **options,
        **place,
    )
    check_loaded(report, spec)
    return model


def _random(config: Any, seed: int, options: dict[str, Any], place: dict[str, Any]) -> Any:
    if hasattr(config, "quantization_config"):  # of the stored weights, which are not used
        del config.quantization_config
    model = random_twin(config, seed=seed, attn_implementation=place["attn_implementation"], **options)
    if place["dtype"] == torch.float32 and "device_map" not in place:
        return model
    # Through the loader, which knows what stays in float32 (rotary frequencies) and how to spread layers.
    return type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **place)
