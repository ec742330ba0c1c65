"""Time of the three-axis fit beside what it replaces and what it runs on, with the floor set by bytes and flops.

    python benchmarks/axes.py                      # CPU: lengths, growth, SmolLM2
    python benchmarks/axes.py --device cuda        # against flash SDPA at 131,072 tokens, and 1,048,576 tokens; then
                                                   # on top of the forward pass of a random Llama of 8 billion weights

The floor is the larger of two times: reading q and k once at this machine's copy bandwidth, and the multiplications
of the method at its matrix rate, both measured in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from llama import passes, random_llama
from wherewhat.measures.axes.fit import AxesFit, fit_axes, fit_margins
from wherewhat.measures.axes.solver import Band, Margins


def main() -> None:
    """Run what the device allows and print tables."""
    parser = argparse.ArgumentParser(description="Time of the three-axis fit.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--no-model", action="store_true", help="leave whole models out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.device == "cpu":
        cpu_lengths(options)
        if not options.no_model:
            whole_model(options.repeat)
    else:
        gpu(options)
        if not options.no_model:
            large_model(options)


def cpu_lengths(options: argparse.Namespace) -> None:
    """Fit against a blocked float32 pass that makes all logits, and the same solve, over lengths."""
    bandwidth, rate = ceilings("cpu")
    print(f"copy {bandwidth / 1e9:.1f} GB/s, matrix product {rate / 1e9:.0f} GFLOP/s, {options.threads} threads")
    print(f"{'n':>7} {'fit ms':>9} {'method':>8} {'blocked ms':>11} {'speed-up':>9} {'floor ms':>9} {'of floor':>9}")
    times = {}
    for n in options.lengths:
        q, k = torch.randn(9, n, 64), torch.randn(3, n, 64)
        repeat = 3 if n >= 8192 else 51 if n <= 256 else options.repeat
        ours, blocked = alternate(lambda q=q, k=k: fit_axes(q, k), lambda q=q, k=k: blocked_fit(q, k), repeat)
        times[n] = ours
        floor = floor_seconds(9, 3, n, 64, 4, bandwidth, rate)
        method = fit_axes(q, k).method
        print(
            f"{n:7d} {ours * 1e3:9.1f} {method:>8} {blocked * 1e3:11.1f} {blocked / ours:8.1f}x {floor * 1e3:9.2f}"
            f" {ours / floor:8.1f}x"
        )
    if {4096, 16384} <= times.keys():
        print(f"growth from 4,096 to 16,384 tokens: {times[16384] / times[4096]:.2f}x (quadratic: 16x)")


def blocked_fit(q: Tensor, k: Tensor) -> AxesFit:
    """The plain pass below and the same solve as ``fit_axes``."""
    rows, columns, diagonals, squares = blocked_float32(q, k)
    band = Band(q.shape[1], q.shape[1], q.device)
    sums = band.pack(diagonals, rows, columns).double()
    return fit_margins(Margins(band, sums, squares.double()), torch.zeros_like(sums), method="blocked")


def blocked_float32(q: Tensor, k: Tensor, block: int = 512) -> tuple[Tensor, ...]:
    """Row, column, diagonal and square sums the plain way: all logits in float32, a block of rows at a time."""
    heads, n, d = q.shape
    groups = heads // k.shape[0]
    rows, columns, diagonals = torch.zeros(heads, n), torch.zeros(heads, n), torch.zeros(heads, n)
    squares = torch.zeros(heads)
    for start in range(0, n, block):
        stop = min(n, start + block)
        count = stop - start
        w = q[:, start:stop].reshape(k.shape[0], groups * count, d) @ k[:, :stop].mT
        w = w.view(heads, count, stop).tril_(start)
        rows[:, start:stop] = w.sum(-1)
        columns[:, :stop] += w.sum(-2)
        skewed = pad(w.flip(1), (0, count)).reshape(heads, -1)[:, : count * (count + stop - 1)]
        sums = skewed.view(heads, count, count + stop - 1).sum(1).flip(-1)[:, count - 1 :]
        diagonals[:, :stop] += sums
        squares += w.square_().sum((-1, -2))
    return rows, columns, diagonals, squares


def whole_model(repeat: int, tokens: int = 2048) -> None:
    """Decomposition of all heads of SmolLM2 on top of its own forward pass."""
    from wherewhat.captures.proof import capture, prove
    from wherewhat.measures.axes.fit import fit_layer
    from wherewhat.models.loader import load

    model = load("smollm2").model
    proof = prove(model)
    ids = torch.randint(0, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False, logits_to_keep=1)

    def decomposed() -> None:
        with torch.no_grad(), capture(model, fit_layer, proof=proof):
            model(ids, use_cache=False, logits_to_keep=1)

    both, plain = alternate(decomposed, forward, repeat)
    print(
        f"SmolLM2, {tokens} tokens, 270 heads: forward {plain:.2f} s, with the decomposition {both:.2f} s: "
        f"{(both - plain) / plain:.3f} of the forward on top"
    )


def gpu(options: argparse.Namespace) -> None:
    """One layer of 32 query and 8 key heads, against causal flash attention on the same tensors."""
    bandwidth, rate = ceilings(options.device)
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    for n in (131_072, 1_048_576):
        generator = torch.Generator(options.device).manual_seed(0)
        q, k = (
            torch.randn(h, n, 128, device=options.device, dtype=torch.bfloat16, generator=generator) for h in (32, 8)
        )
        torch.cuda.reset_peak_memory_stats()
        ours = seconds(lambda q=q, k=k: fit_axes(q, k, scale=128**-0.5), options.repeat)
        peak = torch.cuda.max_memory_allocated() / 2**30
        exact = fit_axes(q[:1].double(), k[:1].double(), scale=128**-0.5)
        error = float((fit_axes(q[:1], k[:1], scale=128**-0.5).r - exact.r).abs().max())
        floor = floor_seconds(32, 8, n, 128, 2, bandwidth, rate)
        line = f"{n:9,d} tokens: fit {ours * 1e3:7.1f} ms, {ours / floor:5.1f}x its floor, peak {peak:.1f} GiB, "
        line += f"r within {error:.1e} of float64"
        if n <= 131_072:
            attention = seconds(
                lambda q=q, k=k: scaled_dot_product_attention(
                    q[None], k[None], k[None], is_causal=True, enable_gqa=True
                ),
                3,
            )
            line += f"; flash SDPA {attention * 1e3:.1f} ms, ratio {ours / attention:.3f}"
        print(line)


def large_model(options: argparse.Namespace) -> None:
    """Decomposition of the 1,024 heads of a random Llama of 8 billion weights on top of its own forward pass."""
    from wherewhat.measures.axes.fit import fit_layer

    model = random_llama("8B", tokens=131_072, device=options.device, dtype="bfloat16")
    for n, allowed in {1024: 2.5, 4096: 1.4, 8192: 1.2, 32_768: 1.08}.items():
        forward, decomposed = passes(model, n, fit_layer)
        both, plain = alternate(decomposed, forward, options.repeat)
        ratio = f"with the fit {both / plain:.3f} of it (at most {allowed})"
        print(f"8B, {n:6,d} tokens: forward {plain * 1e3:7.1f} ms, {ratio}")


def floor_seconds(
    heads: int, kv_heads: int, n: int, d: int, size: int, bandwidth: float, rate: float, chunk: int = 128
) -> float:
    """The larger of reading q and k once and doing the method's multiplications."""
    moved = (heads + kv_heads) * n * d * size
    products = 2 * heads * n * d * (d + chunk) + 2 * kv_heads * n * d * d
    transforms = 5 * 2 * n * math.log2(2 * n) * (d // 2) * (heads + kv_heads)
    return max(moved / bandwidth, (products + transforms) / rate)


def ceilings(device: str) -> tuple[float, float]:
    """Bytes per second of a large copy (read plus written) and flops per second of a large matrix product."""
    big = device != "cpu"
    x = torch.randn(2**28 if big else 2**25, device=device)
    y = torch.empty_like(x)
    copied = 2 * x.numel() * 4 / seconds(lambda: y.copy_(x), 5)
    m = 8192 if big else 2048
    a = torch.randn(m, m, device=device, dtype=torch.bfloat16 if big else torch.float32)
    return copied, 2 * m**3 / seconds(lambda: a @ a, 5)


def alternate(one: Callable[[], object], other: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Median times of two functions that take turns."""
    one()
    other()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat):
        for function, found in zip((one, other), times, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(function: Callable[[], object], repeat: int) -> float:
    """Median time of a function, after one warm-up."""
    function()
    found = []
    for _ in range(repeat):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


if __name__ == "__main__":
    main()
