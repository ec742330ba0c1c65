"""From what the user names (files, folders, standard input) to documents."""

import difflib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from wherewhat.checking import checked
from wherewhat.errors import TextError
from wherewhat.text.decoding import decode, shown
from wherewhat.text.document import Document, first_documents, with_unique_names
from wherewhat.text.embedded import embedded_documents
from wherewhat.text.splitting import check_separator, clean_name, json_lines, split_lines

STANDARD_INPUT = "standard input"
MAX_BYTES = 1 << 30
_JSON_LINES = (".jsonl", ".ndjson")


@checked()
def read_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    *,
    stdin: BinaryIO | None = None,
    count: int | None = None,
    separator: str | None = None,
) -> list[Document]:
    """Read texts as documents with unique names.

    A source is a file, a folder (its ``*.txt`` files by name, hidden ones left out) or ``-`` for standard
    input. ``.jsonl`` and ``.ndjson`` files hold one ``{"text": …}`` per line, optionally with ``name`` or
    ``id``; any other file and standard input are plain text. Texts are UTF-8; a byte order mark is dropped
    and CRLF and CR line ends become LF; nothing else is changed.

    Args:
        sources: What to read, one or several in order; the embedded default when None or empty.
        stdin: The stream behind ``-``; the process's own when None.
        count: How many documents to keep, from the first on; all when None.
        separator: Plain texts are cut at lines that equal this; not cut when None.

    Returns:
        At least one document.

    Raises:
        TextError: If a source cannot be read as text, or ``count`` or ``separator`` do not fit.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike)) else sources or []
    given = [os.fspath(source) for source in listed]
    if not given:
        if separator is not None:
            raise TextError(f"separator {shown(separator)} has no text to cut: give --text as well")
        return embedded_documents(count)
    if separator is not None:
        check_separator(separator)
    if sum(source == "-" for source in given) > 1:
        raise TextError("standard input was given more than once: use '-' for one text only")
    documents: list[Document] = []
    was_cut = False
    for source in given:
        for stem, origin, where, data in _contents(source, stdin):
            text = decode(data, where=where)
            if origin.lower().endswith(_JSON_LINES):
                documents += json_lines(text, stem=stem, source=origin, where=where)
                continue
            parts = [text] if separator is None else split_lines(text, separator)
            if not parts:
                raise TextError(f"{where} has nothing but separator lines: give a text with content")
            was_cut = was_cut or parts != [text]
            names = [stem] if len(parts) == 1 else [f"{stem}-{number}" for number in range(1, len(parts) + 1)]
            documents += [Document(name, part, origin) for name, part in zip(names, parts, strict=True)]
    if separator is not None and not was_cut:
        raise TextError(f"separator {shown(separator)} is no line of any text given: check it or leave it out")
    return first_documents(with_unique_names(documents), count)


def _contents(source: str, stdin: BinaryIO | None) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (name, source, name in messages, bytes) for each file behind one source."""
    if source == "-":
        yield "stdin", STANDARD_INPUT, STANDARD_INPUT, _read_standard_input(stdin)
        return
    for path in _files(source):
        where = f"text {shown(str(path))}"
        yield (
            clean_name(_encodable(path.stem)) or "text",
            _encodable(str(path)),
            where,
            _read_file(path, where),
        )


def _encodable(name: str) -> str:
    # File names that are not UTF-8 reach Python as lone surrogates, which neither hashes nor tables accept.
    return name.encode("utf-8", "replace").decode("utf-8")


def _files(source: str) -> list[Path]:
    """The file that a source names, or the text files of the folder that it names."""
    where = f"text {shown(source)}"
    if not source.strip():
        raise TextError("the name of a text is empty: give a file, a folder or '-'")
    if "://" in source:
        raise TextError(f"{where} is a web address: download it and give the file")
    path = Path(source)
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            return [path]
        entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
        found = [entry for entry in entries if entry.suffix.lower() == ".txt" and entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        raise TextError(f"{where} does not exist: {_nearest(path)}") from None
    except (OSError, ValueError) as error:
        raise _unreadable(where, error) from None
    if not found:
        raise TextError(f"{where} is a folder without .txt files: give a file or a folder with .txt files")
    return found


def _nearest(path: Path) -> str:
    """What to try instead of a path that does not exist."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"nor can the folder {shown(str(path.parent))} be opened; check the path"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {shown(str(path.with_name(close[0])))}?" if close else "check the path"


def _unreadable(where: str, error: OSError | ValueError) -> TextError:
    if isinstance(error, PermissionError):
        return TextError(f"{where} may not be read: ask for read permission (chmod u+r) or copy it")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a valid path"
    return TextError(f"{where} cannot be read ({reason}): give another file")


def _read_file(path: Path, where: str) -> bytes:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
                raise _too_large(where)
            return _read_limited(stream, where)
    except OSError as error:
        raise _unreadable(where, error) from None


def _read_standard_input(stdin: BinaryIO | None) -> bytes:
    stream = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
    try:
        if stream is None or stream.isatty():
            raise TextError("'-' reads standard input, but nothing is piped in: use e.g. cat FILE | … --text -")
        return _read_limited(stream, STANDARD_INPUT)
    except (OSError, ValueError) as error:
        # A closed stream is a ValueError.
        raise TextError(f"{STANDARD_INPUT} cannot be read ({error}): pipe a text in or give a file") from None


def _read_limited(stream: BinaryIO, where: str) -> bytes:
    """All bytes of a stream; a pipe has no size to look at first, so the limit is kept while reading."""
    chunks, total = [], 0
    while chunk := stream.read(1 << 20):
        total += len(chunk)
        if total > MAX_BYTES:
            raise _too_large(where)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(where: str) -> TextError:
    size = f"{MAX_BYTES / 2**30:g} GiB" if MAX_BYTES >= 2**20 else f"{MAX_BYTES} bytes"
    return TextError(f"{where} is larger than {size}: cut out the part you need, e.g. with head -c 10M")
