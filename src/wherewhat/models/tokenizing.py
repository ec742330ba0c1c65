"""A model's tokenizer, and the tokens it puts in front of a text."""

from pathlib import Path
from typing import Any

from wherewhat.errors import LoadError, one_line

_PROBE = "a"


def load_tokenizer(folder: Path, spec: str, *, trust_remote_code: bool, local_only: bool) -> Any:
    """The tokenizer of a model folder, checked to produce tokens.

    Raises:
        LoadError: There is none, or it cannot be read.
    """
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
