"""Cost of a report in forward passes: processor time of all its measurements, against plain passes of the same run.

    python benchmarks/report.py
    python benchmarks/report.py --model model.gguf --documents 2 --tokens 256

One plain pass is the model without a capture on the same documents and tokens, one after another. The report starts
with an empty folder, so loading, verifying, controls and writing the page count.
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
    plain = _plain(options)
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
    wall, total = time.perf_counter() - started, sum(progress.seconds.values())
    print(f"plain pass over {options.documents} x {options.tokens} tokens: {plain:.1f} processor seconds")
    for name, seconds in progress.seconds.items():
        print(f"{name:28} {seconds:8.1f} s {seconds / plain:7.2f} passes")
    print(f"{'all':28} {total:8.1f} s {total / plain:7.2f} passes (at most {MOST}); {wall:.0f} s wall time")
    print(f"page: {megabytes:.1f} MB")
    return 0 if total <= MOST * plain else 1


def _plain(options: argparse.Namespace) -> float:
    """Return the processor seconds of a plain pass over all documents, the least of two."""
    loaded = load(options.model)
    texts = [document.text for document in read_documents(None, count=options.documents)]
    ids = [loaded.encode(text, tokens=options.tokens)[None] for text in texts]
    found = []
    for _ in range(2):
        started = time.process_time()
        with torch.inference_mode():
            for one in ids:
                loaded.model(one)
        found.append(time.process_time() - started)
    return min(found)


if __name__ == "__main__":
    raise SystemExit(main())
