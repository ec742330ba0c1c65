"""Load a model and its tokenizer from a name, a folder or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from wherewhat.boundary import read_json
from wherewhat.errors import LoadError, StoreError, as_one_line
from wherewhat.files import ascii_json_sha256, make_folder, model_file_sha256, read_sealed, write_sealed
from wherewhat.imports import package_version, quiet, without_collection
from wherewhat.models.controls import check_differs, drawn_on, random_model, shuffle_query_key
from wherewhat.models.gguf import ConvertedGguf, cached_conversion
from wherewhat.models.loaded import (
    PROBE,
    LoadedModel,
    NoTokenizer,
    check_attention,
    check_device_map,
    check_is_tokenizer,
    describe_device,
    describe_dtype,
    resolve_device,
    resolve_dtype,
    text_prefix,
    tokenizer_hash,
)
from wherewhat.models.source import (
    DRAW,
    EMBEDDED,
    Source,
    Weights,
    adapter_identity,
    apply_adapter,
    cache_root,
    check_files,
    has_tokenizer,
    not_loaded,
    resolve,
    torch_name,
    weight_files,
)
from wherewhat.models.suitability import (
    attempt,
    check_finite,
    check_layers,
    check_loaded,
    check_memory,
    check_stored,
    describe_folder,
    is_readable,
    prepare,
    read_config,
    stored_tensors,
    time_limit,
)
from wherewhat.options import check_seed, checked


@checked(spec=not_loaded, device=torch_name, dtype=torch_name)
@without_collection()
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
    tokenizer: Any = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load a causal language model and its tokenizer, ready to be measured.

    Args:
        spec: `smollm2` (the embedded default), a Hugging Face id, a folder (of a model, or of a PEFT adapter that
            names its base model) or a `.gguf` file. An existing path takes precedence over a hub id. Only a hub id can
            cause a download.
        weights: "trained", "random" (initialised from the config, for adapters that of the base model) or "shuffled"
            (trained, adapter included, with the entries of each query and key projection permuted).
        seed: Seed of control models.
        device: "auto" (CUDA if available, else CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16", "float16" or "float64".
        device_map: Passed to accelerate, e.g. "auto" for models larger than one GPU.
        offline: Never open a connection.
        trust_remote_code: Allow Python code of the model's repository to run.
        revision: Branch, tag or commit of a hub id.
        attn_implementation: Passed to transformers; None for its default.
        cache_dir: Folder of converted GGUF files; None for $WHEREWHAT_CACHE or the user's cache.
        tokenizer: Tokenizer of the same model, if it is loaded already; None to read it.
        progress: Called with one line before a slow step.
    """
    check_seed(seed)
    target_dtype = resolve_dtype(dtype)
    check_device_map(device_map, device)
    check_attention(attn_implementation)
    if tokenizer is not None:
        check_is_tokenizer(tokenizer)
    target = resolve_device(device) if device_map is None else None
    source = resolve(
        spec, offline=offline, revision=revision, with_weights=weights != "random", with_code=trust_remote_code
    )
    cache = cache_root(cache_dir)
    files = _find_files(source, weights, cache, progress, with_code=trust_remote_code)
    folder, identity = files.folder, files.identity
    if source.adapter is not None and weights != "random":
        identity |= adapter_identity(source.adapter, source.spec, cache=cache / "digests")
    # All files are local now: only remote code could still need the network.
    local_only = offline or not trust_remote_code
    if files.gguf is not None:
        parameters: int | None = files.gguf.parameters
    else:
        parameters = None if trust_remote_code else _try(files, source.spec, cache, progress)
    with quiet(), torch.random.fork_rng(devices=[]):
        config = read_config(folder, source.spec, trust_remote_code=trust_remote_code, local_only=local_only)
        if tokenizer is None:
            tokenizer = _load_tokenizer(folder, source.spec, trust_remote_code=trust_remote_code, local_only=local_only)
        if parameters is not None and not hasattr(config, "quantization_config"):
            if weights != "random" and files.gguf is None:
                check_stored(parameters, files.weights, source.spec)
            check_memory(parameters, target_dtype, target, source.spec)
        placement: dict[str, Any] = {"dtype": target_dtype, "attn_implementation": attn_implementation}
        if device_map is not None:
            placement["device_map"] = device_map
        drawn = drawn_on(target, parameters)
        with as_one_line(LoadError, f"{source.spec!r} could not be loaded"):
            if weights == "random":
                model = random_model(
                    config, seed=seed, placement=placement, device=drawn, trust_remote_code=trust_remote_code
                )
                if source.adapter is None and (stored := files.tensors(source.spec)) is not None:
                    check_differs(model, stored, seed=seed)
            else:
                if files.gguf is not None:
                    model = files.gguf.model(config, **placement)
                else:
                    options = {"trust_remote_code": trust_remote_code, "local_files_only": local_only}
                    model = _trained(folder, source.spec, config, **options, **placement)
                if source.adapter is not None:
                    model = apply_adapter(model, source.adapter, source.spec)
            if weights == "shuffled":
                shuffle_query_key(model, seed=seed)
            if target is not None:
                model.to(target)
        check_finite(model.state_dict().items(), source.spec, dtype)
        if weights != "random" and not all(map(is_readable, model.parameters())):
            # Offloaded or quantised weights are checked in the files.
            check_finite(files.tensors(source.spec) or (), source.spec, "stored")
    model.eval()
    model.requires_grad_(False)
    prefix = text_prefix(tokenizer) if files.gguf is None else files.gguf.prefix
    identified: dict[str, Any] = {"files": identity, "weights": weights, "seed": None if weights == "trained" else seed}
    if weights == "random":
        identified["draw"] = DRAW if drawn is None else f"{DRAW} on {drawn.type}"
    through = {"gguf": source.gguf is not None, "peft": source.adapter is not None and weights != "random"}
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
        weights_hash=ascii_json_sha256(identified),
        tokenizer_hash=tokenizer_hash(tokenizer, prefix),
        prefix=prefix,
        packages=tuple(name for name, used in through.items() if used),
    )


