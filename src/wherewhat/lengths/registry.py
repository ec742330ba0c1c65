"""All length methods by name: those of this package, registered ones, and those of installed packages.

A package adds methods with the entry point group ``wherewhat.length_methods``, a script or notebook with
:func:`register_length_method`.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

from wherewhat.errors import ConfigError
from wherewhat.imports import isolated, plugins
from wherewhat.options import nearest

if TYPE_CHECKING:
    from wherewhat.lengths.method import LengthMethod

METHODS = {
    "none": "windows.Untouched",
    "sliding-window": "windows.SlidingWindow",
    "streaming-llm": "windows.StreamingLLM",
    "lm-infinite": "windows.LMInfinite",
    "infllm": "windows.InfLLM",
    "position-interpolation": "frequencies.PositionInterpolation",
    "ntk-aware": "frequencies.NTKAware",
    "dynamic-ntk": "frequencies.DynamicNTK",
    "yarn": "frequencies.YaRN",
    "self-extend": "windows.SelfExtend",
    "rerope": "windows.ReRoPE",
    "near-far": "near_far.NearFar",
}
"""Module and class of each method of this package by name; a method is imported when it is used."""

GROUP = "wherewhat.length_methods"
"""Entry points of length methods."""

_Method = TypeVar("_Method", bound="type[LengthMethod]")
_registered: dict[str, type[LengthMethod]] = {}
_searched: set[str] = set()


def register_length_method(declared: _Method) -> _Method:
    """Add a length method; use it as a class decorator, above ``@dataclass(frozen=True)``.

    ``wherewhat extend --set methods=none,NAME`` then measures it. A class of the same module and name may be registered
    again after it was changed.
    """
    from wherewhat.lengths.method import LengthMethod

    if not (isinstance(declared, type) and issubclass(declared, LengthMethod)):
        raise ConfigError(f"{declared!r} is not a length method: give a subclass of wherewhat.lengths.LengthMethod")
    title, name = declared.__name__, getattr(declared, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise ConfigError(f"the name of the length method {title} is {name!r}: give words such as 'leaky-rerope'")
    if "__dataclass_params__" not in vars(declared):
        raise ConfigError(f"the length method {title} is no dataclass: decorate it with @dataclass(frozen=True)")
    known = find_method(name) if name in length_methods() else None
    if known is not None and (known.__module__, known.__qualname__) != (declared.__module__, declared.__qualname__):
        raise ConfigError(f"there is already a length method '{name}': choose another name")
    _registered[name] = declared
    return declared


def length_methods() -> list[str]:
    """Return the names of all methods: those of this package, then registered ones and those of installed packages."""
    if GROUP not in _searched:
        _searched.add(GROUP)
        for name, declared in plugins(GROUP).items():
            with isolated(GROUP, name):
                register_length_method(declared)
    return [*METHODS, *_registered]


def find_method(name: str) -> type[LengthMethod]:
    """Return the class of a method."""
    if name not in length_methods():
        raise ConfigError(f"there is no length method '{name}': {nearest(name, length_methods(), cutoff=0.6)}")
    if name in _registered:
        return _registered[name]
    module, kind = METHODS[name].split(".")
    return cast("type[LengthMethod]", getattr(import_module(f"wherewhat.lengths.{module}"), kind))
