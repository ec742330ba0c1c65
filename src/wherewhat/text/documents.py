"""Texts as documents: embedded prose, strings, token ids, and text files, folders and .jsonl files."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from numbers import Integral
from pathlib import Path
from typing import Any, BinaryIO

from wherewhat.boundary import read_file, read_stream, shown, user_path
from wherewhat.errors import TextError
from wherewhat.files import check_depth
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


def documents_of(texts: Any) -> Any:
    """Return strings, documents or token ids as a tuple of documents with unique names; None unchanged.

    Args:
        texts: One of them or several: strings, documents, a column of a dataset, token ids as lists of integers or as
            tensors ``(n,)`` or ``(documents, n)``.
    """
    if texts is None:
        return None
    if isinstance(texts, Mapping):
        raise TextError("texts is a mapping, such as the output of a tokenizer: give its input_ids, or strings")
    single = isinstance(texts, str | Document) or _as_ids(texts) is not None
    if not single and not isinstance(texts, Iterable):
        raise TextError(f"texts is of type {type(texts).__name__}: give strings, documents or token ids")
    listed = [texts] if single else list(texts)
    if not listed:
        raise TextError("texts is empty: give at least one text")
    return tuple(with_unique_names(_document(text, number) for number, text in enumerate(listed, 1)))


def _document(text: Any, number: int) -> Document:
    if isinstance(text, Document):
        if not text.name.isprintable():
            raise TextError(
                f"the name {text.name!a} of document {number} has characters that cannot be printed: give another name"
            )
        return text
    if isinstance(text, str):
        if len(text) < _LONGEST_PATH and "\n" not in text and _is_file(text):
            raise TextError(f"text {number} is the name of a file: give it as files, or what read_documents returns")
        return Document(f"text-{number}", clean(text, where=f"text {number}"))
    ids = _as_ids(text)
    if ids is None:
        raise TextError(f"text {number} is of type {type(text).__name__}: give strings, documents or token ids")
    return Document(f"ids-{number}", "", ids=ids)


_LONGEST_PATH = 1024


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _as_ids(value: Any) -> tuple[int, ...] | None:
    """Return a list or one-dimensional tensor of integers as a tuple; None for anything else."""
    try:
        listed = value.tolist() if hasattr(value, "tolist") else value
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


STANDARD_INPUT = "standard input"
"""Source of documents read from ``-``."""

MAX_BYTES = 1 << 29
"""Largest size of a text."""

MAX_LINES = 5_000_000
"""Largest number of lines of a file of JSON lines."""

_JSON_LINES = (".jsonl", ".ndjson")
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


@checked()
def read_documents(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    *,
    stdin: BinaryIO | None = None,
    count: int | None = None,
    separator: str | None = None,
) -> list[Document]:
    """Read texts as documents with unique names.

    A source is a file, a folder (its ``*.txt`` files by name, without hidden ones) or ``-`` for standard input.
    ``.jsonl`` and ``.ndjson`` files contain one ``{"text": …}`` per line, optionally with ``name`` or ``id``; any other
    file and standard input are plain text. Texts are UTF-8; a byte order mark is removed, and CRLF and CR line ends
    become LF; nothing else is changed.

    Args:
        sources: One or several sources in order; None or an empty list for the embedded documents.
        stdin: Stream to read for ``-``; None for the standard input of the process.
        count: Number of documents to keep, from the first; None for all.
        separator: Line at which plain texts are split into documents; None for no splitting.

    Returns:
        At least one document.

    Raises:
        TextError: If a source cannot be read as text, or ``count`` or ``separator`` is invalid.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike)) else sources or []
    paths = [os.fspath(source) for source in listed]
    if not paths:
        if separator is not None:
            raise TextError(f"separator {shown(separator)} has no text to cut: give --text as well")
        return embedded_documents(count)
    if separator is not None and (not separator.strip() or "\n" in separator or "\r" in separator):
        raise TextError(f"separator {shown(separator)} is not a single line with content: give one")
    if sum(source == "-" for source in paths) > 1:
        raise TextError("standard input was given more than once: use '-' for one text only")
    documents: list[Document] = []
    was_cut = False
    for source in paths:
        for stem, origin, where, data in _contents(source, stdin):
            text = _decode(data, where=where)
            if origin.lower().endswith(_JSON_LINES):
                documents += _json_lines(text, stem=stem, source=origin, where=where)
                continue
            parts = [text] if separator is None else _split_at(text, separator)
            if not parts:
                raise TextError(f"{where} has nothing but separator lines: give a text with content")
            was_cut = was_cut or parts != [text]
            names = [stem] if len(parts) == 1 else [f"{stem}-{number}" for number in range(1, len(parts) + 1)]
            documents += [Document(name, part, origin) for name, part in zip(names, parts, strict=True)]
    if separator is not None and not was_cut:
        raise TextError(f"separator {shown(separator)} is no line of any text given: check it or leave it out")
    check_count(count, len(documents))
    return with_unique_names(documents)[:count]