@dataclass(frozen=True)
class _Files:
    """Files to load a model from.

    Attributes:
        folder: The folder.
        identity: Hashes of config, weights and code by name, or of the GGUF file.
        weights: Files of weights; none if they are not used.
        settings: Files of settings and of the tokenizer by name; those of a converted GGUF file are not listed.
        gguf: The GGUF file, if it is one.
    """

    folder: Path
    identity: dict[str, str]
    weights: list[Path] = field(default_factory=list)
    settings: dict[str, Path] = field(default_factory=dict)
    gguf: ConvertedGguf | None = None

    def tensors(self, spec: str) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Return the stored weights by name; None if they are not here: a random control model needs none.

        Those of a GGUF file begin with the smallest, since the first often suffices.
        """
        if self.gguf is not None:
            return self.gguf.weights(smallest_first=True)
        try:
            return stored_tensors(self.weights or weight_files(self.folder, spec))
        except LoadError:
            return None


def _find_files(
    source: Source, weights: Weights, cache: Path, progress: Callable[[str], None] | None, *, with_code: bool
) -> _Files:
    """Return the files of a model, each checked, and converted from a GGUF file if it is one."""
    if source.gguf is not None:
        conversion = cached_conversion(source.gguf, cache, sha256=source.sha256, progress=progress)
        return _Files(conversion.folder, {"gguf": conversion.sha256}, gguf=conversion)
    folder = source.folder
    assert folder is not None
    settings = check_files(folder, source.spec)
    config = folder / "config.json"
    if not config.is_file():
        raise LoadError(f"{source.spec!r} has no config.json in {str(folder)!r}: is it a model folder?")
    check_layers(read_json(config, name=f"config.json of {source.spec!r}", error=LoadError), source.spec)
    files = weight_files(folder, source.spec) if weights != "random" else []
    code = sorted(folder.rglob("*.py")) if with_code else []
    identity = {
        file.relative_to(folder).as_posix(): model_file_sha256(file, cache=cache / "digests")
        for file in [config, *files, *code]
    }
    return _Files(folder, identity, files, settings)


def _try(files: _Files, spec: str, cache: Path, progress: Callable[[str], None] | None) -> int | None:
    """Read config and tokenizer of a folder in another process, unless that was done before.

    Returns:
        Number of parameters; None if the model could not be built without weights, which loading then explains.
    """
    identity = {name: model_file_sha256(file) for name, file in files.settings.items()}
    versions = {name: package_version(name) for name in ("wherewhat", "transformers", "tokenizers")}
    record = cache / "trials" / f"{ascii_json_sha256([identity, versions])}.json"
    known = read_sealed(record)
    if known is None:
        prepare()
        import_module("transformers.modeling_utils")  # needed later, while the other process does the same
        seconds = time_limit(sum(file.stat().st_size for file in files.settings.values()))
        if progress is not None:
            progress(f"first load of {Path(spec).name}: reading it in another process, for at most {seconds} s")
        known = attempt(describe_folder, spec=spec, seconds=seconds, limit_memory=True, folder=str(files.folder))
        with suppress(StoreError):  # a cache that cannot be written only costs time
            make_folder(record.parent)
            write_sealed(record, known)
    parameters = known["parameters"]
    return parameters if isinstance(parameters, int) else None


def _trained(folder: Path, spec: str, config: Any, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        str(folder),
        config=config,
        use_safetensors=True,
        output_loading_info=True,
        # Refused below by name, instead of by a table on stderr.
        ignore_mismatched_sizes=True,
        **options,
    )
    check_loaded(report, spec)
    return model


def _load_tokenizer(folder: Path, spec: str, *, trust_remote_code: bool, local_only: bool) -> Any:
    """Return the tokenizer of a model folder, checked to produce tokens; one that reads no text if it has none."""
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):
        return NoTokenizer(
            f"{spec!r} has no tokenizer in {str(folder)!r}: add tokenizer.json beside the weights, or give token ids"
        )
    with as_one_line(LoadError, f"the tokenizer of {spec!r} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=local_only
        )
        works = bool(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    if not works:
        raise LoadError(f"the tokenizer of {spec!r} is empty: {PROBE!r} gives no tokens")
    return tokenizer
