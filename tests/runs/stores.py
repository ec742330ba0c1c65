"""Small stores of finished runs, made through the store itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.layout import PartResult
from wherewhat.runs.provenance import Provenance
from wherewhat.runs.schema import ScoreSource


def finished(
    store: Path,
    values: Mapping[str | None, float],
    *,
    model: str = "pythia-160m",
    weights: str = "trained",
    seed: int = 0,
    metric: str = "r",
    measurement: str = "axes",
    extra: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """A run with two heads around each document's value; None is all documents together."""
    config = {"measurement": measurement, "model": model, "weights": weights, "seed": seed, "dtype": "float32"}
    config |= {"tokens": 64, "extra": dict(extra or {}), "metric": metric}
    run = RunDirectory.open(store, name=f"{measurement}-{model}-{weights}", config=config)
    with run.lock():
        for document, value in values.items():
            source = ScoreSource(measurement=measurement, model=model, weights=weights, seed=seed, document=document)
            rows = source.heads(metric, [value - 0.25, value + 0.25], layer=0)
            rows += [source.score("rank", None, layer=0)]
            run.save(document or "\n", PartResult(scores=rows, profiles={}), seconds=0.1)
        run.finish([document or "\n" for document in values], provenance=provenance(extra or {}))
    return run


def provenance(extra: Mapping[str, Any]) -> Provenance:
    return Provenance(
        model_hash="m",
        tokenizer_hash="t",
        text_hash="x" * 64,
        dtype="float32",
        device="cpu",
        seed=0,
        versions={},
        extra=dict(extra),
    )
