"""Time of swap scores beside the forward pass, beside all swaps, and beside swaps that are really made.

    python benchmarks/swaps.py                           # SmolLM2, then one layer at 4,096 and 16,384 tokens
    python benchmarks/swaps.py --real                    # also one layer of SmolLM2 against a sample of real swaps
    python benchmarks/swaps.py --real --all              # every one of that layer's swaps made for real
    python benchmarks/swaps.py --device cuda --no-model  # the layer also at 131,072 tokens; needs torch alone
    python benchmarks/swaps.py --device cuda --large     # all heads of a random Llama of 8 billion weights

Times on the CPU are processor seconds of all threads. On a busy machine, set OMP_WAIT_POLICY=PASSIVE: threads that wait
for others would count.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.measures.swaps.layer import Swaps, layer_swaps, reference_scores, swap_scores
from wherewhat.measures.swaps.logits import choose_queries

ALL = (1e3,)
"""A temperature at which all swaps have the same weight, so that all are computed."""


def main() -> None:
    """Run what the options ask for and print the times."""
    parser = argparse.ArgumentParser(description="Time of swap scores.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of SmolLM2")
    parser.add_argument("--no-model", action="store_true", help="leave SmolLM2 out")
    parser.add_argument("--large", action="store_true", help="a random Llama of 8 billion weights, and nothing else")
    parser.add_argument("--lengths", type=int, nargs="*", help="tokens of the layer of 32 heads, or of that Llama")
    parser.add_argument("--real", action="store_true", help="make some swaps of one layer of SmolLM2 for real")
    parser.add_argument("--layer", type=int, default=15, help="that layer")
    parser.add_argument("--sample", type=int, default=200, help="number of those swaps")
    parser.add_argument("--all", action="store_true", help="make all of the layer's swaps for real")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.large:
        large_model(options)
        return
    if not options.no_model:
        smollm2(options)
    one_layer(options)


def smollm2(options: argparse.Namespace) -> None:
    """All heads of SmolLM2 at 16 queries, on top of its forward pass."""
    from wherewhat.captures.blocks import blocks
    from wherewhat.captures.proof import capture, prove
    from wherewhat.models.loader import load
    from wherewhat.text.documents import read_documents

    loaded = load("smollm2", device=options.device)
    model = loaded.model
    ids = loaded.encode(read_documents(None, count=1)[0].text, tokens=options.tokens)[None].to(options.device)
    proof = prove(model)
    queries = choose_queries(ids.shape[1], count=16)

    def forward(reducer: Callable[[LayerAttention], None]) -> None:
        with torch.no_grad(), capture(model, reducer, proof=proof):
            model(ids, use_cache=False)

    def plain() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    def scores(taus: tuple[float, ...] = ()) -> tuple[float, list[Swaps]]:
        """Seconds in the scores alone, and the scores."""
        found: list[Swaps] = []
        spent = []

        def score(attention: LayerAttention) -> None:
            spent.append(timed(lambda: found.append(layer_swaps(attention, queries, taus=taus)), options.device))

        forward(score)
        return sum(spent), found

    plain()
    scores()
    turns = [(timed(plain, options.device), *scores()) for _ in range(options.repeat)]
    alone, ours = (statistics.median(turn[index] for turn in turns) for index in (0, 1))
    found = turns[-1][2]
    every, expected = scores(ALL)
    error = max(float((x.s_pos - y.s_pos).abs().max()) for x, y in zip(found, expected, strict=True))
    print(f"SmolLM2, {ids.shape[1]} tokens, {len(queries)} queries, {sum(len(x.s_pos) for x in found)} heads:")
    print(f"  forward pass {alone:.2f} s, scores {ours:.2f} s: {ours / alone:.3f} of the forward pass")
    print(f"  all swaps {every:.2f} s: {every / ours:.1f}x as long; scores differ by {error:.1e}, {kept(found)}")
    if options.real:
        with blocks(model, ids, proof) as again:
            made(again, options)


def large_model(options: argparse.Namespace) -> None:
    """The 1,024 heads of a random Llama of 8 billion weights at 16 queries, on top of its own forward pass.

    Its attention is more uniform than that of trained models: from 32,768 tokens on, some heads need all swaps.
    """
    from llama import passes, random_llama

    model = random_llama("8B", tokens=131_072, device=options.device, dtype="bfloat16")
    for n in options.lengths or [1024, 4096, 8192, 16_384]:
        queries = choose_queries(n, count=16)
        found: list[Swaps] = []
        plain, scores = passes(model, n, lambda a, queries=queries, found=found: found.append(layer_swaps(a, queries)))
        plain()
        scores()
        turns = [(timed(plain, options.device), timed(scores, options.device)) for _ in range(options.repeat)]
        alone, both = (statistics.median(turn[index] for turn in turns) for index in (0, 1))
        ratio = f"swap scores {(both - alone) / alone:.2f} of it on top"
        last = found[-model.config.num_hidden_layers :]
        print(f"8B, {n:7,d} tokens: forward pass {alone * 1e3:.1f} ms, {ratio}, {kept(last)}")


def kept(found: list[Swaps]) -> str:
    """The share of swaps that were computed, and the bound on the error."""
    share, bound = (torch.cat([getattr(x, name) for x in found]) for name in ("kept", "bound"))
    return (
        f"{float(share.mean()):.2%} of the swaps (at most {float(share.max()):.2%}; "
        f"{int((share > 0.5).sum())} of {share.numel()} queries more than half), bound {float(bound.max()):.1e}"
    )


def made(again: Any, options: argparse.Namespace) -> None:
    """All swaps before the last query of one layer: at once, and one by one."""
    layer, last = options.layer, options.tokens - 1
    before = again.run(layer, again.hidden(layer))
    ours = statistics.median(timed(lambda: layer_swaps(before, [last]), options.device) for _ in range(5))
    count = last * (last - 1) // 2
    if options.all:
        expected: list[tuple[Tensor, Tensor, Tensor]] = []
        theirs = timed(
            lambda: expected.append(reference_scores(before, lambda i, j: again.swapped(layer, i, j), [last])),
            options.device,
        )
        found = layer_swaps(before, [last])
        error = max(
            float((x - y).abs().max()) for x, y in zip((found.s_pos, found.s_sym), expected[0][:2], strict=True)
        )
        how = f"made for real, scores within {error:.1e} (the model's float32, over τ)"
    else:
        pairs = list(itertools.islice(itertools.combinations(range(last), 2), options.sample))

        def some() -> None:
            for i, j in pairs:
                again.swapped(layer, i, j).pattern(slice(last, last + 1))

        theirs = timed(some, options.device) / len(pairs) * count
        how = f"from {len(pairs)} of them"
    print(f"layer {layer}, {options.tokens} tokens, last query, {before.heads} heads, {count:,} swaps:")
    print(f"  scores {ours * 1e3:.1f} ms, one by one {theirs:.1f} s ({how}): {theirs / ours:,.0f}x as long")


def one_layer(options: argparse.Namespace) -> None:
    """A layer of 32 query and 8 key heads at 16 queries, over lengths, with a sink and without."""
    cuda = options.device != "cpu"
    d, dtype = (128, torch.bfloat16) if cuda else (64, torch.float32)
    rotation = Rotation("half", 0, 500_000 ** (-torch.arange(d // 2) / (d // 2)), 1.0)
    print(f"one layer, 32 heads, 8 key heads, d {d}, {dtype}, 16 queries, on {options.device}:")
    times: dict[int, float] = {}
    for n in options.lengths or [4096, 16_384, *([131_072] if cuda else [])]:
        generator = torch.Generator(options.device).manual_seed(0)
        q, k = (torch.randn(heads, n, d, device=options.device, generator=generator) for heads in (32, 8))
        queries = choose_queries(n, count=16)
        if n <= (16_384 if cuda else 4096):
            random, seconds = scored(q.to(dtype), k.to(dtype), rotation, queries, options)
            print(f"{n:9,d} tokens, random heads: {seconds:.3f} s, {kept([random])}")
        q[..., d // 2 - 1] += 4 * d**0.25  # attention to the first key, in the slowest plane
        k[:, 0, d // 2 - 1] += 4 * d**0.25
        q, k = q.to(dtype), k.to(dtype)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        found, times[n] = scored(q, k, rotation, queries, options)
        peak = torch.cuda.max_memory_allocated() >> 20 if cuda else resident()
        print(f"{n:9,d} tokens, with a sink: {times[n]:.3f} s, peak {peak:,} MiB, {kept([found])}")
        if cuda:

            def attend(q: Tensor = q, k: Tensor = k) -> Tensor:
                return scaled_dot_product_attention(q[None], k[None], k[None], is_causal=True, enable_gqa=True)

            attend()
            attention = timed(attend, options.device)
            print(f"{'':9} flash attention {attention:.3f} s: scores are {times[n] / attention:.3f} of it")
    for short, long in itertools.pairwise(times):
        print(f"growth from {short:,} to {long:,} tokens: {times[long] / times[short]:.2f}x")


def scored(
    q: Tensor, k: Tensor, rotation: Rotation, queries: list[int], options: argparse.Namespace
) -> tuple[Swaps, float]:
    """Scores and the median of their times, after one warm-up."""

    def score() -> Swaps:
        return swap_scores(q, k, rotation=rotation, queries=queries)

    return score(), statistics.median(timed(score, options.device) for _ in range(options.repeat))


def resident() -> int:
    """Peak of resident memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def timed(function: Callable[[], object], device: str) -> float:
    """Seconds that a function takes: of all threads on the CPU, of the clock elsewhere."""
    if device == "cpu":
        started = time.process_time()
        function()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
