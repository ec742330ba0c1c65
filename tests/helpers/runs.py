"""A small run, computed the same way by every test and every process, and small stores of finished runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wherewhat.measures.measurement import categories_of, find_measurement, measurements
from wherewhat.runs.directory import Provenance, RunDirectory
from wherewhat.scores import Column, Scores, stored_metric

CONFIG = {"measurement": "entropy", "model": "tiny", "weights": "trained", "seed": 0, "tokens": 128, "rate": 0.1}
KEYS = ["Moby-Dick/1", "../Émile", "a", "B"]
RESULTS = ("scores.parquet", "profiles.safetensors", "config.json")


def compute(key: str) -> Scores:
    """Scores that depend on the name of a part alone."""
    generator = torch.Generator().manual_seed(sum(key.encode()))
    layers = []
    for layer in range(2):
        values = torch.rand(3, generator=generator, dtype=torch.float64)
        curve = Column(torch.rand(3, 16, generator=generator), ("head", "distance"))
        layers.append(Scores(layer=layer, heads={"mean": values}, whole={"rank": torch.nan}, curves={"decay": curve}))
    return Scores(layers=layers).checked([stored_metric("mean", unit="nats"), stored_metric("rank")], of="entropy")


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
                run.save(key, compute(key), document=key, seconds=0.5)
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
            heads = {metric: torch.tensor([value - 0.25, value + 0.25], dtype=torch.float64)}
            scores = Scores(layers=[Scores(layer=0, heads=heads, whole={"rank": torch.nan})])
            declared = categories_of(find_measurement(measurement)) if measurement in measurements() else {}
            known = [stored_metric(metric, categories=declared.get(metric, ())), stored_metric("rank")]
            run.save(document or "\n", scores.checked(known, of=measurement), document=document, seconds=0.1)
        run.finish([document or "\n" for document in values], provenance=provenance(extra, text=text))
    return run
