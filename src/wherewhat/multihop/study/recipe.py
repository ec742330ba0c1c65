"""A whole study as a file: tasks, seeds, options and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.multihop.dynamics import LENGTHS
from wherewhat.multihop.recipe_file import read_recipe_file
from wherewhat.multihop.study.setup import Setup

_KNOWN = ("tasks", "seeds", "lengths", "length_count", "options", "task_options")


@dataclass(frozen=True)
class Recipe:
    """What a study consists of.

    Attributes:
        setups: One per task.
        seeds: Seeds of each.
        lengths: Tokens at which the trained models are tested.
        length_count: Sequences of each length.
    """

    setups: tuple[Setup, ...]
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    length_count: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values.

        Raises:
            ConfigError: On unknown names or values that make no sense.
        """
        for name in values:
            if name not in _KNOWN:
                raise ConfigError(f"a recipe has no '{name}': known: {', '.join(_KNOWN)}")
        tasks = values.get("tasks", ("number", "letter"))
        own = values.get("task_options", {})
        shared = values.get("options", {})
        tables = (
            isinstance(shared, Mapping)
            and isinstance(own, Mapping)
            and all(isinstance(x, Mapping) for x in own.values())
        )
        if not isinstance(tasks, list | tuple) or not tables:
            raise ConfigError("in a recipe, tasks is a list, options is a table and task_options a table of tables")
        seeds, lengths = values.get("seeds", (0, 1, 2)), values.get("lengths", LENGTHS)
        if not isinstance(seeds, list | tuple) or not isinstance(lengths, list | tuple):
            raise ConfigError(f"seeds={seeds!r} and lengths={lengths!r} must be lists of whole numbers, such as [0, 1]")
        seeds, lengths = tuple(seeds), tuple(lengths)
        count = values.get("length_count", 1000)
        if not seeds or any(isinstance(x, bool) or not isinstance(x, int) for x in (*seeds, *lengths, count)):
            raise ConfigError(f"seeds={seeds}, lengths={lengths} and length_count={count} must be whole numbers")
        setups = tuple(Setup.of(task, {**shared, **own.get(task, {})}) for task in tasks)
        return cls(setups, seeds, lengths, count)


def read_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    return Recipe.of(read_recipe_file(path))
