"""Options: checked types, values from text, and config files in TOML, YAML or JSON."""

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
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from wherewhat.errors import ConfigError
from wherewhat.imports import require

_Checked = TypeVar("_Checked", bound=Callable[..., Any])


def option(default: Any, help_text: str, *, metavar: str | None = None) -> Any:
    """Return a dataclass field with a default, one line of help, and what stands for its value in a usage line."""
    return dataclasses.field(default=default, metadata={"help": help_text, "metavar": metavar})


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """What to say of a name that is not known: the one it is most like, or all there are."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(listed) or 'none'}"


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse a seed that torch or the store does not take."""
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{name} is {seed}: it must be from 0 to 2^63 - 1")


def checked(**conversions: Callable[[Any], Any]) -> Callable[[_Checked], _Checked]:
    """Refuse arguments of a function, or fields of a dataclass, that do not fit their annotations.

    Args:
        conversions: Function by name of an argument, which is applied before its value is checked.
    """

    def decorate(target: _Checked) -> _Checked:
        if isinstance(target, type):
            setattr(target, "__init__", _guarded(vars(target)["__init__"], target, conversions))  # noqa: B010 - for mypy
            return target
        return cast("_Checked", _guarded(target, target, conversions))

    return decorate


def described(kind: Any) -> str:
    """A type in words."""
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
    if origin in (typing.Union, types.UnionType):
        *others, last = map(described, arguments)
        return f"{', '.join(others)} or {last}"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in _SERIES and arguments:
        members = typing.get_args(arguments[0]) or arguments[:1]
        return f"a {origin.__name__.lower()} of " + " or ".join(f"{described(m).split(' ', 1)[1]}s" for m in members)
    return names.get(origin) or f"{_article(origin.__name__)} {origin.__name__}"


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; annotations that are not known fit everything."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return isinstance(value, str) and value in arguments
    if origin in (int, float):
        return isinstance(value, int if origin is int else Real) and not isinstance(value, bool)
    if origin is BinaryIO:
        return hasattr(value, "read") and not isinstance(value, io.TextIOBase)
    if origin in _SERIES:
        listed = isinstance(value, origin) and not isinstance(value, (str, bytes))
        return listed and (not arguments or all(fits(one, arguments[0]) for one in value))
    if origin is Mapping and arguments:
        return isinstance(value, Mapping) and all(fits(name, arguments[0]) for name in value)
    return not isinstance(origin, type) or origin is Any or isinstance(value, origin)


_SERIES = (tuple, list, Sequence)


def _guarded(function: Any, annotated: Any, conversions: Mapping[str, Callable[[Any], Any]]) -> Any:
    signature = inspect.signature(function)
    name = annotated.__name__

    @functools.cache
    def kinds() -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = vars(sys.modules[annotated.__module__])
        for key, annotation in inspect.get_annotations(annotated).items():
            alone = types.SimpleNamespace(__annotations__={key: annotation})
            with contextlib.suppress(NameError):  # of a type that only type checkers import
                found |= typing.get_type_hints(alone, globalns=names)
        return found

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
                converted = int(converted)  # NumPy's, which JSON does not take
            if not fits(converted, kinds().get(key, Any)):
                raise ConfigError(f"{key} is {_said(converted)}: it must be {described(kinds()[key])}")
            bound.arguments[key] = converted
        return function(*bound.args, **bound.kwargs)

    return guarded


