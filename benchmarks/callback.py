"""Overhead of the training callback: the multi-hop model trained with and without it by ``transformers.Trainer``.

    python benchmarks/callback.py                      # 150 steps each, axes and heads every 50 steps
    python benchmarks/callback.py --steps 500 --profile

The model is the 12-layer GPT-J of the multi-hop study, trained on batches of 64 sequences of 17 tokens with AdamW and
dropout, in float32 on the CPU. The share is the time of a record over the time of the steps between two records, as in
a long training; the record before the first step, which includes the verification of the model, is listed apart. Other
work on the machine disturbs processor seconds less than wall time, so both are printed.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import wherewhat
from wherewhat_lab.config import LabConfig, TrainConfig
from wherewhat_lab.hugging_face import to_hugging_face
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.multi_hop import NumberTask


class Rows(Dataset):
    """Sequences of the number task."""

    def __init__(self, count: int) -> None:
        self.sequences = NumberTask().sample(count, seed=0)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequences.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sequence and its answer."""
        return {"input_ids": self.sequences.tokens[index], "labels": self.sequences.answers[index]}


class TimedCallback(wherewhat.TrainerCallback):
    """The callback with the processor seconds of its steps."""

    processor = 0.0

    def on_step_end(self, *args, **given) -> None:
        """Record and add the time."""
        started = time.process_time()
        super().on_step_end(*args, **given)
        self.processor += time.process_time() - started


def main() -> None:
    """Train with and without the callback and print the times."""
    parser = argparse.ArgumentParser(description="Overhead of the training callback.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print the functions that take most of a record")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = Rows(64 * options.steps)
    plain, wall_without, processor_without = train(rows, options.steps, None)
    held_out = NumberTask().sample(2, seed=1).tokens
    callback = TimedCallback(every=options.every, measurements=["axes", "heads"], texts=held_out)
    watched, wall_with, processor_with = train(rows, options.steps, callback)
    same = all(map(torch.equal, plain.state_dict().values(), watched.state_dict().values()))
    by_step = dict(callback.recorder._recorder.seconds_by_step)
    first = by_step.pop(0)
    record = sum(by_step.values()) / len(by_step)
    between = (wall_with - first - sum(by_step.values())) / options.steps * options.every
    used = callback.processor / len(by_step)
    used_between = (processor_with - callback.processor) / options.steps * options.every
    print(f"weights with and without the callback are {'identical' if same else 'DIFFERENT'}")
    print(
        f"without: {wall_without:.2f} s, with: {wall_with:.2f} s, {options.steps} steps (load {os.getloadavg()[0]:.1f})"
    )
    print(f"processors: {processor_without:.2f} s without, {processor_with:.2f} s with")
    print(f"a record: {record:.3f} s, {used:.3f} s of processors; the first: {first:.3f} s")
    print(
        f"share of a record in {options.every} steps: {record / between:.1%}, of processors {used / used_between:.1%}"
    )
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(callback.recorder._scores)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def train(rows: Rows, steps: int, callback: wherewhat.TrainerCallback | None) -> tuple[torch.nn.Module, float, float]:
    """Return the trained model, the wall time and the processor seconds of the training."""
    recipe = TrainConfig()
    model = to_hugging_face(LabModel(LabConfig()))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            str(Path(folder) / "multihop"),
            max_steps=steps,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.learning_rate,
            adam_beta1=recipe.beta1,
            weight_decay=recipe.weight_decay,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, compute_loss_func=last_token_loss)
        if callback is not None:
            trainer.add_callback(callback)
        wall, processor = time.perf_counter(), time.process_time()
        trainer.train()
        return model, time.perf_counter() - wall, time.process_time() - processor


def last_token_loss(outputs, labels, num_items_in_batch=None) -> torch.Tensor:
    """Cross-entropy of the answers."""
    return functional.cross_entropy(outputs.logits[:, -1], labels)


if __name__ == "__main__":
    main()
