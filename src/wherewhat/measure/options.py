"""Options of a measurement from text: ``--set key=value`` and config files."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from wherewhat.checking import described, nearest
from wherewhat.errors import ConfigError


def parse_assignments(assignments: Iterable[str], *, name: str = "--set") -> dict[str, str]:
    """``["a=1", "b=x"]`` of an option of that name as a dictionary.

    Raises:
        ConfigError: If one has no ``=``, or a key comes twice.
    """
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
    """An instance of a frozen config dataclass from plain or textual values.

    Raises:
        ConfigError: On an unknown key (with the nearest known one) or a value of the wrong type.
    """
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
