"""Checks that the options of all tasks share."""

from __future__ import annotations

from wherewhat.errors import ConfigError


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Refuse what is not a whole number from ``least`` to ``most``.

    Raises:
        ConfigError: If so.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")
    if most is not None and value > most:
        raise ConfigError(f"{name} is {value}: at most {most} is possible")


def check_hops(hops: int, pretarget: int) -> None:
    """Refuse more hops than there are places to visit.

    Raises:
        ConfigError: If so.
    """
    check_whole("hops", hops, least=1)
    if hops > pretarget + 1:
        raise ConfigError(
            f"hops is {hops}: a pre-target window of {pretarget} has room for at most {pretarget + 1}; make it longer"
        )
