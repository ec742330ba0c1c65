"""Judged claims as cards: the page of ``wherewhat claims``, and the section of a report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from wherewhat.boundary import output_file
from wherewhat.progress import counted
from wherewhat.report.data import rounded
from wherewhat.report.page import asset, whole_page, write_page
from wherewhat.rules.claims.claim import SIGNS, number_words, percent, stability_words, verdict_words
from wherewhat.rules.claims.registry import title_of

Link = Callable[[str], str | None]
"""Returns the address of a run directory by its name; None if there is none."""

_MARGIN = 0.08
"""Share of a picture's width on each side of the interval and its threshold."""


def claims_page(results: Sequence[Mapping[str, Any]], *, link: Link = lambda name: None) -> str:
    """Return the page of judged claims: verdicts of all models in a table, and a card for each claim.

    Names of models and all other texts are in the data only; the script inserts them as text.

    Args:
        results: The content of the file of each model.
        link: Address of a run directory by its name.
    """
    models = [claims_data(result, link=link) for result in results]
    cards: dict[int, dict[str, Any]] = {}
    for index, model in enumerate(models):
        for claim in model.pop("claims"):
            card = cards.setdefault(claim["number"], {"models": {}})
            card |= {name: claim.pop(name) for name in ("number", "title", "statement", "source")}
            card["models"][index] = claim
    return whole_page(
        title="wherewhat: claims",
        body=asset("claims.html"),
        style=asset("claims.css"),
        scripts=[asset("claim_cards.js"), asset("claims_page.js")],
        data={"models": models, "cards": [cards[number] for number in sorted(cards)]},
        plotly=False,
    )


def write_claims_page(
    results: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, runs: Sequence[Path]
) -> Path:
    """Write the page of judged claims, with links to the run directories in some folders, and return its path."""
    path = output_file(path, name="the page")

    def link(name: str) -> str | None:
        folders = (folder / name for folder in runs if name == Path(name).name)
        found = next((folder for folder in folders if folder.is_dir()), None)
        return None if found is None else quote(os.path.relpath(found, path.parent), safe="/") + "/"

    return write_page(path, claims_page(results, link=link))


def claims_data(data: Mapping[str, Any], *, link: Link = lambda name: None) -> dict[str, Any]:
    """Return the content of a file of judged claims as a page shows it.

    Args:
        data: The content.
        link: Address of a run directory by its name.
    """
    note = "Intervals are 95 % over documents, prompts or heads; open means that an interval includes the threshold."
    if "documents" in data:
        note = (
            f"Judged in {data['dtype']} on {counted(len(data['documents']), 'document')} of {data['tokens']} tokens; "
            f"some measurements use fewer. {note}"
        )
    return {
        "name": data["model"],
        "weights": data["weights"],
        "note": note,
        "command": data["command"],
        "claims": [_claim(claim, link) for claim in data["claims"]],
    }


def _claim(claim: Mapping[str, Any], link: Link) -> dict[str, Any]:
    changed = (claim.get("stability") or {}).get("changed")
    return {
        **{name: claim[name] for name in ("number", "statement", "source", "verdict", "notes", "change")},
        "title": title_of(claim),
        "words": verdict_words(claim),
        "stability": stability_words(claim),
        "changed": None if changed is None else percent(changed),
        "parts": [
            {
                "statement": part["statement"],
                "outcome": part["outcome"],
                "bounds": [_bound(bound) for bound in part.get("bounds", ()) if bound["mean"] is not None],
            }
            for part in claim["parts"]
        ],
        "numbers": [
            {
                "title": number["title"],
                "words": number_words(number),
                "control": rounded(number["control"]),
                "control_title": number["control_title"],
            }
            for number in claim["numbers"]
        ],
        "runs": [{"name": name, "address": link(name)} for name in claim["runs"]],
    }


def _bound(bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bound in words, and its places in a picture as shares of the width."""
    low, high = (bound["mean"] if bound[name] is None else bound[name] for name in ("low", "high"))
    threshold = float(bound["threshold"])
    least, most = min(float(low), threshold), max(float(high), threshold)
    width = most - least if most > least and math.isfinite(most - least) else 1.0

    def place(value: float) -> float:
        return round(100 * (_MARGIN + (1 - 2 * _MARGIN) * (value - least) / width), 2)

    side = SIGNS.get(bound["side"], "")
    return {
        "words": number_words(bound),
        "needed": f"{bound['side']} {threshold:.3g}",
        "outcome": bound["outcome"],
        "right": side in "≥>" if side else None,
        **{name: place(value) for name, value in (("low", low), ("high", high), ("mean", bound["mean"]))},
        "threshold": place(threshold),
    }
