"""From bytes to text, or to one line that says which byte is wrong and what to do."""

import codecs

from wherewhat.errors import TextError

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

    Raises:
        TextError: If the bytes are another encoding, binary, or blank.
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
    """Make every line end a line feed; refuse what no tokenizer should see.

    Raises:
        TextError: If the text is blank, holds NUL, or holds half of a surrogate pair.
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
