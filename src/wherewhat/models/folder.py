"""Model folders in Hugging Face layout, and folders of PEFT adapters."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Any

from wherewhat.boundary import LONGEST_NAME, check_file, parse_json, read_json, shown
from wherewhat.errors import ConfigError, LoadError
from wherewhat.hashes import ascii_json_sha256, model_file_sha256
from wherewhat.imports import require

ADAPTER_CONFIG = "adapter_config.json"
"""Configuration file of an adapter."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""Weights file of an adapter."""

_MODEL_WEIGHTS, _MODEL_INDEX = "model.safetensors", "model.safetensors.index.json"
_MERGED = ("LORA", "LOHA", "LOKR", "IA3")
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT")
# Settings that locate the base model are not part of an adapter's identity.
_BASE = ("base_model_name_or_path", "revision")
_MOST_BYTES = 1 << 30  # of a file of settings or of a tokenizer
_MOST_HEADER = 100_000_000  # of a safetensors file, in bytes; the limit of its library
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_METADATA = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".codes", ".py")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "vocab.bpe", "bpe.codes", "spiece.model",
    "sentencepiece*.model", "*.spm", "*.tiktoken", "tekken.json", "tokenization_*.py",
)  # fmt: skip


def check_files(folder: Path, spec: str) -> dict[str, Path]:
    """Return the files of settings and of the tokenizer in a folder by name; refuse pipes, devices and large ones.

    Libraries read any file with a name that they know, and would wait for ever for a pipe without a writer.
    """
    found: dict[str, Path] = {}
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise LoadError(f"the folder of {spec!r} cannot be read: {error.strerror or error}") from None
    for entry in entries:
        try:
            mode = entry.stat().st_mode
        except OSError:  # a link to nothing, which is an error only if the file is needed
            continue
        if stat.S_ISDIR(mode):
            continue
        weights = entry.suffix == ".safetensors" or any(entry.match(pattern) for pattern in _PICKLES)
        check_file(
            entry, name=f"{shown(entry.name)} of {spec!r}", most=1 << 62 if weights else _MOST_BYTES, error=LoadError
        )
        if entry.suffix in _METADATA:
            if not os.access(entry, os.R_OK):
                raise LoadError(f"{shown(entry.name)} of {spec!r} cannot be read: permission denied")
            found[entry.name] = entry
    return found


def weight_files(folder: Path, spec: str) -> list[Path]:
    """Return the safetensors files of a model folder, each checked for completeness."""
    index, single = folder / _MODEL_INDEX, folder / _MODEL_WEIGHTS
    # transformers prefers the single file where both exist.
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = _shards(index, spec)
    else:
        raise _without_weights(folder, spec)
    for file in files:
        _check_complete(file)
    return files


