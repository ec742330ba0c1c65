"""Time of all-swap scores beside swaps that are really made, and of all heads of SmolLM2.

    python benchmarks/swaps.py                # one layer against a sample of real swaps, then all 270 heads
    python benchmarks/swaps.py --all          # every one of the layer's swaps made for real, and scores compared

The floor is the time of the multiplications that M, the logits of every content at every place, takes at this
machine's matrix rate, measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.blocks import Blocks, blocks
from wherewhat.captures.proof import Proof, capture, prove
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.placement import choose_queries, reference_scores
from wherewhat.models.loader import load
from wherewhat.text.files import read_documents


def main() -> None:
    """Load SmolLM2 and print both comparisons."""
    parser = argparse.ArgumentParser(description="Time of swap scores.")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--layer", type=int, default=15)
    parser.add_argument("--sample", type=int, default=200, help="real swaps to time")
    parser.add_argument("--all", action="store_true", help="make all of the layer's swaps for real")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load("smollm2")
    ids = loaded.encode(read_documents(None, count=1)[0].text, tokens=options.tokens)[None]
    proof = prove(loaded.model)
    with blocks(loaded.model, ids, proof) as again:
        one_layer(again, options)
    whole_model(loaded.model, proof, ids)


def one_layer(again: Blocks, options: argparse.Namespace) -> None:
    """All swaps before the last query of one layer: at once, and one by one."""
    layer, last = options.layer, options.tokens - 1
    before = again.run(layer, again.hidden(layer))
    ours = median_seconds(lambda: layer_swaps(before, [last]))
    count = last * (last - 1) // 2
    if options.all:
        started = time.perf_counter()
        expected = reference_scores(before, lambda i, j: again.swapped(layer, i, j), [last])
        theirs = time.perf_counter() - started
        found = layer_swaps(before, [last])
        error = max(float((x - y).abs().max()) for x, y in zip((found.s_pos, found.s_sym), expected, strict=True))
        how = f"made for real, scores within {error:.1e} (the model's float32, over τ)"
    else:
        pairs = list(itertools.islice(((i, j) for i in range(last) for j in range(i + 1, last)), options.sample))
        started = time.perf_counter()
        for i, j in pairs:
            again.swapped(layer, i, j).pattern(slice(last, last + 1))
        theirs = (time.perf_counter() - started) / len(pairs) * count
        how = f"from {len(pairs)} of them"
    rate = matrix_rate()
    floor = 2 * before.heads * last**2 * before.rot_q.shape[-1] / rate
    print(f"layer {layer}, {options.tokens} tokens, last query, {before.heads} heads, {count:,} swaps:")
    print(f"  all at once {ours * 1e3:.1f} ms ({ours / floor:.0f}x the floor of {floor * 1e3:.2f} ms)")
    print(f"  one by one {theirs:.1f} s ({how}): {theirs / ours:,.0f}x as long")


def whole_model(model: Any, proof: Proof, ids: Tensor) -> None:
    """All heads at 16 queries, on top of the forward pass."""
    queries = choose_queries(ids.shape[1], count=16)
    heads = 0

    def score(attention: LayerAttention) -> None:
        nonlocal heads
        layer_swaps(attention, queries)
        heads += attention.heads

    started = time.perf_counter()
    with torch.no_grad(), capture(model, score, proof=proof):
        model(ids, use_cache=False)
    seconds = time.perf_counter() - started
    print(f"{heads} heads, {ids.shape[1]} tokens, {len(queries)} queries: {seconds:.1f} s, the forward pass included")


def matrix_rate(m: int = 2048) -> float:
    """Flops per second of a float32 matrix product."""
    a = torch.randn(m, m)
    return 2 * m**3 / median_seconds(lambda: a @ a)


def median_seconds(function: Any, repeat: int = 5) -> float:
    """Median time of a function, after one warm-up."""
    function()
    found = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


if __name__ == "__main__":
    main()
