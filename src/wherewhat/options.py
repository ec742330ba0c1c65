"""Options: dataclass fields with help, checked argument types, values from text, and config files."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import json
import math
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from wherewhat.boundary import (
    MOST_CONFIG_BYTES,
    check_values,
    check_whole_number,
    parse_settings,
    read_user_file,
    shown,
    user_path,
)
from wherewhat.errors import ConfigError, one_line
from wherewhat.files import MOST_DEPTH
from wherewhat.imports import require

_Checked = TypeVar("_Checked", bound=Callable[..., Any])
_Config = TypeVar("_Config")


def option(
    default: Any, help_text: str, *, metavar: str | None = None, later: bool = False, flag: str | None = None
) -> Any:
    """Return a dataclass field with a default, one line of help, and the name of its value in a usage line.

    An option that was added ``later`` is stored only if it differs from its default, so that earlier runs are reused.
    ``flag`` is its name on the command line and in files, if that is not the field's.
    """
    described = {"help": help_text, "metavar": metavar, "later": later, "flag": flag}
    return dataclasses.field(default=default, metadata=described)


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field on the command line, without dashes in front, and in files."""
    return field.metadata.get("flag") or field.name.replace("_", "-")


_OTHER_NAMES = {"text": "files", "files": "text"}
"""Files of texts are ``files`` in Python and ``text`` on the command line, in config files and in sweeps."""


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    listed = list(known)
    other = _OTHER_NAMES.get(name)
    if other in listed:
        return f"did you mean '{other}'?"
    near = difflib.get_close_matches(name, listed, n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(listed) or 'none'}"


def short_repr(instance: Any) -> str:
    """Return a dataclass instance as text in which tensors are dtype and shape; use it as ``__repr__``."""
    values = (f"{f.name}={_brief(getattr(instance, f.name))}" for f in dataclasses.fields(instance) if f.repr)
    return f"{type(instance).__name__}({', '.join(values)})"


def _brief(value: Any) -> str:
    """Return a field's value: tensors as ``float32[9, 128]``, long sequences as their first entries and length."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        device = "" if str(getattr(value, "device", "cpu")) == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        entries = {str(key): _brief(entry) for key, entry in value.items()}
        if len(entries) > 1 and len(set(entries.values())) == 1:
            return f"{{{', '.join(entries)}: {next(iter(entries.values()))} each}}"
        return f"{{{', '.join(f'{key}: {entry}' for key, entry in entries.items())}}}"
    if isinstance(value, list | tuple):
        first = [*map(_brief, value[:4]), *([f"… {len(value)} in all"] if len(value) > 4 else [])]
        return f"[{', '.join(first)}]"
    return repr(value)


def check_integer(name: str, value: object, *, least: int, most: int | None = None, optional: bool = False) -> None:
    """Refuse a value that is not an integer from ``least`` to ``most``, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}: at most {most} is possible")


def check_seed(seed: int, name: str = "seed") -> None:
    """Raise if torch or the store does not accept the seed."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{name} is {seed}: it must be from 0 to 2^63 - 1")


def checked(**conversions: Callable[[Any], Any]) -> Callable[[_Checked], _Checked]:
    """Decorate a function or dataclass so that arguments that do not fit their annotations raise a ConfigError.

    Conversions, by name of an argument, are applied before its value is checked.
    """

    def decorate(target: _Checked) -> _Checked:
        if isinstance(target, type):
            setattr(target, "__init__", _guarded(vars(target)["__init__"], target, conversions))  # noqa: B010 - for mypy
            return target
        return cast("_Checked", _guarded(target, target, conversions))

    return decorate


def _described(kind: Any) -> str:
    """Return a type in words."""
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        type(None): "None",
        os.PathLike: "a path",
        Callable: "a function",
        Mapping: "names with values",
        BinaryIO: "a binary stream",
    }
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in _UNIONS:
        *others, last = map(_described, arguments)
        return f"{', '.join(others)} or {last}"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in _SERIES and arguments:
        inner = arguments[0]
        if typing.get_origin(inner) is typing.Literal:
            return f"a {origin.__name__.lower()} of " + " or ".join(map(repr, typing.get_args(inner)))
        members = typing.get_args(inner) if typing.get_origin(inner) in _UNIONS else (inner,)
        return f"a {origin.__name__.lower()} of " + " or ".join(f"{_described(m).split(' ', 1)[1]}s" for m in members)
    return names.get(origin) or f"{_article(origin.__name__)} {origin.__name__}"


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value has an annotated type; unknown annotations fit everything."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in _UNIONS:
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin in (int, float):
        return isinstance(value, int if origin is int else Real) and not isinstance(value, bool)
    if origin is BinaryIO:
        return hasattr(value, "read") and not isinstance(value, io.TextIOBase)
    if origin in _SERIES:
        listed = isinstance(value, origin) and not isinstance(value, (str, bytes))
        if listed and arguments and arguments[0] in _SIMPLE:  # one item of each type stands for all, such as token ids
            value = {type(item): item for item in value}.values()
        return listed and (not arguments or all(_fits(item, arguments[0]) for item in value))
    if origin is Mapping and arguments:
        return isinstance(value, Mapping) and all(_fits(name, arguments[0]) for name in value)
    return not isinstance(origin, type) or origin is Any or isinstance(value, origin)


_UNIONS = (typing.Union, types.UnionType)
_SERIES = (tuple, list, Sequence)
_SIMPLE = (int, float, bool, str)


def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the types of a function's arguments or a class's fields, except those that only type checkers import."""
    hints: dict[str, Any] = {}
    names = vars(sys.modules[annotated.__module__])
    for key, annotation in inspect.get_annotations(annotated).items():
        alone = types.SimpleNamespace(__annotations__={key: annotation})
        with contextlib.suppress(NameError):
            hints |= typing.get_type_hints(alone, globalns=names)
    return hints


