"""Refuses what a user gives and that is not known, not of the right type or not possible, in one line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import io
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, BinaryIO, TypeVar, cast

from wherewhat.errors import ConfigError

_Checked = TypeVar("_Checked", bound=Callable[..., Any])


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """What to say of a name that is not known: the one it is most like, or all there are."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(listed) or 'none'}"


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse a seed that torch or the store does not take.

    Raises:
        ConfigError: If it is below 0 or above 2^63 - 1.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"{name} is {seed}: it must be from 0 to 2^63 - 1")


def checked(**conversions: Callable[[Any], Any]) -> Callable[[_Checked], _Checked]:
    """Refuse arguments of a function, or fields of a dataclass, that do not fit their annotations.

    Args:
        conversions: Function by name of an argument, which is applied before its value is checked.

    Raises:
        ConfigError: At the call, in one line: the argument, its value and what it must be.
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
