"""Named documents, made from strings or token ids, and the English prose that ships with the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from numbers import Integral
from pathlib import Path
from typing import Any

from wherewhat.errors import TextError
from wherewhat.options import checked


@checked()
@dataclass(frozen=True)
class Document:
    """One text to run a model on.

    Attributes:
        name: Label in results; unique within a list of documents.
        text: The content, without carriage returns and NUL, never blank; empty for token ids.
        source: ``"embedded"``, the path of a file, ``"standard input"`` or ``"memory"``.
        ids: Token ids in place of a text, with BOS if the model expects it.
    """

    name: str
    text: str
    source: str = "memory"
    ids: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        size = f"{len(self.text):,} characters" if self.ids is None else f"{len(self.ids):,} token ids"
        return f"Document({self.name!r}, {size}, source={self.source!r})"

    @property
    def sha256(self) -> str:
        """SHA-256 of the text in UTF-8, or of the token ids as decimal numbers, in hexadecimal."""
        content = self.text if self.ids is None else " ".join(map(str, self.ids))
        return hashlib.sha256(content.encode("utf-8")).hexdigest()


def clean(text: str, *, where: str) -> str:
    """Return the text with every line end a line feed; refuse blank texts, NUL and lone surrogates.

    ``where`` names the text in error messages.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    at = text.find("\0")
    if at >= 0:
        line = text.count("\n", 0, at) + 1
        raise TextError(f"{where} is binary, not text: NUL in line {line}; give UTF-8 text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise TextError(f"{where} has half of a surrogate pair in line {line}: repair that character") from None
    if not text.strip():
        raise TextError(f"{where} has only white space: give a text with content")
    return text


def documents_of(given: Any) -> Any:
    """Return strings, documents or token ids as a tuple of documents with unique names; None unchanged.

    Args:
        given: One of them or several: strings, documents, a column of a dataset, token ids as lists of integers or as
            tensors ``(n,)`` or ``(documents, n)``.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        raise TextError("texts is a mapping, such as the output of a tokenizer: give its input_ids, or strings")
    single = isinstance(given, str | Document) or _as_ids(given) is not None
    if not single and not isinstance(given, Iterable):
        raise TextError(f"texts is of type {type(given).__name__}: give strings, documents or token ids")
    listed = [given] if single else list(given)
    if not listed:
        raise TextError("texts is empty: give at least one text")
    return tuple(with_unique_names(_document(one, number) for number, one in enumerate(listed, 1)))


def _document(given: Any, number: int) -> Document:
    if isinstance(given, Document):
        if not given.name.isprintable():
            raise TextError(
                f"the name {given.name!a} of document {number} has characters that cannot be printed: give another name"
            )
        return given
    if isinstance(given, str):
        if len(given) < _LONGEST_PATH and "\n" not in given and _is_file(given):
            raise TextError(f"text {number} is the name of a file: give it as text, or what read_documents returns")
        return Document(f"text-{number}", clean(given, where=f"text {number}"))
    ids = _as_ids(given)
    if ids is None:
        raise TextError(f"text {number} is of type {type(given).__name__}: give strings, documents or token ids")
    return Document(f"ids-{number}", "", ids=ids)


_LONGEST_PATH = 1024


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _as_ids(given: Any) -> tuple[int, ...] | None:
    """Return a list or one-dimensional tensor of integers as a tuple; None for anything else."""
    try:
        listed = given.tolist() if hasattr(given, "tolist") else given
    except (NotImplementedError, RuntimeError, TypeError):  # on the meta device, or sparse
        return None
    if not isinstance(listed, list | tuple) or not listed:
        return None
    return tuple(map(int, listed)) if all(isinstance(x, Integral) and not isinstance(x, bool) for x in listed) else None


def text_hash(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of the documents' names and texts, in order and without their sources, in hexadecimal."""
    total = hashlib.sha256()
    for document in documents:
        name = document.name.encode("utf-8")
        # The length distinguishes ("ab", "c…") from ("a", "bc…"); the text enters as a digest of fixed size.
        total.update(len(name).to_bytes(8, "big") + name + bytes.fromhex(document.sha256))
    return total.hexdigest()


def check_count(count: int | None, available: int) -> None:
    """Refuse a number of documents below 1 or above the number available."""
    if count is not None and count < 1:
        raise TextError(f"{count} documents were asked for: ask for 1 or more")
    if count is not None and count > available:
        are = "is only 1" if available == 1 else f"are only {available}"
        raise TextError(f"{count} documents were asked for, there {are}: ask for fewer or give more texts")


def with_unique_names(documents: Iterable[Document]) -> list[Document]:
    """Return the documents with repeated names numbered as ``name``, ``name-2``, ``name-3``."""
    listed = list(documents)
    reserved = {document.name for document in listed}
    used: set[str] = set()
    result = []
    for document in listed:
        name, number = document.name, 1
        # A numbered name must also differ from names later in the list.
        while name in used or (number > 1 and name in reserved):
            number += 1
            name = f"{document.name}-{number}"
        used.add(name)
        result.append(replace(document, name=name))
    return result


@checked()
def embedded_documents(count: int | None = None) -> list[Document]:
    """Return the documents that ship with the package, in the order of their manifest.

    Args:
        count: Number of documents, from the first; None for all.

    Returns:
        The documents, each checked against the SHA-256 in the manifest.

    Raises:
        TextError: If ``count`` is out of range or a file of the installation is missing or altered.
    """
    folder = files("wherewhat.text") / "data"
    try:
        entries = json.loads((folder / "documents.json").read_bytes())["documents"]
        check_count(count, len(entries))
        documents = []
        for entry in entries[:count]:
            data = (folder / entry["file"]).read_bytes()
            if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                raise TextError(f"the embedded text {entry['file']} was altered: install the package again")
            documents.append(Document(name=entry["name"], text=data.decode("utf-8"), source="embedded"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        name = type(error).__name__
        raise TextError(f"the embedded text cannot be read ({name}): install the package again") from error
    return documents
