"""Time to write and read the scores and curves of one document, beside an earlier commit with one object per number.

python benchmarks/store.py --before f292b0a

The scores are those of ``heads`` and of ``axes`` for a model of 32 layers with 32 heads on 512 tokens. Writing is from
tensors to a finished run directory, reading from the directory to tensors, and to the table of metrics with intervals.
Both versions run in turn, several times, each in its own process; the ratio is that of the medians. Their floor is the
time to write the same bytes with a checksum, and to read them.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

LAYERS, HEADS, TOKENS = 32, 32, 512
ROUNDS = 3


def find_measurement(name: str) -> Any:
    """Return a measurement by name, in this version or an earlier one."""
    try:
        from wherewhat.measures.measurement import find_measurement as found
    except ImportError:
        from wherewhat.measures.registry import find_measurement as found
    return found(name)


def columns(measurement: str, generator: torch.Generator) -> tuple[list[str], list[str], dict[str, tuple[str, ...]]]:
    """Return the names of the values per head, of those per layer, and of the curves with their axes."""
    metrics = [metric.name for metric in find_measurement(measurement).metrics]
    controls = [metric.control for metric in find_measurement(measurement).metrics if metric.control]
    if measurement == "axes":
        kept = [name for name in metrics if not name.startswith(("pooled", "r_median", "heads_high", "r_shared"))]
        kept += ["r_ab", "r_ac", "r_b", "unique_b", "sse", "tss", "logit_mean", "adjusted_r2"]
        curves = {"a": ("head", "distance"), "b": ("head", "query"), "c": ("head", "key")}
        return kept, ["noise_floor", "r_behaviour_gaussian", "r_gaussian", "pairs"], curves
    kept = [name for name in metrics if not name.startswith(("heads_", "correlation", "rerun"))]
    kept = [name for name in kept if "correlation" not in name]
    kept += [f"{name}{bound}" for name in ("s_pos", "s_sym") for bound in ("_low", "_high")] + [
        "label",
        "label_no_sink",
    ]
    return kept, sorted(set(controls)), {"s_pos_by_query": ("head", "query"), "s_sym_by_query": ("head", "query")}


def one_round(measurement: str, folder: Path) -> dict[str, float]:
    """Write and read once; return seconds by step."""
    from wherewhat.runs.directory import Provenance, RunDirectory
    from wherewhat.runs.results import StoredRun

    generator = torch.Generator().manual_seed(0)
    heads, whole, curves = columns(measurement, generator)
    code = {"label": 3.0, "label_no_sink": 3.0}
    tensors = [
        (
            {name: torch.rand(HEADS, generator=generator) * code.get(name, 1.0) for name in heads},
            dict.fromkeys(whole, 0.5),
            {
                name: torch.rand(HEADS, TOKENS if "a" < name < "d" or name == "a" else 16, generator=generator)
                for name in curves
            },
        )
        for _ in range(LAYERS)
    ]
    for values, _, _ in tensors:
        for name in code.keys() & values.keys():
            values[name] = values[name].floor()
    config = {
        "measurement": measurement,
        "options": {},
        "model": "m",
        "weights": "trained",
        "seed": 0,
        "dtype": "float32",
        "tokens": TOKENS,
        "documents": [{"name": "a", "sha256": "0" * 64}],
    }
    hashes = {"model_hash": "m", "tokenizer_hash": "t", "text_hash": "x" * 64}
    provenance = Provenance(**hashes, dtype="float32", device="cpu", seed=0, versions={}, extra={})
    run = RunDirectory.open(folder, name=measurement, config=config)
    with run.lock():
        started = time.perf_counter()
        save(run, measurement, tensors, curves)
        run.finish("a", provenance=provenance)
        written = time.perf_counter() - started
    started = time.perf_counter()
    found = RunDirectory.load(run.path)
    read(found)
    done = time.perf_counter() - started
    started = time.perf_counter()
    assert StoredRun(found).summaries
    summaries = time.perf_counter() - started
    paths = [path for path in run.path.rglob("*") if path.suffix in (".parquet", ".safetensors")]
    content = list({path.stat().st_ino: path.read_bytes() for path in paths}.values())
    started = time.perf_counter()
    for number, data in enumerate(content):
        with (folder / str(number)).open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        hashlib.sha256((folder / str(number)).read_bytes())
    floor = time.perf_counter() - started
    return {"write": written, "read": done, "summaries": summaries, "floor": floor, "bytes": sum(map(len, content))}


def save(run: Any, measurement: str, tensors: Any, curves: Any) -> None:
    """Save one document, with the record of this version or the objects of an earlier one."""
    try:
        from wherewhat.scores import Column, Scores
    except ImportError:
        from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores
        from wherewhat.runs import execution
        from wherewhat.runs.schema import ScoreSource

        declared = find_measurement(measurement)
        layers = [
            LayerScores(i, heads, whole, {name: Curve(x, curves[name]) for name, x in of_layer.items()})
            for i, (heads, whole, of_layer) in enumerate(tensors)
        ]
        source = ScoreSource(measurement=measurement, model="m", weights="trained", seed=0, document="a")
        metrics = declared.all_metrics(declared.config())
        run.save("a", execution._part(metrics, source, DocumentScores(layers)), seconds=0.1)
        return
    from wherewhat.measures.measurement import declared_metrics

    declared = find_measurement(measurement)
    layers = [
        Scores(layer=i, heads=heads, whole=whole, curves={n: Column(x, curves[n]) for n, x in of_layer.items()})
        for i, (heads, whole, of_layer) in enumerate(tensors)
    ]
    scores = Scores(layers=layers).checked(declared_metrics(declared, declared.config()), of=measurement)
    run.save("a", scores, document="a", seconds=0.1)


def read(run: Any) -> None:
    """Read all scores and curves as tensors."""
    try:
        from wherewhat.runs.schema import stored_scores
    except ImportError:
        from wherewhat.runs.results import stored_document

        stored_document(run.scores(), run.profiles())
        return
    stored_scores(run.scores(), run.profiles())


def main() -> None:
    """Compare with an earlier commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="also measure this commit of the repository")
    parser.add_argument("--one", metavar="MEASUREMENT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            one_round(given.one, Path(folder) / "first")  # imports and allocators
            gc.collect()
            gc.freeze()  # what is imported is not searched for garbage again, in neither version
            print(json.dumps([one_round(given.one, Path(folder) / str(i)) for i in range(3)]))
        return
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        sources = {"now": root / "src"}
        if given.before:
            packed = subprocess.run(["git", "archive", given.before, "src"], cwd=root, capture_output=True, check=True)
            with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
                archive.extractall(folder, filter="data")
            sources["before"] = Path(folder) / "src"
        for measurement in ("heads", "axes"):
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
            for _ in range(ROUNDS):
                for name, source in sources.items():
                    command = [sys.executable, __file__, "--one", measurement]
                    environment = {**os.environ, "PYTHONPATH": str(source)}
                    printed = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
                    found[name] += json.loads(printed.stdout)
            show(measurement, found)


def show(measurement: str, found: dict[str, list[dict[str, float]]]) -> None:
    """Print medians in milliseconds, and the ratio to the earlier commit."""
    print(f"{measurement}: {LAYERS * HEADS:,} heads, {TOKENS} tokens")
    medians = {
        name: {step: statistics.median(x[step] for x in rows) for step in rows[0]} for name, rows in found.items()
    }
    for step in ("write", "read", "summaries", "floor"):
        times = ", ".join(f"{name} {values[step] * 1e3:.1f} ms" for name, values in medians.items())
        ratio = f", ratio {medians['now'][step] / medians['before'][step]:.3f}" if "before" in medians else ""
        print(f"  {step}: {times}{ratio}")
    totals = {name: values["write"] + values["read"] + values["summaries"] for name, values in medians.items()}
    if "before" in totals:
        print(f"  all: ratio {totals['now'] / totals['before']:.3f}")
    sizes = ", ".join(f"{name} {values['bytes']:,.0f}" for name, values in medians.items())
    print(f"  bytes: {sizes}")


if __name__ == "__main__":
    main()
