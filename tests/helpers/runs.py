"""A small run, computed the same way by every test and every process, and small stores of finished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.layout import PartResult, Provenance
from wherewhat.runs.schema import ScoreSource, profile_name
from wherewhat.scores import Column

CONFIG = {"measurement": "entropy", "model": "tiny", "tokens": 128, "rate": 0.1, "layers": [0, 1]}
KEYS = ["Moby-Dick/1", "../Émile", "a", "B"]
RESULTS = ("scores.parquet", "profiles.safetensors", "config.json")


def compute(key: str) -> PartResult:
    """A part whose numbers depend on its name alone."""
    generator = torch.Generator().manual_seed(sum(key.encode()))
    source = ScoreSource(measurement="entropy", model="tiny", weights="trained", seed=0, document=key)
    rows = []
    profiles = {}
    for layer in range(2):
        values = torch.rand(3, generator=generator, dtype=torch.float64)
        rows += source.heads("mean", values, layer=layer, unit="nat")
        rows.append(source.score("rank", None, layer=layer))
        curve = torch.rand(3, 16, generator=generator)
        profiles[profile_name(key, layer, "decay")] = Column(curve, ("head", "distance"))
    return PartResult(scores=rows, profiles=profiles)


def provenance(extra: Mapping[str, Any] | None = None, *, text: str = "x" * 64) -> Provenance:
    return Provenance(
        model_hash="m",
        tokenizer_hash="t",
        text_hash=text,
        dtype="float32",
        device="cpu",
        seed=0,
        versions={},
        extra=dict(extra or {}),
    )


def open_run(parent: Path) -> RunDirectory:
    return RunDirectory.open(parent, name="entropy tiny", config=CONFIG)


def complete_run(parent: Path, keys: Sequence[str] = KEYS) -> tuple[RunDirectory, list[str]]:
    """Opens or resumes the run and finishes it; also gives the parts that had to be computed."""
    run = open_run(parent)
    computed = []
    with run.lock():
        for key in keys:
            if not run.has(key):
                computed.append(key)
                run.save(key, compute(key), seconds=0.5)
        run.finish(keys, provenance=provenance())
    return run, computed


def result_bytes(run: RunDirectory) -> dict[str, bytes]:
    return {name: (run.path / name).read_bytes() for name in RESULTS}


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


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
    text: str = "x" * 64,
    config: Mapping[str, Any] | None = None,
) -> RunDirectory:
    """A run with two heads around each document's value; None is all documents together."""
    settings = {"measurement": measurement, "model": model, "weights": weights, "seed": seed, "dtype": "float32"}
    settings |= {"tokens": 64, "extra": dict(extra or {}), "metric": metric, **(config or {})}
    run = RunDirectory.open(store, name=f"{measurement}-{model}-{weights}", config=settings)
    with run.lock():
        for document, value in values.items():
            source = ScoreSource(measurement=measurement, model=model, weights=weights, seed=seed, document=document)
            rows = source.heads(metric, [value - 0.25, value + 0.25], layer=0)
            rows += [source.score("rank", None, layer=0)]
            run.save(document or "\n", PartResult(scores=rows, profiles={}), seconds=0.1)
        run.finish([document or "\n" for document in values], provenance=provenance(extra, text=text))
    return run
