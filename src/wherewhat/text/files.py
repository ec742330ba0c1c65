"""Read documents from files, folders, JSON lines and standard input."""

from __future__ import annotations

import codecs
import difflib
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from wherewhat.errors import TextError
from wherewhat.options import checked
from wherewhat.text.documents import Document, embedded_documents, first_documents, with_unique_names

# UTF-32 little-endian starts with the UTF-16 mark, so the longer marks come first.
_FOREIGN_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_BINARY_MARKS = (
    (b"GGUF", "a GGUF model"),
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "a zip archive or office document"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data"),
    (b"PAR1", "a Parquet file"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x7fELF", "a program"),
)


def shown(value: str) -> str:
    """A path or other given string in quotes, safe for one line on any terminal."""
    return "'" + "".join(char if char.isprintable() else "?" for char in value) + "'"


def decode(data: bytes, *, where: str) -> str:
    """Decode UTF-8; drop a byte order mark; make every line end a line feed.

    Args:
        data: The bytes of a whole file or stream.
        where: How to call it in an error message.

    Returns:
        The text, which is not blank and holds neither NUL nor carriage return.
    """
    if not data:
        raise TextError(f"{where} is empty: give a text with content")
    for mark, encoding in _FOREIGN_MARKS:
        if data.startswith(mark):
            raise TextError(f"{where} is {encoding}, not UTF-8: convert it, e.g. with iconv -f {encoding} -t UTF-8")
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error, where=where) from None
    if "\0" in text:
        raise _binary(data, where=where)
    return clean(text, where=where)


def clean(text: str, *, where: str) -> str:
    """Make every line end a line feed; refuse what no tokenizer should see."""
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


def _not_utf8(data: bytes, error: UnicodeDecodeError, *, where: str) -> TextError:
    """Explain the first invalid byte, or better, what kind of file this is."""
    if b"\0" in data or data.startswith(tuple(mark for mark, _ in _BINARY_MARKS)):
        return _binary(data, where=where)
    at = error.start
    # Line ends are counted in their three forms, as an editor would.
    before = data[:at].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    place = f"byte {at} (0x{data[at]:02x}), line {before.count(10) + 1}"
    if error.end == len(data) and error.reason == "unexpected end of data":
        return TextError(f"{where} ends inside a UTF-8 character at {place}: the text was cut off; give all of it")
    return TextError(
        f"{where} is not UTF-8 at {place}: if it is Latin-1 or Windows-1252, "
        "convert it with iconv -f WINDOWS-1252 -t UTF-8"
    )


def _binary(data: bytes, *, where: str) -> TextError:
    for mark, kind in _BINARY_MARKS:
        if data.startswith(mark):
            return TextError(f"{where} is {kind}, not text: give plain UTF-8 text")
    return TextError(f"{where} is binary, not text: NUL at byte {data.index(0)}; give plain UTF-8 text")


def check_separator(separator: str) -> None:
    """Refuse a separator that no line can equal."""
    if not separator.strip() or "\n" in separator or "\r" in separator:
        raise TextError(f"separator {shown(separator)} cannot be a line of its own: give one line with content")


def split_lines(text: str, separator: str) -> list[str]:
    """The parts between separator lines; blank parts are dropped, and no such line leaves the text as it is.

    White space around the separator does not matter. Each part ends in one line feed and starts with none.
    """
    wanted = separator.strip()
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip() == wanted:
            parts.append([])
        else:
            parts[-1].append(line)
    if len(parts) == 1:
        return [text]
    joined = ("\n".join(lines).strip("\n") for lines in parts)
    return [part + "\n" for part in joined if part.strip()]


def json_lines(text: str, *, stem: str, source: str, where: str) -> list[Document]:
    """Documents from lines of ``{"text": …, "name": …}``; blank lines are skipped.

    ``id`` stands in for ``name``; other keys are ignored.

    Args:
        text: Content of the file.
        stem: Base of the names of documents without one: ``stem-1``, ``stem-2``, …
        source: Recorded in the documents.
        where: How to call the file in an error message.

    Returns:
        The documents in the order of the lines, names as given.
    """
    documents: list[Document] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{where} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TextError(f"{place} is not JSON: {error.msg} at column {error.colno}; repair that line") from None
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits, and nesting beyond the interpreter's stack.
            raise TextError(f"{place} is not usable JSON ({type(error).__name__}): repair that line") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise TextError(f'{place} is not an object with a string "text": give {{"text": "…"}} on each line')
        content = clean(record["text"], where=f'the "text" of {place}')
        name = _given_name(record) or f"{stem}-{len(documents) + 1}"
        documents.append(Document(name=name, text=content, source=source))
    return documents


def _given_name(record: dict[str, object]) -> str:
    for key in ("name", "id"):
        value = record.get(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            name = clean_name(str(value))
            if name:
                return name
    return ""


def clean_name(name: str) -> str:
    """A name of printable characters on one line, which tables and files can hold."""
    printable = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(printable.split())


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
