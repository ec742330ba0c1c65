"""All claims by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wherewhat.rules.claims import behaviour, heads, logits
from wherewhat.rules.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = tuple(
    sorted((*logits.CLAIMS, *behaviour.CLAIMS, *heads.CLAIMS), key=lambda claim: claim.number)
)
"""All claims by number."""


def title_of(claim: Mapping[str, Any]) -> str:
    """Return the title of a stored claim; results of earlier versions have none."""
    known = {known.number: known.title for known in CLAIMS}
    return str(claim.get("title") or known.get(claim["number"], claim["statement"]))