def _said(value: Any) -> str:
    """A value in a message: itself where it is short and plain, else what it is."""
    if value is None or isinstance(value, (str, bytes, int, float, os.PathLike)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    kind = type(value).__name__
    inside = dict.fromkeys(type(one).__name__ for one in value) if isinstance(value, _SERIES) else ()
    return f"{_article(kind)} {kind}" + (f" of {' and '.join(inside)}" if inside else "")


_LONGEST = 60


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def parse_assignments(assignments: Iterable[str], *, name: str = "--set") -> dict[str, str]:
    """``["a=1", "b=x"]`` of an option of that name as a dictionary."""
    found: dict[str, str] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ConfigError(f"{name} {text!r} is not of the form key=value")
        if key in found:
            raise ConfigError(f"{name} {key} is given twice")
        found[key] = value.strip()
    return found


def build_config(config_type: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a frozen config dataclass from plain or textual values."""
    hints = typing.get_type_hints(config_type)
    known = {f.name for f in dataclasses.fields(config_type)}
    converted = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"there is no option '{key}': {nearest(str(key), sorted(known))}")
        converted[key] = _convert(key, value, hints[key])
    return config_type(**converted)


def config_values(config: Any) -> dict[str, Any]:
    """A config as plain values, for hashing and for ``config.json``."""
    return {
        f.name: list(v) if isinstance(v := getattr(config, f.name), tuple) else v for f in dataclasses.fields(config)
    }


def _convert(key: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind``: bool, int, float, str, a literal, a tuple of those, or one of those or None."""
    origin = typing.get_origin(kind)
    try:
        if origin in (typing.Union, types.UnionType):
            if value is None or (isinstance(value, str) and value.lower() in ("none", "")):
                return None
            inner = next(a for a in typing.get_args(kind) if a is not type(None))
            return _convert(key, value, inner)
        if origin is typing.Literal:
            if value in typing.get_args(kind):
                return value
            raise ValueError
        if origin is tuple:
            parts = (value.split(",") if value.strip() else []) if isinstance(value, str) else list(value)
            inner = typing.get_args(kind)[0]
            return tuple(_convert(key, p.strip() if isinstance(p, str) else p, inner) for p in parts)
        if kind is bool:
            return value if isinstance(value, bool) else _BOOLEANS[str(value).lower()]
        if kind is int and isinstance(value, bool):
            raise ValueError
        if kind is int and isinstance(value, float) and value != int(value):
            raise ValueError
        if kind is str and not isinstance(value, str):
            raise ValueError
        converted = kind(value)
        if kind is float and not math.isfinite(converted):
            raise ConfigError(f"{key}={value!r} is not a finite number")
        return converted
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ConfigError(f"{key}={value!r} is not {described(kind)}") from error


_BOOLEANS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


_Config = TypeVar("_Config")
_YAML = (".yaml", ".yml")


def read_values(path: Path, *, name: str) -> tuple[dict[str, Any], str]:
    """Read a file of names and values: ``.json`` is JSON, ``.yaml`` and ``.yml`` are YAML, everything else is TOML.

    Args:
        path: The file.
        name: What error messages call the file, such as ``--config``.

    Returns:
        The values, and the text of the file.
    """
    suffix = path.suffix.lower()
    kind = "YAML" if suffix in _YAML else "JSON" if suffix == ".json" else "TOML"
    try:
        content = path.read_text("utf-8")
        values = _PARSERS[kind](content)
    except UnicodeDecodeError:
        raise ConfigError(f"{name} {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} {path} is not valid {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} {path} must hold names and values, not a {type(values).__name__}")
    return values, content


def _parse_yaml(content: str) -> Any:
    yaml = require("yaml", why="a file in YAML", install="pyyaml")
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_PARSERS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads, "YAML": _parse_yaml}


def read_config_file(path: Path, *, known: Iterable[str]) -> dict[str, Any]:
    """Values of a TOML, YAML or JSON file, keys with ``_`` for ``-``; measurement options stand under ``set``."""
    values, _ = read_values(path, name="--config")
    allowed = sorted(known)
    found = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in allowed:
            hint = nearest(name, allowed, cutoff=0.6)
            raise ConfigError(f"--config {path}: there is no option '{key}': {hint}")
        found[name] = value
    return found


def read_recipe(path: Path, kind: type[_Config]) -> _Config:
    """Read a TOML, YAML or JSON file into a dataclass; see :func:`build_recipe`."""
    values, _ = read_values(path, name="the recipe")
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
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"a recipe has no '{key}': {nearest(str(key), known)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"in a recipe, {key} is a table: write [{key}]")
            for name in known[key].metadata.get("derived", ()):
                if name in value:
                    raise ConfigError(f"{name} does not belong in [{key}]: the rest of the recipe determines it")
            start = known[key].default_factory()
            found[key] = build_config(type(start), {**config_values(start), **value})
            continue
        converted = tuple(value) if isinstance(value, list) else value
        if isinstance(converted, str) and Path in typing.get_args(hint):
            converted = Path(converted)
        if not fits(converted, hint):
            raise ConfigError(f"{key}={value!r} is not {described(hint)}")
        found[key] = converted
    return kind(**found)
