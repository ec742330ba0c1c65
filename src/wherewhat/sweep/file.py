"""The sweep file: TOML, YAML or JSON with models, texts, measurements and shared options."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wherewhat.boundary import user_path
from wherewhat.errors import ConfigError
from wherewhat.files import file_sha256
from wherewhat.measures.measurement import Measurement, find_measurement
from wherewhat.models.source import Weights
from wherewhat.options import build_config, check_seed, config_values, nearest, read_config
from wherewhat.runs.request import ModelRequest, Request

DEFAULT_STORE = "runs"


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep file, not yet checked.

    Attributes:
        path: The file.
        values: Its keys and values; ``-`` in keys of the top level is ``_``.
        sha256: Hash of the file, which identifies a started sweep without expanding the file.
    """

    path: Path
    values: Mapping[str, Any]
    sha256: str

    @property
    def store(self) -> str:
        """Folder or address of the results."""
        store = self.values.get("store", DEFAULT_STORE)
        if not isinstance(store, str) or not store.strip():
            raise ConfigError(f"{self.path}: store={store!r} is not a folder or an address such as s3://bucket/runs")
        return store


def read_sweep_file(path: Path) -> SweepFile:
    """Read a sweep file in TOML, YAML or JSON, without checking it."""
    path = user_path(path, name="the sweep file")
    return SweepFile(path, read_config(path, name="the sweep file"), file_sha256(path))


EMBEDDED_TEXT = "embedded"


def _fields(kind: type[Any], without: tuple[str, ...]) -> type[Any]:
    """Return a dataclass of the fields of a request that a sweep file may set, all optional."""
    hints = typing.get_type_hints(kind, localns={"Weights": Weights})
    names = [f.name for f in dataclasses.fields(kind) if f.name not in without]
    return dataclasses.make_dataclass(kind.__name__, [(n, hints[n], field(default=None)) for n in names])


ON_MODELS = _fields(ModelRequest, without=("model", "weights", "seed", "revision"))
"""Options of all models, or of one."""
ON_TEXTS = _fields(Request, without=("measurement", "model", "files", "texts", "prompts", "options"))
"""Options of all texts and measurements, or of one."""


@dataclass(frozen=True)
class Axes:
    """Lists at the top of the file, or in the table of a model."""

    weights: tuple[Weights, ...] = ("trained",)
    seeds: tuple[int, ...] = (0,)
    revisions: tuple[str, ...] | None = None
    checkpoints: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ModelEntry:
    """One model: its name, the axes that vary it, and how it is loaded."""

    model: str
    axes: Axes
    shared: Mapping[str, Any]


@dataclass(frozen=True)
class TextEntry:
    """One text: files that are read together, the embedded prose, or prompts of a kind."""

    name: str
    files: tuple[str, ...] | None = None
    prompts: str | None = None
    shared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasurementEntry:
    """One measurement, all its options, and options of requests."""

    measurement: Measurement
    options: Mapping[str, Any]
    shared: Mapping[str, Any]


def names_of(kind: type[Any]) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [f.name for f in dataclasses.fields(kind)]


