"""What a capture with an empty reducer costs in time and memory, against the plain forward pass of the same run.

    python benchmarks/capture.py --tokens 4096
    python benchmarks/capture.py --device cuda --dtype bfloat16 --random-llama

Time: plain and captured passes take turns in one process; opening the capture counts. Memory on CUDA is the
allocator's peak; on the CPU the peak of resident memory, plain and captured in fresh processes of their own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llama import passes, random_llama
from wherewhat.captures.attention import LayerAttention

RATIO_ALLOWED = 1.08
SLACK_BYTES = 64 * 2**20


def main() -> int:
    """Measure, print a table, and return 1 if a bound is missed."""
    options = _arguments()
    if options.peak_of is not None:
        _print_peak(options)
        return 0
    model = _model(options)
    seconds = _times(model, options)
    peaks = _cuda_peaks(model, options) if options.device.startswith("cuda") else _process_peaks(options)
    result = _summary(model, options, seconds, peaks)
    _print(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["time"]["ok"] and result["memory"]["ok"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of a capture against the plain forward pass.")
    parser.add_argument("--model", default="smollm2", help="embedded name, hub id, folder or .gguf file")
    parser.add_argument("--random-llama", action="store_true", help="a random Llama of 1.1 billion weights instead")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3, help="pairs of passes timed, and processes per peak")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--peak-of", choices=["plain", "capture"], help=argparse.SUPPRESS)
    return parser.parse_args()


def _model(options: argparse.Namespace) -> Any:
    if not options.random_llama:
        from wherewhat.models.loader import load

        return load(options.model, device=options.device, dtype=options.dtype).model
    return random_llama("1.1B", tokens=max(4096, options.tokens), device=options.device, dtype=options.dtype)


def _nothing(_: LayerAttention) -> None:
    """The empty reducer."""


def _passes(model: Any, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """The plain and the captured pass over the same random tokens."""
    return dict(zip(("plain", "capture"), passes(model, options.tokens, _nothing), strict=True))


def _times(model: Any, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Wall and processor seconds of passes that take turns, after one warm-up of each."""
    both = _passes(model, options)
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in both}
    for repeat in range(options.repeat + 1):
        for name, run in both.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if repeat:
                seconds[name]["wall"].append(time.perf_counter() - wall)
                seconds[name]["cpu"].append(time.process_time() - cpu)
    return seconds


def _launch_seconds(model: Any, options: argparse.Namespace) -> float | None:
    """Median time that the CPU needs to launch the plain pass, without waiting for the GPU."""
    if not options.device.startswith("cuda"):
        return None
    ids = torch.zeros((1, options.tokens), dtype=torch.int64, device=options.device)
    found = []
    for _ in range(options.repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        found.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(found)


def _cuda_peaks(model: Any, options: argparse.Namespace) -> dict[str, list[int]]:
    peaks: dict[str, list[int]] = {}
    for name, run in _passes(model, options).items():
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks[name] = [torch.cuda.max_memory_allocated()]
    return peaks


def _process_peaks(options: argparse.Namespace) -> dict[str, list[int]]:
    """Peak resident bytes of plain and captured passes, each in fresh processes, by turns."""
    peaks: dict[str, list[int]] = {"plain": [], "capture": []}
    command = [sys.executable, __file__, *sys.argv[1:]]
    # Without this glibc keeps freed blocks for later, and the peak says what it kept: tens of MiB, by chance.
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    for _ in range(options.repeat):
        for name, found in peaks.items():
            one = [*command, "--peak-of", name]
            done = subprocess.run(one, check=True, stdout=subprocess.PIPE, text=True, env=exact)
            found.append(int(done.stdout.split()[-1]))
    return peaks


def _print_peak(options: argparse.Namespace) -> None:
    """Print how far resident memory rises over the idle model during one pass."""
    model = _model(options)
    run = _passes(model, options)[options.peak_of]
    run()  # buffers that live on are not the pass's
    _give_back_free_memory()
    # Linux resets the peak on request, so that loading the model does not hide the pass.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    idle = _status("VmRSS")
    run()
    print(_status("VmHWM") - idle)


def _give_back_free_memory() -> None:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another C library keeps its own counsel
        return


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: measuring memory on the CPU needs Linux")


def _summary(
    model: Any, options: argparse.Namespace, seconds: dict[str, dict[str, list[float]]], peaks: dict[str, list[int]]
) -> dict[str, Any]:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    size = torch.empty((), dtype=getattr(torch, options.dtype)).element_size()
    floor = size * options.tokens * (heads + kv_heads) * head_dim
    medians = {name: {clock: statistics.median(x) for clock, x in clocks.items()} for name, clocks in seconds.items()}
    ratios = {clock: medians["capture"][clock] / medians["plain"][clock] for clock in ("wall", "cpu")}
    above = statistics.median(peaks["capture"]) - statistics.median(peaks["plain"])
    return {
        "model": "random llama" if options.random_llama else options.model,
        "tokens": options.tokens,
        "device": options.device,
        "dtype": options.dtype,
        "implementation": model.config._attn_implementation,
        "time": {
            "seconds": seconds,
            "median": medians,
            "launch": _launch_seconds(model, options),
            "ratio": ratios["wall"],
            "cpu_ratio": ratios["cpu"],
            "allowed": RATIO_ALLOWED,
            "ok": ratios["wall"] <= RATIO_ALLOWED,
        },
        "memory": {
            "peak_bytes": peaks,
            "above_plain_bytes": above,
            "one_layer_q_and_k_bytes": floor,
            "allowed_bytes": floor + SLACK_BYTES,
            "ok": above <= floor + SLACK_BYTES,
        },
    }


def _print(result: dict[str, Any]) -> None:
    mib = 2**20
    times, memory = result["time"], result["memory"]
    verdict = {True: "ok", False: "MISSED"}
    what = (result[key] for key in ("model", "device", "dtype", "implementation"))
    print(f"{result['tokens']} tokens through {', '.join(what)}")
    print(f"{'':14}{'plain':>12}{'capture':>12}{'cost':>12}{'allowed':>12}")
    for clock, ratio in (("wall", times["ratio"]), ("cpu", times["cpu_ratio"])):
        plain, captured = (times["median"][name][clock] for name in ("plain", "capture"))
        row = f"{clock + ' seconds':14}{plain:12.3f}{captured:12.3f}{ratio:11.3f}x"
        print(row + (f"{times['allowed']:11.2f}x  {verdict[times['ok']]}" if clock == "wall" else ""))
    if times["launch"] is not None:
        print(f"{'launch only':14}{times['launch']:12.3f}  near the wall time, the CPU is the limit and not the GPU")
    plain, captured = (statistics.median(memory["peak_bytes"][name]) / mib for name in ("plain", "capture"))
    print(
        f"{'peak MiB':14}{plain:12.1f}{captured:12.1f}{memory['above_plain_bytes'] / mib:+12.1f}"
        f"{memory['allowed_bytes'] / mib:12.1f}  {verdict[memory['ok']]}"
    )
    print(f"one layer's q and k: {memory['one_layer_q_and_k_bytes']} bytes")


if __name__ == "__main__":
    sys.exit(main())
