"""Named documents, and the English prose that ships with the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.resources import files

from wherewhat.errors import TextError
from wherewhat.options import checked


@checked()
@dataclass(frozen=True)
class Document:
    """One text to run a model on.

    Attributes:
        name: Label in results; unique within a list of documents.
        text: The content, without carriage returns and NUL, never blank.
        source: ``"embedded"``, the path of a file, or ``"standard input"``.
    """

    name: str
    text: str
    source: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the text in UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


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
