"""Numbers of a run as a whole, document by document, and their means with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from wherewhat.pipeline.summary import interval
from wherewhat.report.encoding import rounded
from wherewhat.store import RunDirectory, profile_name


def documents(directory: RunDirectory) -> list[str]:
    """Names of the documents of a run, in order."""
    return [str(document["name"]) for document in cast("list[dict[str, Any]]", directory.config["documents"])]


def scores_by_document(directory: RunDirectory) -> dict[str, dict[str, float]]:
    """Numbers of the model as a whole by document and metric; undefined ones are left out."""
    columns = directory.scores().select(["document", "layer", "metric", "value"]).to_pydict()
    found: dict[str, dict[str, float]] = {name: {} for name in documents(directory)}
    for document, layer, metric, value in zip(*columns.values(), strict=True):
        if document is not None and layer is None and value is not None:
            found[document][metric] = value
    return found


def curves_by_document(directory: RunDirectory, curve: str) -> list[Tensor]:
    """A curve of the model as a whole, of every document that has it."""
    profiles = directory.profiles()
    names = (profile_name(document, None, curve) for document in documents(directory))
    return [profiles[name] for name in names if name in profiles]


def plain_interval(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean and 95 % interval over documents as a page carries them; None of nothing."""
    if not values:
        return None
    found = interval(values)
    return {"mean": rounded(found.mean), "low": rounded(found.low), "high": rounded(found.high)}


def mean_of(found: dict[str, dict[str, float]], metric: str, *, less: str | None = None) -> dict[str, Any] | None:
    """Interval of a metric over the documents that have it; with ``less``, of its difference to another in each."""
    having = [m for m in found.values() if metric in m and (less is None or less in m)]
    return plain_interval([m[metric] - (0.0 if less is None else m[less]) for m in having])
