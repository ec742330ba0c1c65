"""Items of a multiple-choice task of lm-evaluation-harness, as it would put them to a model itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wherewhat.errors import TextError, one_line
from wherewhat.evaluate.optional import lm_eval
from wherewhat.evaluate.parsing import Parsed, checked
from wherewhat.text.decoding import shown


def harness_items(task: str, *, count: int) -> Iterator[Parsed]:
    """The first items of a task: contexts, examples in front included, and alternatives.

    Args:
        task: Name of a task, or a ``.yaml`` file of one, whose name must be the task's.
        count: How many, at most.

    Raises:
        ConfigError: If lm-evaluation-harness is not installed.
        TextError: If it has no such task, cannot load it, or the task is not multiple choice.
    """
    found = _task(task)
    if getattr(found, "OUTPUT_TYPE", None) != "multiple_choice":
        raise TextError(f"the task {shown(task)} is {getattr(found, 'OUTPUT_TYPE', 'a group')}, not multiple_choice")
    found.build_all_requests(limit=count)
    for number, group in itertools.groupby(found.instances, key=lambda instance: instance.doc_id):
        requests = list(group)
        place = f"the task {shown(task)} document {number}"
        # Some metrics ask for the alternatives once more, without the question.
        pairs = [instance.args for instance in requests if instance.args[0]]
        if len({context for context, _ in pairs}) != 1:
            raise TextError(f"{place} has alternatives with different contexts, which cannot be measured here")
        yield checked(place, pairs[0][0], [continuation for _, continuation in pairs], _gold(found, requests[0].doc))


def _task(name: str) -> Any:
    manager = lm_eval("tasks").TaskManager
    try:
        if name.endswith((".yaml", ".yml")):
            path = Path(name).resolve()
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