def _shards(index: Path, spec: str) -> list[Path]:
    content = read_json(index, name=f"the weight index {shown(index)}", most=_MOST_HEADER, error=LoadError)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise LoadError(f"the weight index {shown(index)} is corrupted: get it again")
    names = sorted(set(listed.values()))
    for name in names:
        if (
            Path(name).name != name
            or not name.isprintable()
            or not name.endswith(".safetensors")
            or len(name) > LONGEST_NAME
        ):
            raise LoadError(
                f"the weight index {shown(index)} names {shown(name)}: only .safetensors files of the same folder work"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise LoadError(
            f"{spec!r} misses {len(missing)} of {len(names)} weight files, first {missing[0]}: get them again"
        )
    return [index.parent / name for name in names]


def _without_weights(folder: Path, spec: str) -> LoadError:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        return LoadError(
            f"{spec!r} has only pickled weights ({pickles[0]}), which can run code when read: "
            f"convert them to model.safetensors first"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return LoadError(f"{spec!r} is a folder of GGUF files: give the file itself, e.g. {str(ggufs[0])!r}")
    return LoadError(f"{spec!r} has no weights in {str(folder)!r}: model.safetensors is missing")


def _check_complete(file: Path) -> None:
    """Compare a safetensors header with the file's size, without reading the tensors.

    Layout: length of the header in 8 bytes, the header as JSON, then all tensors without gaps.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError("its header is cut short, or too long")
            header = parse_json(stream.read(length), name="its header")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if expected != size:
            raise ValueError(f"{size} bytes instead of {expected}")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, ConfigError) as error:
        reason = (str(error).splitlines() or [""])[0][:100]
        raise LoadError(f"weights file {str(file)!r} is truncated or corrupted ({reason}): get it again") from None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has tokenizer files; without them transformers may build an empty tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


def is_adapter(folder: Path, spec: str) -> bool:
    """Return whether a folder contains an adapter."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    if any((folder / name).is_file() for name in (_MODEL_WEIGHTS, _MODEL_INDEX)):
        raise LoadError(
            f"{spec!r} holds both a model and an adapter ({ADAPTER_CONFIG}): put the adapter into its own folder"
        )
    return True


def adapter_base(folder: Path, spec: str) -> tuple[str, str | None]:
    """Return the name and revision of an adapter's base model."""
    raw = _read(folder, spec)
    kind = raw.get("peft_type")
    if kind in _PROMPTS:
        raise LoadError(
            f"{spec!r} is a {kind} adapter, which adds virtual tokens or keys without a position in the text: only "
            f"adapters of weights can be loaded ({', '.join(_MERGED)})"
        )
    if kind not in _MERGED:
        raise LoadError(f"{spec!r} is an adapter of type {kind!r}: only {', '.join(_MERGED)} can be loaded")
    base, revision = (raw.get(name) for name in _BASE)
    if not isinstance(base, str) or not base:
        raise LoadError(
            f"{ADAPTER_CONFIG} of {spec!r} names no base model: write its id or path into base_model_name_or_path"
        )
    return base, revision if isinstance(revision, str) else None


def adapter_identity(folder: Path, spec: str, *, cache: Path) -> dict[str, str]:
    """Return hashes of an adapter's weights and of its configuration without the location of the base model."""
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = "only pickled weights (adapter_model.bin), which can run code when read" if pickled else "no weights"
        raise LoadError(f"the adapter {spec!r} has {why}: {ADAPTER_WEIGHTS} is missing")
    _check_complete(weights)
    config = {name: value for name, value in _read(folder, spec).items() if name not in _BASE}
    return {ADAPTER_CONFIG: ascii_json_sha256(config), ADAPTER_WEIGHTS: model_file_sha256(weights, cache=cache)}


def apply_adapter(model: Any, folder: Path, spec: str) -> Any:
    """Return the model with an adapter merged into its weights, or beside them if they are quantised.

    Merging would round quantised weights.
    """
    peft = require("peft", why="an adapter folder", install="'wherewhat[peft]'")
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    # Without memory until the stored weights are assigned, so that a rank in the config allocates nothing.
    adapted = peft.PeftModel(model, config, low_cpu_mem_usage=True)
    report = adapted.load_adapter(str(folder), "default", torch_device="cpu", low_cpu_mem_usage=True)
    for names, verb in ((report.missing_keys, "has no weights for"), (report.unexpected_keys, "has weights for")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LoadError(f"the adapter {spec!r} {verb} {names[0]}{more}: it does not fit its base model")
    if getattr(model, "hf_quantizer", None) is not None:
        return adapted.get_base_model()
    return adapted.merge_and_unload()


def _read(folder: Path, spec: str) -> dict[str, Any]:
    raw = read_json(folder / ADAPTER_CONFIG, name=f"{ADAPTER_CONFIG} of {spec!r}", error=LoadError)
    if not isinstance(raw, dict):
        raise LoadError(f"{ADAPTER_CONFIG} of {spec!r} is no table of settings: get it again")
    return raw
