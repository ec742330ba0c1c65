"""Time of ``wherewhat compare`` on a store of many runs, without an index and with one.

python benchmarks/compare.py --runs 10000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from wherewhat.runs.comparison import compare
from wherewhat.runs.directory import Provenance, RunDirectory
from wherewhat.scores import Scores, stored_metric


def one_run(parent: Path) -> dict[str, bytes]:
    """Return the files of a finished run with two documents and two heads."""
    config = {"measurement": "axes", "model": "m", "weights": "trained", "seed": 0, "dtype": "float32", "tokens": 64}
    run = RunDirectory.open(parent, name="axes", config=config)
    with run.lock():
        for document, value in (("a", 0.5), ("b", 0.7)):
            heads = {"r": torch.tensor([value - 0.25, value + 0.25])}
            scores = Scores(layers=[Scores(layer=0, heads=heads)]).checked([stored_metric("r")], of="axes")
            run.save(document, scores, document=document, seconds=0.1)
        hashes = {"model_hash": "m", "tokenizer_hash": "t", "text_hash": "x" * 64}
        run.finish("ab", provenance=Provenance(**hashes, dtype="float32", device="cpu", seed=0, versions={}, extra={}))
    return {path.name: path.read_bytes() for path in run.path.glob("*.*")}


def main() -> None:
    """Write the store, then compare it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    count = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        files = one_run(Path(folder) / "one")
        config, provenance = (json.loads(files[f"{name}.json"]) for name in ("config", "provenance"))
        for number in range(count):
            place = Path(folder) / "store" / f"axes-{number:012d}"
            place.mkdir(parents=True)
            own = config | {"seed": number // 20, "model": f"pythia-{number % 4 + 1}m"}
            step = provenance | {"extra": {"checkpoint": f"step{10 ** (number % 5)}"}}
            changed = {"config.json": json.dumps(own).encode(), "provenance.json": json.dumps(step).encode()}
            for name, content in (files | changed).items():
                (place / name).write_bytes(content)
        for what in ("without an index", "with one"):
            wall, cpu = time.perf_counter(), time.process_time()
            assert compare([Path(folder) / "store"]).runs == count
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{count:,} runs {what}: {wall:.1f} s, {cpu:.1f} s of CPU time")


if __name__ == "__main__":
    main()
