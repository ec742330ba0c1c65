"""Time and memory of near-far, whose far keys are searched, beside full causal attention and the window alone.

    python benchmarks/near_far.py                                        # needs a GPU with Triton
    python benchmarks/near_far.py --tokens 32768 131072 --far 0.25 --top 16 --base 500000

One layer of random queries, keys and values in bfloat16; every figure is the median over repetitions of one run. Time
depends on the frequencies: the fewer planes rotate slowly, the fewer dimensions the search needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llama import random_layer
from wherewhat.caches.plan import LayerHeads, Plan
from wherewhat.lengths.near_far import NearFar
from wherewhat.lengths.windows import LMInfinite


def main() -> None:
    """Print one line per length."""
    parser = argparse.ArgumentParser(description="Time and memory of near-far beside full attention.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--d", type=int, default=128, help="dimensions of a head")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--top", type=int, default=4, help="far keys of a query")
    parser.add_argument("--far", type=float, default=0.5, help="share of the heads that look far")
    parser.add_argument("--base", type=float, default=10_000.0, help="base of the rotation's frequencies")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}: {options.heads} heads over {options.kv_heads} of {options.d}, {options}")
    print(f"{'tokens':>8} {'full ms':>9} {'window ms':>10} {'near-far ms':>12} {'of full':>8} {'MiB':>7}")
    far = NearFar(window=options.window, top=options.top, plan=plan(options))
    near = LMInfinite(window=options.window)
    for n in options.tokens:
        attention = random_layer(
            n,
            heads=options.heads,
            kv_heads=options.kv_heads,
            d=options.d,
            device="cuda",
            dtype=torch.bfloat16,
            base=options.base,
        )
        q, k, v = attention.rot_q, attention.rot_k, attention.value
        full = milliseconds(lambda q=q, k=k, v=v: causal(q, k, v), options.repeat)
        window = milliseconds(lambda a=attention: near.attend(a), options.repeat)
        ours = milliseconds(lambda a=attention: far.attend(a), options.repeat)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        far.attend(attention)
        memory = (torch.cuda.max_memory_allocated() - held) / 2**20
        print(f"{n:8,} {full:9.1f} {window:10.1f} {ours:12.1f} {ours / full:8.2f} {memory:7,.0f}")


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Full causal attention by PyTorch's fastest kernel."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def plan(options: argparse.Namespace) -> Plan:
    """A plan in which evenly spaced heads look far."""
    count = round(options.far * options.heads)
    full = {0: tuple(i * options.heads // count for i in range(count))}
    return Plan("random", "", options.window, 4, {0: LayerHeads(options.heads, options.kv_heads)}, full, "head")


def milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Median time of a call on the GPU, after one that compiles its kernels."""
    run()
    times = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


if __name__ == "__main__":
    main()