def _contents(source: str, stdin: BinaryIO | None) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (name, source, name in error messages, bytes) of each file of a source."""
    if source == "-":
        yield "stdin", STANDARD_INPUT, STANDARD_INPUT, _read_standard_input(stdin)
        return
    for path in _files(source):
        where = f"text {shown(str(path))}"
        # File names that are not UTF-8 are lone surrogates in Python, which neither hashes nor tables accept.
        stem, origin = (name.encode("utf-8", "replace").decode("utf-8") for name in (path.stem, str(path)))
        yield clean_name(stem) or "text", origin, where, read_file(path, name=where, most=MAX_BYTES, error=TextError)


def _files(source: str) -> list[Path]:
    """Return the file of a source, or the text files of its folder."""
    where = f"text {shown(source)}"
    if not source.strip():
        raise TextError("the name of a text is empty: give a file, a folder or '-'")
    if "://" in source:
        raise TextError(f"{where} is a web address: download it and give the file")
    path = user_path(source, name="text", error=TextError)
    if not path.exists():
        raise TextError(f"{where} does not exist: {_nearest(path)}")
    if not path.is_dir():
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.suffix.lower() == ".txt" and entry.is_file()]
    if not files:
        raise TextError(f"{where} is a folder without .txt files: give a file or a folder with .txt files")
    return files


def _nearest(path: Path) -> str:
    """Return a suggestion in place of a path that does not exist."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f"nor can the folder {shown(str(path.parent))} be opened; check the path"
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {shown(str(path.with_name(close[0])))}?" if close else "check the path"


def _read_standard_input(stdin: BinaryIO | None) -> bytes:
    stream = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
    try:
        if stream is None or stream.isatty():
            raise TextError("'-' reads standard input, but nothing is piped in: use e.g. cat FILE | … --text -")
        return read_stream(stream, name=STANDARD_INPUT, most=MAX_BYTES, error=TextError)
    except (OSError, ValueError) as error:
        # A closed stream is a ValueError.
        raise TextError(f"{STANDARD_INPUT} cannot be read ({error}): pipe a text in or give a file") from None


def _decode(data: bytes, *, where: str) -> str:
    """Decode UTF-8, without a byte order mark and with every line end a line feed."""
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


def _not_utf8(data: bytes, error: UnicodeDecodeError, *, where: str) -> TextError:
    """Return an error that names the type of the file, or its first invalid byte."""
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


def _split_at(text: str, separator: str) -> list[str]:
    """Return the parts between separator lines that are not blank, or the text itself if it has no such line.

    White space around the separator is ignored. Each part ends in one line feed and begins with none.
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


def _json_lines(text: str, *, stem: str, source: str, where: str) -> list[Document]:
    """Return documents from lines of ``{"text": …, "name": …}``; documents without a name are numbered."""
    documents: list[Document] = []
    if text.count("\n") > MAX_LINES:
        raise TextError(f"{where} has more than {MAX_LINES:,} lines: cut out the part you need, e.g. with head -n 1000")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{where} line {number}"
        record = parse_json(line, place)
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


def parse_json(line: str, place: str) -> Any:
    """Return the value of a line of JSON; ``place`` names the line in error messages."""
    try:
        value = json.loads(line)
        check_depth(value)
    except json.JSONDecodeError as error:
        raise TextError(f"{place} is not JSON: {error.msg} at column {error.colno}; repair that line") from None
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, and deep nesting.
        raise TextError(f"{place} is not usable JSON ({type(error).__name__}): repair that line") from None
    return value


def clean_name(name: str) -> str:
    """Return a name of printable characters on one line."""
    printable = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(printable.split())
