"""One file that holds several documents: separator lines, or JSON lines."""

import json

from wherewhat.errors import TextError
from wherewhat.text.decoding import clean, shown
from wherewhat.text.document import Document


def check_separator(separator: str) -> None:
    """Refuse a separator that no line can equal.

    Raises:
        TextError: If the separator is blank or longer than a line.
    """
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

    Raises:
        TextError: If a line is not such an object, with its number.
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
