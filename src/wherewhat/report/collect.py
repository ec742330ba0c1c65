"""Run directories → plain data, all that a page shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from wherewhat.measure.registry import find
from wherewhat.measure.swaps.labels import LABELS
from wherewhat.pipeline.kinds import stored_kinds
from wherewhat.pipeline.summary import Interval
from wherewhat.report.bands import bands
from wherewhat.report.curves import controlled_distance, first_document, head_records, turns_per_token
from wherewhat.report.encoding import rounded
from wherewhat.report.headline import Number, Value, headline
from wherewhat.report.length_curve import lengths
from wherewhat.report.looking import Look
from wherewhat.report.measuring import Runs
from wherewhat.report.perturbation import perturbation
from wherewhat.report.tables import Heads, head_means, metric_tables
from wherewhat.store import RunDirectory
from wherewhat.store.hashing import canonical_json


def collect(runs: Runs, look: Look, *, name: str) -> dict[str, Any]:
    """What a page shows of one model.

    Args:
        runs: Finished runs.
        look: Logits and tokens of the first document.
        name: What the model is called on the page.
    """
    request, first = runs.first
    means = {(r.measurement, str(r.model.weights)): head_means(directory) for r, directory in runs.finished}
    layers = sorted(look.logits)
    return {
        "model": {
            "unmeasured": [],
            **look.facts,
            "name": name,
            "layers": layers,
            "kinds": stored_kinds(first),
            "heads": [int(look.logits[layer].shape[0]) for layer in layers],
            "documents": len(cast("list[Any]", first.config["documents"])),
            "tokens": request.tokens,
            "embedded": request.text is None,
        },
        "numbers": [_number(number) for number in headline(runs)],
        "metrics": metric_tables(runs, means, layers),
        "swaps": _swaps(runs, means, layers),
        "records": head_records(runs, look, layers),
        "turns": turns_per_token(runs, layers),
        "text": {"document": first_document(first), "tokens": look.tokens},
        "distance": controlled_distance(runs, layers),
        "perturbation": perturbation(runs),
        "lengths": lengths(runs),
        "bands": bands(runs),
        "method": [
            {"name": made, "summary": find(made).summary, "limits": find(made).limits}
            for made in dict.fromkeys(r.measurement for r, _ in runs.finished)
        ],
        "left_out": runs.left_out,
        "runs": [_run(directory) for _, directory in runs.finished],
    }


def _number(number: Number) -> dict[str, Any]:
    def plain(given: Value) -> dict[str, Any]:
        value: Interval = given.value
        return {
            "name": given.name,
            "mean": rounded(value.mean),
            "low": rounded(value.low),
            "high": rounded(value.high),
            "n": value.n,
        }

    return {
        "title": number.title,
        "values": [plain(value) for value in number.values],
        "controls": [plain(value) for value in number.controls],
        "kinds": [plain(value) for value in number.kinds],
        "reading": number.reading,
    }


def _swaps(runs: Runs, means: Mapping[tuple[str, str], Mapping[str, Heads]], layers: list[int]) -> Any:
    """Scores, intervals and labels of every head; over all documents together where there are several."""
    directory = runs.find("heads")
    found = means.get(("heads", runs.own), {})
    if directory is None or "s_pos" not in found:
        return None
    ending = "_together" if "s_pos_together" in found else ""
    names = ("s_pos", "s_pos_low", "s_pos_high", "s_sym", "s_sym_low", "s_sym_high", "label")
    swaps: dict[str, Any] = {name: [found[name + ending].get(layer) for layer in layers] for name in names}
    options = cast("dict[str, Any]", directory.config["options"])
    return {**swaps, "labels": list(LABELS), "gamma": options["gamma"]}


def _run(directory: RunDirectory) -> dict[str, Any]:
    """Configuration and provenance; of the path only the name, which is the same wherever the run is kept."""
    provenance = dict(directory.provenance())
    provenance.pop("parts", None)
    # In the order in which it is read back from its file, whether it was made now or found.
    config = json.loads(canonical_json(directory.config))
    return {"name": directory.path.name, "config": config, "provenance": provenance}
