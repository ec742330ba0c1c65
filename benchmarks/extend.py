"""Time and memory of one layer of window methods against full causal attention, in the same run.

    python benchmarks/extend.py --device cuda                       # 65,536 tokens, window 4,096, bfloat16
    python benchmarks/extend.py --tokens 8192 --window 512          # a CPU

Methods and full attention take turns; medians count. The kernels that can do the window are timed apart. Before that,
the result is compared with the plain blocks of the same rule in float32 on a shorter text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from llama import random_layer
from wherewhat.caches.kernels import Kernel, band_attention
from wherewhat.captures.attention import LayerAttention
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.windows import LMInfinite, SlidingWindow, StreamingLLM

SPEED_UP_WANTED = 5.0
GROWTH_ALLOWED = 1.15
"""Peak memory per token at the full length over that at half of it."""


def main() -> int:
    """Measure, print tables, and return 1 if a bound is missed on a GPU."""
    options = _arguments()
    torch.set_num_threads(options.threads)
    cuda = options.device.startswith("cuda")
    print(
        f"{options.tokens:,} tokens, window {options.window:,}, {options.heads} query and {options.kv_heads} key heads"
    )
    methods: tuple[LengthMethod, ...] = (
        LMInfinite(window=options.window),
        StreamingLLM(window=options.window),
        SlidingWindow(window=options.window),
    )
    result: dict[str, object] = {"options": vars(options) | {"json": None}}
    result["errors"] = {method.name: _error(method, options) for method in methods}
    print("largest error against float32 blocks:", result["errors"])
    result["kernels_ms"] = _kernels(options)
    rows = {method.name: _against_full(method, options) for method in methods}
    result["methods"] = rows
    print(f"{'method':>16} {'ms':>9} {'full ms':>9} {'speed-up':>9} {'peak MiB':>9} {'per token':>10}")
    for name, row in rows.items():
        print(
            f"{name:>16} {row['ms']:9.2f} {row['full_ms']:9.2f} {row['speed_up']:8.2f}x {row['peak_mib']:9.0f} "
            f"{row['growth']:9.2f}x"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    first = rows["lm-infinite"]
    return int(cuda and (first["speed_up"] < SPEED_UP_WANTED or first["growth"] > GROWTH_ALLOWED))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Window methods against full causal attention.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--window", type=int, default=4_096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--block-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.device.startswith("cuda") else "float32")
    return options


def _layer(options: argparse.Namespace, n: int, dtype: torch.dtype) -> LayerAttention:
    """Random queries, keys and values as a layer of a Llama would hold them."""
    return random_layer(
        n, heads=options.heads, kv_heads=options.kv_heads, d=options.head_dim, device=options.device, dtype=dtype
    )


def _error(method: LengthMethod, options: argparse.Namespace) -> float:
    """Largest difference from the blocks in float32 on the same (rounded) tensors, over the largest output."""
    dtype = getattr(torch, options.dtype)
    layer = _layer(options, min(options.tokens, 2 * options.window + 77, 8_192 + 77), dtype)
    short = type(method)(window=min(options.window, layer.n // 2 - 20))  # type: ignore[call-arg]
    got = short.attend(layer, block_mib=options.block_mib)
    # A soft-cap too high to matter keeps the kernels out.
    plain = LayerAttention(**{**vars(layer), "softcap": 1e6} | {n: getattr(layer, n).float() for n in _TENSORS})
    want = short.attend(plain, block_mib=options.block_mib)
    assert got is not None
    assert want is not None
    return float((got.float() - want).abs().max() / want.abs().max())


_TENSORS = ("rot_q", "rot_k", "value")


def _kernels(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the window alone by each kernel."""
    layer = _layer(options, options.tokens, getattr(torch, options.dtype))
    q, k, v = layer.rot_q, layer.rot_k, layer.value
    names: tuple[Kernel | Literal["banded"], ...] = ("cudnn", "flash", "banded") if q.is_cuda else ("cpu",)
    found = {}
    for name in names:

        def window(name: Kernel | Literal["banded"] = name) -> object:
            if name == "banded":
                return _banded(q, k, v, options.window, layer.scale)
            return band_attention(q, k, v, window=options.window, scale=layer.scale, kernel=name)

        try:
            window()
            found[name] = statistics.median(_timed(window, options.device) for _ in range(options.repeat)) * 1e3
            print(f"window by {name}: {found[name]:.2f} ms")
        except RuntimeError as error:
            print(f"window by {name}: {str(error).splitlines()[0]}")
    return found


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attention to the window by flash attention without chunks."""
    n, by_token = q.shape[2], (x.transpose(1, 2) for x in (q, k, v))
    found: Tensor = torch.ops.aten._flash_attention_forward(
        *by_token, None, None, n, n, 0.0, True, False, scale=scale, window_size_left=window - 1, window_size_right=0
    )[0]
    return found


def _against_full(method: LengthMethod, options: argparse.Namespace) -> dict[str, float]:
    """Medians of turns, and peak memory beyond the inputs at half and at full length."""
    dtype = getattr(torch, options.dtype)
    layer = _layer(options, options.tokens, dtype)

    def ours(layer: LayerAttention = layer) -> object:
        return method.attend(layer, block_mib=options.block_mib)

    def full() -> object:
        return scaled_dot_product_attention(
            layer.rot_q, layer.rot_k, layer.value, is_causal=True, scale=layer.scale, enable_gqa=True
        )

    ours()
    full()
    pairs = [(_timed(ours, options.device), _timed(full, options.device)) for _ in range(options.repeat)]
    mine, theirs = (statistics.median(x) * 1e3 for x in zip(*pairs, strict=True))
    peak, half = _peak(ours, options.device), float("nan")
    if peak:
        shorter = _layer(options, options.tokens // 2, dtype)
        half = _peak(lambda: ours(shorter), options.device)
    growth = peak / (2 * half)
    return {"ms": mine, "full_ms": theirs, "speed_up": theirs / mine, "peak_mib": peak / 2**20, "growth": growth}


def _timed(work: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _peak(work: Callable[[], object], device: str) -> float:
    """Bytes allocated beyond what was there before; 0 on a CPU, where the allocator does not tell."""
    if not device.startswith("cuda"):
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


if __name__ == "__main__":
    sys.exit(main())
