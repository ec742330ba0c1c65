"""The texts of a report; standard input is kept in a file, because every measurement reads its text again."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from wherewhat.report.plan import DOCUMENTS
from wherewhat.store.atomic import make_folder, write_file
from wherewhat.text import Document, read_documents

_STANDARD_INPUT = "-"


@dataclass(frozen=True)
class GivenText:
    """What a report is measured on.

    Attributes:
        sources: Files and folders to read it from; None for the embedded text.
        documents: The documents.
        kept: The file that stands for standard input and the bytes that belong into it; None if it was not given.
    """

    sources: tuple[str, ...] | None
    documents: list[Document]
    kept: tuple[Path, bytes] | None = None

    def keep(self) -> None:
        """Write what came from standard input to its file, so that it can be read again.

        Raises:
            StoreError: If it cannot be written.
        """
        if self.kept is None:
            return
        path, data = self.kept
        if not path.is_file() or path.read_bytes() != data:
            make_folder(path.parent)
            write_file(path, data)


class _Heard:
    """A stream that remembers what was read from it; how much that may be is for the reader to say."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = bytearray()

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(size)
        self.data += found
        return found

    def isatty(self) -> bool:
        return self._stream.isatty()


def given_text(text: Sequence[str] | None, *, documents: int | None, out: Path) -> GivenText:
    """Read the texts that a report is asked for.

    Args:
        text: Files, folders or ``-``; None for the embedded text.
        documents: How many documents to use; the first four by default.
        out: Folder that holds run directories, and standard input if that is given.

    Raises:
        TextError: If the text cannot be read or there is too little of it.
    """
    sources = tuple(text) if text else None
    if sources is None:
        return GivenText(None, read_documents(None, count=documents or DOCUMENTS))
    piped = getattr(sys.stdin, "buffer", None) if _STANDARD_INPUT in sources else None
    heard = None if piped is None else _Heard(piped)
    found = read_documents(sources, stdin=cast("BinaryIO | None", heard), count=documents)
    if documents is None:
        found = found[:DOCUMENTS]
    if heard is None:
        return GivenText(sources, found)
    data = bytes(heard.data)
    # The name of the file is that of the document, so that the runs are those of `--text -` anywhere else.
    path = out / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}" / "stdin.txt"
    return GivenText(tuple(str(path) if s == _STANDARD_INPUT else s for s in sources), found, (path, data))
