"""Run directories → plain data, all that a page shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from wherewhat.measure.registry import find
from wherewhat.measure.swaps.labels import LABELS
from wherewhat.pipeline.summary import Interval
from wherewhat.report.curves import controlled_distance, first_document, head_records, turns_per_token
from wherewhat.report.encoding import rounded
from wherewhat.report.headline import Number, Value, headline
from wherewhat.report.looking import Look
from wherewhat.report.measuring import Runs
from wherewhat.report.tables import Heads, head_means, metric_tables
from wherewhat.store import RunDirectory


def collect(runs: Runs, look: Look, *, command: str) -> dict[str, Any]:
    """The data of a page.

    Args:
        runs: Finished runs.
        look: Logits and tokens of the first document.
        command: The command that makes the same page.
    """
    request, first = runs.first
    means = {(r.measurement, str(r.model.weights)): head_means(directory) for r, directory in runs.finished}
    layers = sorted(look.logits)
    return {
        "model": {
            **look.facts,
            "layers": layers,
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
        "method": [
            {"name": name, "summary": find(name).summary, "limits": find(name).limits}
            for name in dict.fromkeys(r.measurement for r, _ in runs.finished)
        ],
        "left_out": runs.left_out,
        "runs": [_run(directory) for _, directory in runs.finished],
        "command": command,
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
        "reading": number.reading,
    }


def _swaps(runs: Runs, means: Mapping[tuple[str, str], Mapping[str, Heads]], layers: list[int]) -> Any:
    """Scores, intervals and labels of every head; over all documents together where there are several."""
    directory = runs.find("heads")
    found = means.get(("heads", "trained"), {})
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
    return {"name": directory.path.name, "config": directory.config, "provenance": provenance}
