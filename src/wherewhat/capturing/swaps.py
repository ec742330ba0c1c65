"""Attributes swapped for the time of a context, restored whatever happens, safe to nest and to overlap.

Captures need to see two things that models reach by name: the rotary function of their file and the table of
attention functions. While at least one capture is open the name points to an observer that calls the original;
when the last one closes the original is back. The observer itself does nothing outside a capture's own context,
so other threads and other models of the same family are unaffected even meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Target:
    """One attribute of one object, and how to make its observer from the original."""

    owner: Any
    name: str
    observe: Callable[[Any], Any]


@dataclass
class _Swapped:
    owner: Any
    own: Any  # what the owner's own dictionary held: instances may only inherit the attribute
    observer: Any
    users: int


_lock = threading.Lock()
_swapped: dict[tuple[int, str], _Swapped] = {}


@contextmanager
def swapped(targets: Iterable[Target]) -> Iterator[None]:
    """Replace each target by its observer until the context ends."""
    taken: list[Target] = []
    try:
        for target in targets:
            _take(target)
            taken.append(target)
        yield
    finally:
        for target in reversed(taken):
            _release(target)


def _take(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        if key in _swapped:
            _swapped[key].users += 1
            return
        observer = target.observe(getattr(target.owner, target.name))
        own = vars(target.owner).get(target.name, _MISSING)
        setattr(target.owner, target.name, observer)
        _swapped[key] = _Swapped(target.owner, own, observer, 1)


def _release(target: Target) -> None:
    key = (id(target.owner), target.name)
    with _lock:
        entry = _swapped[key]
        entry.users -= 1
        if entry.users:
            return
        del _swapped[key]
        if vars(entry.owner).get(target.name) is not entry.observer:
            return  # somebody else replaced it meanwhile; theirs is not ours to undo
        if entry.own is _MISSING:
            delattr(entry.owner, target.name)
        else:
            setattr(entry.owner, target.name, entry.own)