def check_keys(values: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise for an unknown key, with the nearest known one."""
    allowed = list(known)
    for key in values:
        if key not in allowed:
            raise ConfigError(f"{where}: there is no key '{key}': {nearest(str(key), allowed)}")


def typed(kind: type[Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return those of ``values`` that are fields of ``kind``, converted to the field's type."""
    known = {key: value for key, value in values.items() if key in names_of(kind)}
    try:
        config = build_config(kind, known)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return {key: getattr(config, key) for key in known}


def axes_of(values: Mapping[str, Any], where: str, default: Axes | None = None) -> Axes:
    """Return the lists in ``values``; a single value is a list of one, and missing ones are those of ``default``."""
    lists = {key: listed(values[key], f"{where}: {key}") for key in values if key in names_of(Axes)}
    for weights in lists.get("weights", ()):
        if weights not in (known := typing.get_args(Weights)):
            raise ConfigError(f"{where}: there are no weights '{weights}': {nearest(str(weights), known)}")
    axes = typed(Axes, lists, where)
    for seed in axes.get("seeds", ()):
        check_seed(seed, f"{where}: a seed")
    return dataclasses.replace(default or Axes(), **axes)


def listed(value: Any, where: str) -> list[Any]:
    """Return a list unchanged, anything else as a list of one."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or values == [None]:
        raise ConfigError(f"{where} is empty: give at least one, or leave the key out")
    return values


def model_entry(value: Any, where: str, axes: Axes) -> ModelEntry:
    """Return one entry of ``models``: a name, or a table."""
    table = {"model": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("model"), str):
        raise ConfigError(f"{where}: {value!r} is neither the name of a model nor a table with the key 'model'")
    check_keys(table, ["model", *names_of(Axes), *names_of(ON_MODELS)], where)
    return ModelEntry(table["model"], axes_of(table, where, axes), typed(ON_MODELS, table, where))


def text_entries(value: Any, where: str) -> list[TextEntry]:
    """Return the entries of ``texts``: a list, or a table by name, of files, lists of files and tables."""
    named = list(value.items()) if isinstance(value, dict) else [(None, entry) for entry in listed(value, where)]
    return [_text_entry(name, entry, _at(where, name, i)) for i, (name, entry) in enumerate(named)]


def _text_entry(name: str | None, entry: Any, where: str) -> TextEntry:
    table = dict(entry) if isinstance(entry, dict) else {} if entry == EMBEDDED_TEXT else {"text": entry}
    check_keys(table, ["name", "text", "prompts", *names_of(ON_TEXTS)], where)
    files = listed(table["text"], f"{where}: text") if "text" in table else None
    if files is not None and not all(isinstance(file, str) for file in files):
        raise ConfigError(f"{where}: {entry!r} is not a file, a folder, a list of them, or a table")
    if files is not None and "-" in files:
        raise ConfigError(
            f"{where}: standard input can be read only once, but a sweep reads texts repeatedly: give a file"
        )
    prompts = table.get("prompts")
    if prompts is not None and not isinstance(prompts, str):
        raise ConfigError(f"{where}: prompts={prompts!r} is not a kind of prompt")
    name = name or table.get("name")
    if name is None:
        name = f"{prompts} prompts" if prompts else EMBEDDED_TEXT if files is None else _file_names(files)
    return TextEntry(str(name), None if files is None else tuple(files), prompts, typed(ON_TEXTS, table, where))


def _file_names(files: list[str]) -> str:
    first = Path(files[0]).stem or files[0]
    return first if len(files) == 1 else f"{first} and {len(files) - 1} more"


def measurement_entries(value: Any, where: str) -> list[MeasurementEntry]:
    """Return the entries of ``measurements``: a list of names and tables, or a table by name."""
    named = list(value.items()) if isinstance(value, dict) else [(None, entry) for entry in listed(value, where)]
    if not named:
        raise ConfigError(f"{where} is empty: give at least one")
    return [_measurement_entry(name, entry, _at(where, name, i)) for i, (name, entry) in enumerate(named)]


def _measurement_entry(name: str | None, entry: Any, where: str) -> MeasurementEntry:
    table = {"measurement": entry} if isinstance(entry, str) else dict(entry) if isinstance(entry, dict) else {}
    if name is not None:
        table = {} if entry is None else table
        table.setdefault("measurement", name)
    if not isinstance(table.get("measurement"), str):
        raise ConfigError(f"{where}: {entry!r} is neither the name of a measurement nor a table with it")
    try:
        measurement = find_measurement(table["measurement"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    options = table.get("set", {})
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: 'set' must be a table of names and values")
    misplaced = [key for key in table if key in names_of(measurement.config) and key not in names_of(ON_TEXTS)]
    if misplaced:
        raise ConfigError(f"{where}: '{misplaced[0]}' is an option of {measurement.name}: put it under 'set'")
    check_keys(table, ["measurement", "set", *names_of(ON_TEXTS)], where)
    try:
        config = build_config(measurement.config, options)
    except ConfigError as error:
        raise ConfigError(f"{where}.set: {error}") from error
    return MeasurementEntry(measurement, config_values(config), typed(ON_TEXTS, table, where))


def _at(where: str, name: str | None, index: int) -> str:
    return f"{where}[{index}]" if name is None else f"{where}.{name}"
