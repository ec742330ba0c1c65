"""Words for what a user gives and that is not known or not possible."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from wherewhat.errors import ConfigError


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
