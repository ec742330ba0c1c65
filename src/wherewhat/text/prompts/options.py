"""Checks that options of all kinds share."""

from __future__ import annotations

from wherewhat.errors import ConfigError


def check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    """Refuse what is not a whole number of at least ``least``, or None where that is allowed.

    Raises:
        ConfigError: If so.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")
