"""Cost of a report in forward passes: processor time of all its measurements, against plain passes of the same run.

    python benchmarks/report.py
    python benchmarks/report.py --model model.gguf --documents 2 --tokens 256

One plain pass is the model without a capture on the same documents and tokens, one after another. The report starts
with an empty folder, so loading, verifying, controls and writing the page count. The floor is what it runs through the
model's layers: tokens times layers, in plain passes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from wherewhat.models.loader import load
from wherewhat.progress import TerminalProgress, Work
from wherewhat.report.measurements import DOCUMENTS, TOKENS
from wherewhat.report.report import make_report
from wherewhat.runs.request import ModelRequest
from wherewhat.text.documents import read_documents

MOST = 60
"""Largest number of forward passes that a report may cost."""


class TimedProgress(TerminalProgress):
    """Progress that keeps the processor time, the wall time and the expected time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[float]] = {}
        self.estimate = 0.0

    @contextmanager
    def watch(self, work: Work) -> Iterator[None]:
        """Note the times of steps."""
        begin, last = work.begin, [time.process_time(), time.perf_counter(), 0.0]

        def timed(label: str, expected: float = 0.0, following: float | None = None) -> None:
            used = [time.process_time(), time.perf_counter(), 0.0]
            times = self.steps.setdefault(work.label or "between steps", [0.0, 0.0, 0.0])
            for i, since in enumerate(last):
                times[i] += used[i] - since
            begin(label, expected, following)
            last[:] = [*used[:2], -expected]
            self.estimate = max(self.estimate, work.total)

        work.begin = timed  # type: ignore[method-assign]
        with super().watch(work):
            yield
            timed("")


def main() -> int:
    """Measure, print a table, and return 1 if the report costs more than allowed."""
    parser = argparse.ArgumentParser(description="Cost of a report in forward passes of its model.")
    parser.add_argument("--model", default="smollm2", help="embedded name, hub id, folder or .gguf file")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    plain, tokens = _plain(options)
    counter, progress = LayerTokens(), TimedProgress()
    with tempfile.TemporaryDirectory() as out:
        report = make_report(
            ModelRequest(model=options.model),
            out=out,
            documents=options.documents,
            tokens=options.tokens,
            progress=progress,
            write=True,
        )
        megabytes = (Path(out) / f"{report.name}.html").stat().st_size / 1e6
    counter.handle.remove()
    print(f"plain pass over {options.documents} x {options.tokens} tokens: {plain:.1f} processor seconds")
    for name, (seconds, wall, expected) in progress.steps.items():
        print(
            f"{name:90} {seconds:7.1f} s {seconds / plain:6.2f} passes, {wall:6.1f} s wall, {expected:6.1f} s expected"
        )
    total, wall, _ = map(sum, zip(*progress.steps.values(), strict=True))
    print(f"{'all':90} {total:7.1f} s {total / plain:6.2f} passes (at most {MOST}), {wall:6.1f} s wall")
    timed = sum(wall for _, wall, expected in progress.steps.values() if expected)
    print(
        f"estimate {progress.estimate:.0f} s, and the steps took {timed:.0f} s: ratio {timed / progress.estimate:.2f}"
    )
    print(f"{'floor: tokens in layers':90} {'':9} {counter.tokens / tokens:6.2f} passes")
    print(f"page: {megabytes:.1f} MB")
    return 0 if total <= MOST * plain else 1


class LayerTokens:
    """Counts the tokens that go through layers of models, each layer once."""

    def __init__(self) -> None:
        self.tokens = 0
        self.handle = torch.nn.modules.module.register_module_forward_pre_hook(self._add)

    def _add(self, module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        if type(module).__name__.endswith(("DecoderLayer", "Block")) and inputs and isinstance(inputs[0], torch.Tensor):
            self.tokens += inputs[0].shape[:2].numel()


def _plain(options: argparse.Namespace) -> tuple[float, int]:
    """Return the processor seconds of a plain pass over all documents, the least of two, and its tokens in layers."""
    loaded = load(options.model)
    texts = [document.text for document in read_documents(None, count=options.documents)]
    ids = [loaded.encode(text, tokens=options.tokens)[None] for text in texts]
    seconds, counter = [], LayerTokens()
    for _ in range(2):
        started = time.process_time()
        with torch.inference_mode():
            for row in ids:
                loaded.model(row)
        seconds.append(time.process_time() - started)
    counter.handle.remove()
    return min(seconds), counter.tokens // 2


if __name__ == "__main__":
    raise SystemExit(main())
