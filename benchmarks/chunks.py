"""Time and memory of a long text in chunks through the key-value cache, against one pass, in the same run.

    python benchmarks/chunks.py --tokens 2048 --chunk 512                                  # a CPU, SmolLM2
    python benchmarks/chunks.py --device cuda --dtype bfloat16 --random-llama --tokens 131072 --chunk 4096

Each way hands every layer to an empty reducer. Memory is the allocator's peak on CUDA, less the weights; the CPU's is
not measured.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from llama import random_llama
from wherewhat.captures.proof import prove
from wherewhat.runs.subject import ModelSubject


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Chunks against one pass.")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, nargs="+", default=[512])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--random-llama", action="store_true", help="a random Llama of 1.1 billion weights")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    model = _model(options)
    loaded: Any = SimpleNamespace(model=model)
    proof = prove(model)
    ways = {"one pass": ModelSubject(loaded, proof)}
    for chunk in options.chunk:
        ways[f"chunk {chunk:,}"] = ModelSubject(loaded, proof, chunk=chunk)
        if options.device != "cpu":
            ways[f"chunk {chunk:,}, offloaded"] = ModelSubject(loaded, proof, chunk=chunk, offload=True)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, rows, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    print(f"{options.tokens:,} tokens, {options.dtype}, {options.device}")
    print(f"{'way':>28} {'seconds':>9} {'of one pass':>12} {'GiB':>7}")
    first = None
    for name, subject in ways.items():
        try:
            seconds, peak = _measured(subject, ids, options)
        except torch.OutOfMemoryError:
            print(f"{name:>28} out of memory")
            torch.cuda.empty_cache()
            continue
        first = first or seconds
        print(f"{name:>28} {seconds:9.3f} {seconds / first:12.2f} {peak / 2**30:7.2f}")


def _measured(subject: ModelSubject, ids: torch.Tensor, options: argparse.Namespace) -> tuple[float, int]:
    cuda = options.device != "cpu"
    subject.run(ids, lambda attention: None)  # proves chunks, and warms up
    times = []
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(options.repeat):
        started = time.perf_counter()
        subject.run(ids, lambda attention: None)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times), torch.cuda.max_memory_allocated() - before if cuda else 0


def _model(options: argparse.Namespace) -> Any:
    if not options.random_llama:
        import wherewhat

        return wherewhat.load("smollm2", device=options.device, dtype=options.dtype).model
    return random_llama("1.1B", tokens=options.tokens, device=options.device, dtype=options.dtype)


if __name__ == "__main__":
    main()