def _guarded(function: Any, annotated: Any, conversions: Mapping[str, Callable[[Any], Any]]) -> Any:
    signature = inspect.signature(function)
    name = annotated.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    kinds = functools.cache(functools.partial(type_hints, annotated))  # later, when all types are defined

    @functools.wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        try:
            bound = signature.bind(*args, **named)
        except TypeError as error:
            known = [key for key in signature.parameters if key not in ("self", "cls")]
            unknown = next((key for key in named if key not in known), None)
            if unknown is None:
                raise ConfigError(f"{name}: {error}; its arguments are {', '.join(known)}") from None
            raise ConfigError(f"{name} has no argument '{unknown}': {nearest(unknown, known)}") from None
        for key, value in bound.arguments.items():
            converted = conversions[key](value) if key in conversions else value
            if not isinstance(converted, int) and isinstance(converted, Integral):
                converted = int(converted)  # a NumPy integer, which JSON cannot store
            if key != "seed":  # check_seed names its range
                check_whole_number(key, converted)
            if not _fits(converted, kinds().get(key, Any)):
                raise ConfigError(f"{key} is {_shown(converted)}: it must be {_described(kinds()[key])}")
            bound.arguments[key] = converted
        return function(*bound.args, **bound.kwargs)

    return guarded


def _shown(value: Any) -> str:
    """Return a value for a message: its repr where it is a plain value, else its type."""
    if value is None or isinstance(value, (str, bytes, int, float, os.PathLike)):
        return _cut(value)
    kind = type(value).__name__
    inside = dict.fromkeys(type(item).__name__ for item in value) if isinstance(value, _SERIES) else ()
    return f"{_article(kind)} {kind}" + (f" of {' and '.join(inside)}" if inside else "")


