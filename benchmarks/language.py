"""Speed of training a small language model under every encoding, beside what its products alone would take.

    python benchmarks/language.py --device cuda --steps 50            # about 10 million parameters, on a GPU
    python benchmarks/language.py --device cuda --steps 50 --plain    # without torch.compile
    python benchmarks/language.py --device cpu --tiny --steps 3       # does it run at all

The floor is the time of 6 products per weight and token, and of attention's products below the diagonal (forward and
twice that backward), at the speed of one large product that is timed first. Whether a second training from the start
gives the same losses, bit by bit, is told with each.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import torch

from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import ENCODINGS
from wherewhat_lab.language import VOCABULARY, LanguageConfig, batch_starts, windows
from wherewhat_lab.model import LabModel
from wherewhat_lab.steps import CpuSteps, GpuSteps, Steps

MODEL = LabConfig(
    vocabulary=VOCABULARY, layers=6, heads=6, width=384, block="sequential", biases="none", dropout=0.0, positions=512
)
TINY = replace(MODEL, layers=2, heads=2, width=32)
_WARM_UP = 5


def main() -> None:
    """Time the training of each encoding."""
    parser = argparse.ArgumentParser(description="Speed of training a language model.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=50, help="steps to time")
    parser.add_argument("--batch", type=int, default=128, help="sequences of a step")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--block", choices=["parallel", "sequential", "llama"], default="sequential")
    parser.add_argument("--encodings", nargs="*", default=list(ENCODINGS), choices=list(ENCODINGS))
    parser.add_argument("--plain", action="store_true", help="without torch.compile")
    parser.add_argument("--no-graph", action="store_true", help="launch every kernel, in place of a recorded graph")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on 4 sequences of 64 tokens, in float32")
    options = parser.parse_args()
    config = LanguageConfig(
        steps=options.steps + _WARM_UP,
        batch=4 if options.tiny else options.batch,
        context=64 if options.tiny else options.context,
        compile=not options.plain,
        precision="float32" if options.tiny else "bfloat16",
        warmup=_WARM_UP,
        threads=1,
    )
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (1 << 22,), generator=generator, dtype=torch.uint8).to(options.device)
    rate = product_rate(options.device)
    print(f"{name(options.device)}, torch {torch.__version__}: {rate / 1e12:.3g} TFLOP/s in one large product")
    for encoding in options.encodings:
        model_config = replace(TINY if options.tiny else MODEL, encoding=encoding, block=options.block)
        time_encoding(model_config, config, text, rate, graph=not options.no_graph)


def time_encoding(
    model_config: LabConfig, config: LanguageConfig, text: torch.Tensor, rate: float, *, graph: bool
) -> None:
    """Train twice, time the second, and print what came out."""
    losses = []
    for _ in range(2):
        started = time.perf_counter()
        model = LabModel(model_config).to(text.device)
        steps = make_steps(model, config, text, graph=graph)
        for step in range(_WARM_UP):
            steps.run(step)
        wait(text.device)
        prepared, began = time.perf_counter() - started, time.perf_counter()
        for step in range(_WARM_UP, config.steps):
            steps.run(step)
        wait(text.device)
        seconds = (time.perf_counter() - began) / (config.steps - _WARM_UP)
        losses.append(steps.losses.cpu())
        steps.close()
        if len(losses) == 1:
            first_prepared = prepared
    tokens = config.batch * config.context
    floor = tokens * flops_per_token(model, config.context) / rate
    memory = torch.cuda.max_memory_allocated() / 2**30 if text.is_cuda else 0.0
    print(
        f"{model_config.encoding:8} {tokens / seconds / 1e6:7.3f} M tokens/s {seconds * 1e3:8.2f} ms a step, "
        f"{seconds / floor:5.2f}x the floor of {floor * 1e3:.2f} ms; "
        f"loss {float(losses[0][0]):.3f} to {float(losses[0][-1]):.3f}, "
        f"{'the same' if torch.equal(*losses) else 'NOT THE SAME'} again; "
        f"ready after {first_prepared:.1f} s, again {prepared:.1f} s; {memory:.1f} GiB "
        f"(load {os.getloadavg()[0]:.1f})",
        flush=True,
    )


def make_steps(model: LabModel, config: LanguageConfig, text: torch.Tensor, *, graph: bool) -> Steps:
    """Training steps as a training has them."""
    tokens, order = windows(text, config.context), batch_starts(config, len(text))
    if text.is_cuda:
        return GpuSteps(model, tokens, None, config, graph=graph, order=order)
    return CpuSteps(model, tokens, None, config, threads=1, order=order)


def flops_per_token(model: LabModel, context: int) -> float:
    """Products and sums of one training step for each token."""
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    d, heads = model.config.head_width, model.config.heads
    of_keys = 2 * d if ENCODINGS[model.config.encoding].polar else d
    # Half of the n keys is visible; one product and one sum each, for logits and for values, three times.
    return 6 * weights + 3 * model.config.layers * heads * context * (of_keys + d)


def product_rate(device: str) -> float:
    """Products and sums a second of one large matrix product, in the precision of the training."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        wait(a.device)
        began = time.perf_counter()
        torch.mm(a, a)
        wait(a.device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def name(device: str) -> str:
    """What the device is called."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
