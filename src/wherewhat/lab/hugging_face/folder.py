"""Save a laboratory model of bytes as a Hugging Face folder with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.files import atomic_folder, make_folder
from wherewhat.imports import quiet
from wherewhat.lab.hugging_face.families import to_gpt2, to_gptj, to_llama, to_mpt, to_neox
from wherewhat.lab.language import VOCABULARY
from wherewhat.lab.model import LabModel

_FAMILIES = {
    "rope": to_neox,
    "p-rope": to_neox,
    "partial": to_neox,
    "alibi": to_mpt,
    "learned": to_gpt2,
    "nope": to_gpt2,
}


def save_hugging_face(model: LabModel, folder: Path) -> None:
    """Save a model trained on text as a folder that ``wherewhat axes FOLDER`` and transformers can load.

    Args:
        model: The model, with the vocabulary of bytes.
        folder: The folder, which must not exist.
    """
    config = model.config
    if config.vocabulary != VOCABULARY:
        raise ConfigError(f"a vocabulary of {config.vocabulary} is not that of bytes: only models of text can be saved")
    export: Any = _FAMILIES.get(config.encoding)
    if config.block == "llama":
        export = to_llama
    elif config.biases == "all":
        export = to_gptj
    if export is None:
        raise ConfigError(f"no Hugging Face architecture has encoding={config.encoding!r}: choose another encoding")
    theirs = export(model)
    make_folder(folder.parent)
    with atomic_folder(folder) as temporary, quiet():
        theirs.save_pretrained(temporary)
        byte_tokenizer(config.positions).save_pretrained(temporary)


def byte_tokenizer(positions: int) -> Any:
    """Return a tokenizer whose ids are the bytes of the text in UTF-8.

    Args:
        positions: Largest number of tokens without a warning.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions)


def _letter(byte: int) -> str:
    """Return the character of a byte in byte-level vocabularies: its own if printable, another one if not."""
    unseen = [b for b in range(VOCABULARY) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(VOCABULARY + unseen.index(byte)) if byte in unseen else chr(byte)
