"""Cost of a report in forward passes: processor time of all its measurements, against plain passes of the same run.

    python benchmarks/report.py
    python benchmarks/report.py --model model.gguf --documents 2 --tokens 256

One plain pass is the model without a capture on the same documents and tokens, one after another. The report starts
with an empty folder, so loading, verifying, controls and writing the page count. The floor is what it runs through the
model's layers: tokens times layers, in plain passes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import torch

from wherewhat.models.loader import load
from wherewhat.progress import TerminalProgress
from wherewhat.report.measurements import DOCUMENTS, TOKENS
from wherewhat.report.report import make_report
from wherewhat.runs.request import ModelRequest
from wherewhat.text.documents import read_documents

MOST = 60
"""Largest number of forward passes that a report may cost."""


class TimedProgress(TerminalProgress):
    """Progress that keeps the processor time between its lines about measurements; the first has shared passes."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.process_time()
        self.seconds: dict[str, float] = {}

    def say(self, line: str) -> None:
        """Print a line; where it says that a measurement ended, the time since the last such line was for it."""
        ended = re.fullmatch(r"\d+ of \d+: (.+) ended", line)
        if ended or "measurements: about" in line:
            self.add(ended[1] if ended else "loading and excerpt")
        super().say(line)

    def add(self, name: str) -> None:
        """Add the time since the last call to what it was used for."""
        used = time.process_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + used - self.started
        self.started = used


def main() -> int:
    """Measure, print a table, and return 1 if the report costs more than allowed."""
    parser = argparse.ArgumentParser(description="Cost of a report in forward passes of its model.")
    parser.add_argument("--model", default="smollm2", help="embedded name, hub id, folder or .gguf file")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    plain, tokens = _plain(options)
    counter = LayerTokens()
    progress, started = TimedProgress(), time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        made = make_report(
            ModelRequest(model=options.model),
            out=out,
            documents=options.documents,
            tokens=options.tokens,
            progress=progress,
        )
        megabytes = made.write(Path(out) / "report.html").stat().st_size / 1e6
    progress.add("the page")
    counter.handle.remove()
    wall, total = time.perf_counter() - started, sum(progress.seconds.values())
    print(f"plain pass over {options.documents} x {options.tokens} tokens: {plain:.1f} processor seconds")
    for name, seconds in progress.seconds.items():
        print(f"{name:28} {seconds:8.1f} s {seconds / plain:7.2f} passes")
    print(f"{'all':28} {total:8.1f} s {total / plain:7.2f} passes (at most {MOST}); {wall:.0f} s wall time")
    print(f"{'floor: tokens in layers':28} {'':10} {counter.tokens / tokens:7.2f} passes")
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
