"""Time from ``load`` to the first pass, in forward passes of 512 tokens: the first time, and later.

    python benchmarks/load.py
    python benchmarks/load.py smollm2 model.gguf ./my-model --threads 1

Without models: the embedded GGUF file, and the same model saved as a folder. Each model is loaded once before, so that
imports do not count. Then loads with an empty cache, loads with that cache and passes take turns; their medians are
printed. Passes are the processor time of this process. Seconds are those of the clock, in which a file that is not
known is also tried in another process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import wherewhat

TOKENS = 512


def timed(step: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what a step returns, its processor time and its duration."""
    cpu, clock = time.process_time(), time.perf_counter()
    result = step()
    return result, time.process_time() - cpu, time.perf_counter() - clock


@contextmanager
def saved_folder(models: list[str]) -> Iterator[list[str]]:
    """Yield the models, or the embedded one and its folder if there are none."""
    if models:
        yield models
        return
    with tempfile.TemporaryDirectory() as folder:
        embedded = wherewhat.load(device="cpu")
        target = Path(folder) / "smollm2-folder"
        embedded.model.save_pretrained(target)
        embedded.tokenizer.save_pretrained(target)
        yield ["smollm2", str(target)]


def measure(model: str, device: str, repeats: int) -> str:
    """Return the row of a model."""
    first, later, passes = [], [], []
    for repeat in range(repeats + 1):
        with tempfile.TemporaryDirectory() as cache:
            for times in (first, later):
                loaded, cpu, clock = timed(lambda: wherewhat.load(model, device=device, cache_dir=cache))
                times.append((cpu, clock))
        module = loaded.model
        ids = torch.arange(TOKENS, device=module.device)[None] % module.get_input_embeddings().weight.shape[0]
        with torch.no_grad():
            passes.append(timed(lambda: module(ids, use_cache=False).logits[0, -1, 0].item())[1:])  # noqa: B023
        if repeat == 0:  # imports
            first, later, passes = [], [], []
    plain = statistics.median(cpu for cpu, _ in passes)
    cells = [Path(model).name, f"{statistics.median(clock for _, clock in passes):.2f} s"]
    for times in (first, later):
        cells += [f"{statistics.median(cpu for cpu, _ in times) / plain:.2f}"]
        cells += [f"{statistics.median(clock for _, clock in times):.1f} s"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print one row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| model | pass | first load, passes | first load | later loads, passes | later loads |")
    print("|---|---|---|---|---|---|")
    with saved_folder(options.models) as models:
        for model in models:
            print(measure(model, options.device, options.repeats), flush=True)


if __name__ == "__main__":
    main()
