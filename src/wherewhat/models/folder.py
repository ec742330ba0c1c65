"""A model folder in Hugging Face layout: which files it must have, and that none is cut short."""

import json
import struct
from pathlib import Path

from wherewhat.errors import LoadError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "vocab.bpe", "bpe.codes", "spiece.model",
    "sentencepiece*.model", "*.spm", "*.tiktoken", "tekken.json", "tokenization_*.py",
)  # fmt: skip


def holds_weights(folder: Path) -> bool:
    """Whether a folder has the weights of a whole model."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def weight_files(folder: Path, spec: str) -> list[Path]:
    """The safetensors files of a model folder, each checked to be whole.

    Raises:
        LoadError: There are none, some are missing, or one is truncated or corrupted.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    # transformers prefers the single file where both exist.
    if single.is_file():
        files = [single]
    elif index.is_file():
        files = _shards(index, spec)
    else:
        raise _without_weights(folder, spec)
    for file in files:
        check_whole(file)
    return files


def check_tokenizer_files(folder: Path, spec: str) -> None:
    """Refuse a folder without tokenizer files, for which transformers may build an empty tokenizer.

    Raises:
        LoadError: There is no tokenizer file of any known kind.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise LoadError(f"{spec!r} has no tokenizer in {str(folder)!r}: add tokenizer.json beside the weights")


def _shards(index: Path, spec: str) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise LoadError(f"the weight index {str(index)!r} is corrupted: get it again") from None
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


def check_whole(file: Path) -> None:
    """Compare a safetensors header with the file's size; the data itself is not read.

    Layout: 8 bytes length of the header, the header as JSON, then all tensors without gaps.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is cut short")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if expected != size:
            raise ValueError(f"{size} bytes instead of {expected}")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error) as error:
        reason = (str(error).splitlines() or [""])[0][:100]
        raise LoadError(f"weights file {str(file)!r} is truncated or corrupted ({reason}): get it again") from None
