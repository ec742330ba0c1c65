"""Words for a name that a user gives and that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """What to say of a name that is not known: the one it is most like, or all there are."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(listed) or 'none'}"
