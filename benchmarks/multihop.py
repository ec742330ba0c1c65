"""Time of a laboratory model's training step beside Hugging Face's eager loop, and of a whole training.

    python benchmarks/multihop.py                          # both loops on the CPU, then on the GPU if there is one
    python benchmarks/multihop.py --device cuda --train    # and train a model on each task, with its test accuracy

Both loops train the same 12-layer GPT-J on the same batches of 64 sequences of 17 tokens with AdamW, dropout and the
linear schedule. High precision means TF32 products on a GPU and plain float32 on a CPU; theirs is float32, and
limited by launches on a GPU. Other work disturbs processor seconds less than the wall's, so both are told.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from wherewhat_lab.config import LabConfig, Precision, TrainConfig
from wherewhat_lab.hugging_face import to_hugging_face
from wherewhat_lab.model import LabModel
from wherewhat_lab.multihop.study import train
from wherewhat_lab.steps import CpuSteps, GpuSteps, Steps, batch_order
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.task import Sequences


def main() -> None:
    """Time the loops on each device, and a whole training if asked for."""
    parser = argparse.ArgumentParser(description="Time of training a laboratory model.")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="both, where there is a GPU, if not given")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--steps", type=int, help="steps to time (10 on a CPU, 300 on a GPU)")
    parser.add_argument("--train", action="store_true", help="train a model on each task")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    devices = [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    sequences = NumberTask().sample(20_000, seed=0)
    for device in devices:
        steps = options.steps or (300 if device == "cuda" else 10)
        fewer = max(5, steps // 3)
        ours = {}
        for precision in ("high", "highest") if device == "cuda" else ("high", "medium"):
            with our_loop(sequences, device, options.threads, precision=precision) as loop:
                ours[precision] = report(f"wherewhat, {device}, {precision} precision", loop, steps, device)
        if device == "cuda":
            with our_loop(sequences, device, options.threads, graph=False) as loop:
                report("  without the graph", loop, fewer, device)
        theirs = report(
            f"Hugging Face, {device}, {torch.get_float32_matmul_precision()} precision",
            their_loop(sequences, device),
            fewer,
            device,
        )
        for precision, milliseconds in ours.items():
            print(f"{theirs / milliseconds:.1f}x the steps per second at {precision} precision")
        if options.train:
            train_both(device)


@contextmanager
def our_loop(
    sequences: Sequences, device: str, threads: int, *, graph: bool = True, precision: Precision = "high"
) -> Iterator[Callable[[int], None]]:
    """Our training step."""
    model, config = LabModel(LabConfig()).to(device), TrainConfig(precision=precision)
    steps: Steps
    if device == "cuda":
        steps = GpuSteps(model, sequences.tokens, sequences.answers, config, graph=graph)
    else:
        steps = CpuSteps(model, sequences.tokens, sequences.answers, config, threads=threads)
    try:
        yield steps.run
    finally:
        steps.close()


def their_loop(sequences: Sequences, device: str) -> Callable[[int], None]:
    """The step that anybody would write."""
    from transformers import get_linear_schedule_with_warmup

    config = TrainConfig()
    model = to_hugging_face(LabModel(LabConfig())).to(device).train()
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas, weight_decay=config.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, config.warmup, config.steps)
    tokens, answers = sequences.tokens.to(device), sequences.answers.to(device)
    order = batch_order(config, len(tokens)).to(device)

    def step(index: int) -> None:
        rows = order[index]
        loss = functional.cross_entropy(model(tokens[rows]).logits[:, -1], answers[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    return step


def report(name: str, step: Callable[[int], None], steps: int, device: str) -> float:
    """Print and return the milliseconds of a step."""
    for index in range(3):
        step(index)
    wait(device)
    wall, processor = time.perf_counter(), time.process_time()
    for index in range(3, 3 + steps):
        step(index)
    wait(device)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(
        f"{name}: {wall / steps * 1e3:.2f} ms a step, {processor / steps * 1e3:.2f} ms of processors "
        f"({steps} steps, load {os.getloadavg()[0]:.1f})",
        flush=True,
    )
    return wall / steps * 1e3


def train_both(device: str) -> None:
    """Train a model on each task with the recipe of the paper, and print time and test accuracy."""
    for task in (NumberTask(), LetterTask()):
        started = time.perf_counter()
        sequences, _, test = task.splits()
        drawn = time.perf_counter()
        model = train(task, LabConfig(), TrainConfig(), device=device, sequences=sequences)
        wait(device)
        trained = time.perf_counter()
        with torch.no_grad():
            right = [
                model(tokens.to(device)).argmax(-1).cpu() == answers
                for tokens, answers in zip(test.tokens.split(1000), test.answers.split(1000), strict=True)
            ]
        print(
            f"{type(task).__name__}: sequences {drawn - started:.1f} s, training {trained - drawn:.1f} s, "
            f"test accuracy {float(torch.cat(right).float().mean()):.4f}",
            flush=True,
        )


def wait(device: str) -> None:
    """Wait until the GPU has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
