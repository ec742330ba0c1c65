"""Items from JSON lines: one item a line, or one request (context and one continuation) a line, as OLMo's tasks are."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wherewhat.errors import TextError
from wherewhat.text.decoding import clean

_WITHOUT_QUESTION = 1_000_000
"""Requests from this number of document on repeat those before without the question, for another way of scoring."""

_LONGEST_LINE = 1 << 26


@dataclass(frozen=True)
class Parsed:
    """What a line or a group of lines says: context, alternatives, and which is right."""

    context: str
    continuations: tuple[str, ...]
    gold: int


def parse_lines(path: Path, *, where: str) -> Iterator[Parsed]:
    """Items of a file, in order, as they are read; ``.gz`` is unpacked.

    Raises:
        TextError: If the file cannot be read, or a line is wrong, with its number.
    """
    group: list[tuple[str, dict[str, Any]]] = []
    for place, record in _records(path, where):
        if "request" not in record:
            yield _item(place, record)
            continue
        number = record.get("doc_id")
        if isinstance(number, int) and number >= _WITHOUT_QUESTION:
            continue
        if group and group[0][1].get("doc_id") != number:
            yield _grouped(group)
            group = []
        group.append((place, record))
    if group:
        yield _grouped(group)


def _records(path: Path, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of the lines that are not blank, with the words for where each stands."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            number = 0
            while data := stream.readline(_LONGEST_LINE):
                number += 1
                if data.strip():
                    yield (place := f"{where} line {number}"), _record(data, place)
    except FileNotFoundError:
        raise TextError(f"{where} does not exist: check the path") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise TextError(f"{where} cannot be read ({reason}): give a file of JSON lines, plain or gzipped") from None


def _record(data: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise TextError(f"{place} is not UTF-8: convert the file") from None
    except json.JSONDecodeError as error:
        raise TextError(f"{place} is not JSON: {error.msg} at column {error.colno}; repair that line") from None
    except (ValueError, RecursionError) as error:
        raise TextError(f"{place} is not usable JSON ({type(error).__name__}): repair that line") from None
    if not isinstance(record, dict):
        raise TextError(f'{place} is not an object: give {{"context": "…", "choices": ["…", "…"], "gold": 0}}')
    return record


def _item(place: str, record: dict[str, Any]) -> Parsed:
    """``{"context" or "query", "choices" or "continuations", "gold"}``; choices get a space in front."""
    context = record.get("context", record.get("query"))
    if not isinstance(context, str):
        _wrong(place, 'has no text "context" (or "query")')
    exact = "continuations" in record
    listed = record.get("continuations" if exact else "choices")
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        _wrong(place, 'has no list of texts "choices" (or "continuations")')
    return checked(place, context, [text if exact else f" {text}" for text in listed], record.get("gold"))


def _grouped(group: list[tuple[str, dict[str, Any]]]) -> Parsed:
    """Requests of one document: one context, one continuation each, in the order of the lines."""
    contexts: list[str] = []
    continuations: list[str] = []
    for place, record in group:
        request = record["request"]
        for name, texts in (("context", contexts), ("continuation", continuations)):
            text = request.get(name) if isinstance(request, dict) else None
            if not isinstance(text, str):
                _wrong(place, f'has a "request" without a text "{name}"')
            texts.append(text)
    place, record = group[0]
    if len(set(contexts)) > 1:
        _wrong(place, "begins an item whose alternatives have different contexts, which cannot be measured here")
    return checked(place, contexts[0], continuations, record.get("label"))


def checked(place: str, context: str, continuations: list[str], gold: object) -> Parsed:
    """An item, if its parts fit together.

    Raises:
        TextError: If they do not, with the place they come from.
    """
    if len(continuations) < 2:
        _wrong(place, f"has {len(continuations)} alternatives where 2 or more are needed to choose from")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(continuations):
        _wrong(place, f"names {gold!r} as the right one of {len(continuations)} alternatives, counted from 0")
    for number, text in enumerate(continuations, start=1):
        clean(text, where=f"alternative {number} of {place}")
    return Parsed(clean(context, where=f"the context of {place}"), tuple(continuations), gold)


def _wrong(place: str, what: str) -> NoReturn:
    raise TextError(f"{place} {what}: repair that line, or leave the item out")