def _cut(value: Any) -> str:
    """Return the first characters of the repr of a value."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_LONGEST = 60


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def parse_assignments(assignments: Iterable[str], *, name: str = "--set") -> dict[str, str]:
    """Return ``["a=1", "b=x"]`` as a dictionary; ``name`` is the option they were given to."""
    values: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ConfigError(f"{name} {_cut(text)} is not of the form key=value")
        if key in values:
            raise ConfigError(f"{name} {key} is given twice")
        values[key] = value.strip()
    return values


def build_config(config_type: type[Any], values: Mapping[str, Any]) -> Any:
    """Return an instance of a frozen config dataclass from plain or textual values."""
    hints = typing.get_type_hints(config_type)
    flags = {f.name: f.metadata.get("flag") or f.name for f in dataclasses.fields(config_type)}
    known = flags.keys()
    converted = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"there is no option {shown(str(key))}: {nearest(str(key), sorted(known))}")
        try:
            converted[key] = _convert(value, hints[key])
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{flags[key]}={_cut(value)} is not {_described(hints[key])}") from None
        if key != "seed":  # check_seed names its range
            check_whole_number(key, converted[key])
        numbers = converted[key] if isinstance(converted[key], tuple) else (converted[key],)
        if len(numbers) > _MOST_ENTRIES:
            raise ConfigError(f"{key} has {len(numbers):,} values: give at most {_MOST_ENTRIES:,}")
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            raise ConfigError(f"{key}={_cut(value)} is not a finite number")
    return config_type(**converted)


_MOST_ENTRIES = 10_000
"""Largest number of values of one option."""


def config_values(config: Any) -> dict[str, Any]:
    """Return a config as plain values, for hashing and for ``config.json``."""
    return {
        f.name: list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(config)
        if (v := getattr(config, f.name)) != f.default or not f.metadata.get("later")
    }


def _convert(value: Any, kind: Any) -> Any:
    """Return ``value`` as ``kind``: bool, int, float, str, a literal, a tuple of those, or one of those or None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        if value is None or (isinstance(value, str) and value.lower() in ("none", "")):
            return None
        return _convert(value, next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        parts = (value.split(",") if value.strip() else []) if isinstance(value, str) else list(value)
        return tuple(_convert(part.strip() if isinstance(part, str) else part, arguments[0]) for part in parts)
    converted = value
    if kind is bool:
        converted = _BOOLEANS.get(str(value).lower(), value)
    elif kind in (int, float) and not isinstance(value, bool):
        converted = kind(value)
        if isinstance(value, float) and converted != value and not math.isnan(value):
            raise ValueError
    if not _fits(converted, kind):
        raise ValueError
    return converted


_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def read_config(path: Path, *, name: str = "") -> dict[str, Any]:
    """Return the names and values in a file, with ``_`` for ``-`` in its keys.

    Args:
        path: A file; ``.yaml`` and ``.yml`` are YAML (needs PyYAML), ``.json`` is JSON, everything else is TOML.
        name: What the file is, for error messages, such as ``--config``.
    """
    where = f"{name} {shown(path)}".strip()
    suffix = path.suffix.lower()
    kind = "YAML" if suffix in (".yaml", ".yml") else "JSON" if suffix == ".json" else "TOML"
    most = _MOST_YAML_BYTES if kind == "YAML" else MOST_CONFIG_BYTES
    data = read_user_file(path, name=name or "the file", most=most)
    parsers: dict[str, Callable[[str], Any]] = {"YAML": _parse_yaml, "JSON": json.loads, "TOML": _parse_toml}
    values = parse_settings(data, parsers[kind], check_values, name=where, kind=kind)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where} must hold names and values, not {_article(type(values).__name__)} {type(values).__name__}"
        )
    settings: dict[str, Any] = {}
    for key, value in values.items():
        plain = str(key).replace("-", "_")
        if plain in settings:
            raise ConfigError(f"{where} has the key {shown(plain)} twice")
        settings[plain] = value
    return settings


def _parse_yaml(content: str) -> Any:
    yaml = require("yaml", why="a config file in YAML", install="pyyaml")
    try:
        return yaml.safe_load(content)
    except RecursionError:
        raise
    except Exception as error:  # tags with wrong values, such as !!int "", raise errors of many types
        raise ValueError(one_line(error)) from error


def _parse_toml(content: str) -> Any:
    # Dotted keys take a time that grows with the square of their number.
    if _DOTTED.search(content):
        raise RecursionError
    return tomllib.loads(content)


_MOST_YAML_BYTES = 256 << 10
"""Largest size of a YAML file, of which 100 KB may take several seconds."""

_DOTTED = re.compile(
    rf"""(?:^|[\[{{,])[ \t]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_DEPTH}}}""", re.MULTILINE
)
"""The start of a dotted key of TOML that is nested too deep."""


def read_recipe(path: Path, kind: type[_Config]) -> _Config:
    """Read a TOML, YAML or JSON file into a dataclass; see :func:`build_recipe`."""
    values = read_config(path, name="the recipe")
    if not values:
        raise ConfigError(f"the recipe {path} is empty: give it at least one value, such as seeds = [0]")
    return build_recipe(kind, values)


def build_recipe(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Return a dataclass made from the values of a file, with checked names and types.

    Lists become tuples and file names become paths. A table becomes a nested dataclass, in which options that are not
    given keep the values of the field's default; those that its metadata lists as ``derived`` are refused.
    """
    hints = typing.get_type_hints(kind)
    known: dict[str, Any] = {f.name: f for f in dataclasses.fields(cast("Any", kind))}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"a recipe has no {shown(str(key))}: {nearest(str(key), known)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"in a recipe, {key} is a table: write [{key}]")
            for name in known[key].metadata.get("derived", ()):
                if name in value:
                    raise ConfigError(f"{name} does not belong in [{key}]: the rest of the recipe determines it")
            start = known[key].default_factory()
            arguments[key] = build_config(type(start), {**config_values(start), **value})
            continue
        converted = tuple(value) if isinstance(value, list) else value
        if isinstance(converted, str) and Path in typing.get_args(hint):
            converted = user_path(converted, name=key)
        if not _fits(converted, hint):
            raise ConfigError(f"{key}={_cut(value)} is not {_described(hint)}")
        arguments[key] = converted
    return kind(**arguments)
