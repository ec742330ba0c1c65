"""What a GGUF file says that transformers' reader does not pass on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import LoadError
from wherewhat.models.optional import require

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
    """Read a GGUF file's header, and check that every tensor it lists is inside the file.

    Raises:
        LoadError: The file is not GGUF, is damaged, is one part of several, or gguf is not installed.
    """
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
