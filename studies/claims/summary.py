"""The table of verdicts by claim and model in ``docs/claims.md``, from the results in this folder.

    python studies/claims/summary.py

The results are written by ``wherewhat claims`` and ``wherewhat multihop claims``. A test compares table and page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wherewhat.rules.claims.claim import percent

FOLDER = Path(__file__).resolve().parent
TITLES = {
    "smollm2": "SmolLM2-135M",
    "gemma-3-270m": "Gemma-3-270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "tinyllama-1.1b": "TinyLlama-1.1B",
    "stories15m": "stories15M",
    "multihop": "multi-hop models",
}
"""Column by file name; claims that NAME.json does not judge are taken from NAME-long.json, of longer texts, and from
NAME-25.json, of claim 25 alone."""

WORDS = {"not judged": "", "cannot be told": "open", "does not hold": "**no**", "holds": "holds"}


def results(folder: Path = FOLDER) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the judged claims by column and number."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, title in TITLES.items():
        for path in (folder / f"{name}{ending}.json" for ending in ("", "-long", "-25")):
            for one in json.loads(path.read_text("utf-8"))["claims"] if path.exists() else ():
                claims = found.setdefault(title, {})
                if claims.get(one["number"], {"verdict": "not judged"})["verdict"] == "not judged":
                    claims[one["number"]] = one
    return found


def table(found: dict[str, dict[int, dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| claim | " + " | ".join(found) + " | another verdict under resampling |"
    yield "|---" * (len(found) + 2) + "|"
    for number in range(1, 26):
        cells = [cell(claims.get(number)) for claims in found.values()]
        yield f"| {number} | " + " | ".join([*cells, changed(found, number)]) + " |"


def cell(claim: dict[str, Any] | None) -> str:
    """Return the verdict on a claim in a few words."""
    if claim is None:
        return ""
    verdict = claim["verdict"]
    if verdict == "cannot be told" and claim["condition"]:  # left open by resampling
        rule = claim["stability"]["verdict"]
        return f"open (by the rule {'**no**' if rule == 'does not hold' else rule})"
    return f"if {claim['condition']}" if verdict == "holds if" else WORDS[verdict]


def changed(found: dict[str, dict[int, dict[str, Any]]], number: int) -> str:
    """Return how often the verdict on a claim changes under resampling, of the models where that is 1 % or more."""
    shares = {title: claims.get(number, {}).get("stability", {}).get("changed") for title, claims in found.items()}
    known = {title: share for title, share in shares.items() if share is not None}
    named = [f"{percent(share)} ({title})" for title, share in known.items() if share >= 0.01]
    return ", ".join(named) or ("less than 1 %" if known else "not resampled")


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(results())) + "\n")
