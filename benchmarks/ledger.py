"""Cost of every measurement in plain forward passes over the same tokens, and its peak memory beside that of the pass.

    python benchmarks/ledger.py                                    # SmolLM2 on the CPU, 4 documents of 512 tokens
    python benchmarks/ledger.py --shape 8B --json ledger.json      # a random Llama of 8 billion weights on a GPU
    python benchmarks/ledger.py --measurement axes --tokens 2048

Measurements are those that are declared, with their default options, from the request to the files of the finished run;
the model is loaded and verified before. A plain pass is the model on all documents, in the batches of the measurement,
without cache and with all logits. Pass and measurement take turns; the cost is the median of their ratios.
Beside it stands the floor: the passes that the measurement runs, counted at the model's blocks, so that a pass that
starts at a later block or has fewer tokens counts as its part of a pass. Control models are not included; each costs
the same again. ``prompts`` and ``choices`` are measured without files, one prompt or question at a time.

The last rows are all measurements of layers together, in shared passes, and a whole report: excerpt, all measurements
as a report runs them, its control models (of a shape the random one only) and the page; there the model is loaded and
verified again.

Times on the CPU are processor seconds. On a busy machine, set OMP_NUM_THREADS=1: threads that wait for others would
count. Peak memory on the CPU is that of the process, on Linux and with MIMALLOC_PURGE_DELAY=0: otherwise torch's
allocator keeps freed memory, which hides what is allocated again. Times are then somewhat longer.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import io
import json
import os
import platform
import pstats
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama import SHAPES, random_llama
from swaps import timed
from wherewhat.captures.proof import Proof
from wherewhat.errors import WherewhatError
from wherewhat.measures.measurement import (
    Choices,
    ChoicesMeasurement,
    QuestionMeasurement,
    Text,
    find_measurement,
    measurements,
)
from wherewhat.models.loaded import LoadedModel, evaluation
from wherewhat.models.memory import load_memory
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import build_config
from wherewhat.report.report import make_report
from wherewhat.report.views import VIEWS, ReportRun, register_view
from wherewhat.runs.execution import LastModel, run_together
from wherewhat.runs.request import Input, MemoryModel, ModelRequest, Request, blank, model_inputs
from wherewhat.runs.subject import ModelSubject, texts_at_once
from wherewhat.text.documents import Document, read_documents

MOST = 60
"""Number of passes above which the documentation states a reason."""

TOGETHER, REPORT = "together", "report"
"""Rows of several measurements: those of layers in shared passes, and a whole report."""

_TOGETHER = ("axes", "distance", "planes", "heads", "attention")

_LONG = 5.0
"""Seconds beyond which a measurement is repeated once, not twice, before it is timed on a GPU."""

_ALTERNATIVE = 8
"""Tokens of each alternative of a question."""


def main() -> int:
    """Measure, print a table, and return 1 if no measurement could be run."""
    options = _arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    models, request = LastModel(), _model(options)
    loaded = models.loaded(request)
    subject = ModelSubject(loaded, models.proof())
    documents = _documents(options, loaded)
    names = options.measurement or [*measurements(), TOGETHER, REPORT]
    result = _stored(options, _settings(options, loaded))
    print(f"{'measurement':12} {'passes':>8} {'run':>8} {'ratio':>6} {'seconds':>9} {'memory MiB':>11}")
    for number, name in enumerate(names, 1):
        print(f"{number} of {len(names)}: {name}", file=sys.stderr, flush=True)
        result["skipped"].pop(name, None)
        rows = result["several" if name in (TOGETHER, REPORT) else "measurements"]
        try:
            with tempfile.TemporaryDirectory() as out:  # runs are removed after they were timed
                work = _work(name, subject, models, request, documents, options, Path(out))
                row = measured(name, subject, work, options)
        except WherewhatError as error:
            result["skipped"][name] = str(error)
            print(f"{name:12} skipped: {error}", flush=True)
            continue
        rows[name] = row
        floor = f"{row['floor']:8.2f} {row['ratio']:6.2f}" if row["floor"] is not None else " " * 15
        print(
            f"{name:12} {row['passes']:8.2f} {floor} {row['seconds']:9.3f} "
            f"{'' if row['memory_mib'] is None else format(row['memory_mib'], '11,.0f')}"
            f"{f'  (above {MOST} passes)' if row['passes'] > MOST else ''}",
            flush=True,
        )
        _save(options, result)
    _save(options, result)
    return 0 if result["measurements"] or result["several"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of every measurement in plain forward passes.")
    parser.add_argument("--model", default="smollm2", help="embedded name, folder or .gguf file")
    parser.add_argument("--shape", choices=list(SHAPES), help="a random Llama of this size instead, on random tokens")
    parser.add_argument("--measurement", nargs="+", help="only these measurements")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each document")
    parser.add_argument("--repeat", type=int, default=1, help="times that the documents are measured")
    parser.add_argument(
        "--limit", type=float, help="seconds for one document beyond which a measurement is timed on it alone"
    )
    parser.add_argument("--device", help="default: cpu, for a shape cuda")
    parser.add_argument("--dtype", help="default: float32, for a shape bfloat16")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="also write which functions and kernels take the time"
    )
    options = parser.parse_args()
    options.device = options.device or ("cuda" if options.shape else "cpu")
    options.dtype = options.dtype or ("bfloat16" if options.shape else "float32")
    return options


def _model(options: argparse.Namespace) -> ModelRequest | MemoryModel:
    """Return the model to be loaded, in evaluation mode."""
    if not options.shape:
        return ModelRequest(model=options.model, device=options.device, dtype=options.dtype)
    module = random_llama(options.shape, tokens=max(8192, options.tokens), device=options.device, dtype=options.dtype)
    loaded = load_memory(module, None, name=options.shape, weights="trained", seed=0)
    return MemoryModel(module, model=options.shape, loaded=loaded)


def _settings(options: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Return what the numbers of a file have in common."""
    cuda = options.device.startswith("cuda")
    return {
        "model": loaded.name,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "layers": loaded.model.config.num_hidden_layers,
        "hidden": loaded.model.config.hidden_size,
        "dtype": options.dtype,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "threads": None if cuda else torch.get_num_threads(),
        "documents": options.documents,
        "tokens": options.tokens,
        "torch": torch.__version__,
    }


def _stored(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of an earlier run with the same settings, to which new ones are added."""
    if options.json is not None and options.json.exists():
        found: dict[str, Any] = json.loads(options.json.read_text("utf-8"))
        if {name: found.get(name) for name in settings} != settings:
            raise SystemExit(f"{options.json} was measured with other settings: give another file")
        return found
    return {**settings, "measurements": {}, "several": {}, "skipped": {}}


def _save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the file, if one was asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _documents(options: argparse.Namespace, loaded: LoadedModel) -> tuple[Document, ...]:
    """Return prose, or random tokens for a model without a tokenizer."""
    if not options.shape:
        return tuple(read_documents(None, count=options.documents))
    rows, generator = loaded.model.config.vocab_size, torch.Generator().manual_seed(0)
    return tuple(
        Document(f"random-{number}", "", "random tokens", ids=tuple(drawn.tolist()))
        for number, drawn in enumerate(
            torch.randint(0, rows, (options.documents, options.tokens), generator=generator), 1
        )
    )


@dataclass(frozen=True)
class Work:
    """Documents, and a function that measures them.

    Attributes:
        ids: Token ids ``(documents, n)`` of each batch, for the plain pass.
        run: Measures them.
        counted: Whether passes are counted; not where other models run as well.
    """

    ids: Sequence[Tensor]
    run: Callable[[], object]
    counted: bool = True


def measured(name: str, subject: ModelSubject, works: Sequence[Work], options: argparse.Namespace) -> dict[str, Any]:
    """Return cost, floor and memory of a measurement; see the top of this file.

    Of several works the first is measured alone if it takes longer than the limit.
    """
    model, cuda = subject.loaded.model, options.device.startswith("cuda")
    counter = PassCounter(model, subject.proof)
    pairs: list[tuple[float, float]] = []
    floors: list[float] = []
    peaks: tuple[float | None, float | None] = (None, None)

    def plain(work: Work) -> None:
        for ids in work.ids:
            with torch.no_grad():
                model(input_ids=ids.to(options.device), use_cache=False)

    slow = len(works) > 1 and options.limit is not None and timed(works[0].run, options.device) > options.limit
    work = works[0] if slow else works[-1]
    with new_process_settings(weight_dtypes(model)), evaluation(model):
        if cuda and work.counted:  # kernels are compiled, graphs recorded and memory reserved once per shape
            if timed(work.run, options.device) < _LONG:
                work.run()
            plain(work)
        for turn in range(options.repeat):
            with _peak(cuda, wanted=turn == 0) as plain_peak:
                alone = timed(partial(plain, work), options.device)
            with _peak(cuda, wanted=turn == 0) as peak, counter:
                seconds = timed(work.run, options.device)
            pairs.append((seconds, alone))
            floors.append(counter.tokens / sum(ids.numel() for ids in work.ids))
            peaks = (plain_peak[0], peak[0]) if turn == 0 else peaks
        if options.profile is not None:
            _profile(work.run, options.profile / f"{name}.txt")
    passes = statistics.median(ours / alone for ours, alone in pairs)
    floor = statistics.median(floors)
    return {
        "passes": passes,
        "floor": floor if work.counted else None,
        "ratio": passes / floor if work.counted else None,
        "seconds": statistics.median(ours for ours, _ in pairs),
        "plain_seconds": statistics.median(alone for _, alone in pairs),
        "plain_mib": peaks[0],
        "peak_mib": peaks[1],
        "memory_mib": None if peaks[0] is None or peaks[1] is None else peaks[1] - peaks[0],
        "documents": options.documents,
        "timed": sum(len(ids) for ids in work.ids),
        "repeat": options.repeat,
    }


def _profile(run: Callable[[], object], path: Path) -> None:
    """Write the functions of Python, and the operations and kernels of torch, that take most of the time."""
    profile = cProfile.Profile()
    with profile:
        run()
    with torch.profiler.profile() as operations:
        run()
    text = io.StringIO()
    for order in ("cumulative", "tottime"):
        pstats.Stats(profile, stream=text).sort_stats(order).print_stats(80)
    for order in ("self_device_time_total", "self_cpu_time_total"):
        text.write(operations.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue(), encoding="utf-8")


def _work(
    name: str,
    subject: ModelSubject,
    models: LastModel,
    model: ModelRequest | MemoryModel,
    documents: tuple[Document, ...],
    options: argparse.Namespace,
    out: Path,
) -> list[Work]:
    """Return the work of a measurement on the first document and on all, or on one prompt or question.

    Its runs, each in a folder of its own, are written to ``out``.
    """
    loaded = subject.loaded
    measurement = None if name in (TOGETHER, REPORT) else find_measurement(name)
    config = None if measurement is None else build_config(measurement.config, {})
    if isinstance(measurement, QuestionMeasurement):
        inputs = model_inputs(Request(name, beyond=True), measurement, config, loaded, [])
        chosen = inputs[:: max(1, len(inputs) // options.documents)][: options.documents]
        return [Work([chosen[0].text.ids], partial(measurement.measure, subject, chosen[0].question, config))]
    texts = [item.text for item in _inputs(loaded, documents, options.tokens)]
    if isinstance(measurement, ChoicesMeasurement):
        (shorter,) = _inputs(loaded, documents[:1], options.tokens - _ALTERNATIVE)
        choices = _choices(loaded, texts, 0, shorter.text)
        return [Work([texts[0].ids], partial(measurement.measure, subject, choices, config))]
    step = texts_at_once(loaded.model, options.tokens)
    batches = [torch.cat([text.ids for text in texts[i : i + step]]) for i in range(0, len(texts), step)]
    if name == REPORT:
        return [Work(batches, partial(_report, model, documents, options, out), counted=False)]
    names = _TOGETHER if name == TOGETHER else (name,)

    def run(count: int) -> None:
        requests = [
            Request(
                each,
                model=model,
                texts=documents[:count],
                tokens=options.tokens,
                beyond=True,
                # Half of a text is beyond the trained length where a measurement needs that.
                options={"trained": options.tokens // 2} if hasattr(find_measurement(each).config, "trained") else {},
            )
            for each in names
        ]
        for outcome in run_together(requests, out=Path(tempfile.mkdtemp(dir=out)), models=models):
            if isinstance(outcome, WherewhatError):
                raise outcome

    least = 1 if measurement is None else measurement.least_documents
    return [Work([text.ids for text in texts[:least]], partial(run, least)), Work(batches, partial(run, len(texts)))]


def _report(
    model: ModelRequest | MemoryModel, documents: tuple[Document, ...], options: argparse.Namespace, out: Path
) -> None:
    """Make a report with its control models, from loading the model to the page, in a new folder in ``out``."""
    if options.shape:  # permuting the entries of large matrices takes longer than everything else
        register_view("axes", replace(VIEWS["axes"], report=ReportRun(1.5, controls=("random",))))
    runs = Path(tempfile.mkdtemp(dir=out))
    made = make_report([model], out=runs, texts=documents, documents=len(documents), tokens=options.tokens)
    made.write(runs / "report.html")


def _inputs(loaded: LoadedModel, documents: tuple[Document, ...], tokens: int) -> list[Input]:
    """Return the first tokens of the documents."""
    request = Request("axes", texts=documents, tokens=tokens, beyond=True)
    return model_inputs(request, find_measurement("axes"), None, loaded, documents)


def _choices(loaded: LoadedModel, texts: Sequence[Text], number: int, context: Text) -> Choices:
    """Return a question: which of the ends of all documents is that of this one."""
    return Choices(
        context=context,
        continuations=tuple(tuple(text.ids[0, -_ALTERNATIVE:].tolist()) for text in texts),
        lengths=(_ALTERNATIVE,) * len(texts),
        gold=number,
        blank=blank(loaded),
        seed=number,
    )


class PassCounter:
    """Counts the tokens that pass through a model's blocks while its context is open.

    Args:
        model: The model.
        proof: Its proof, which names the blocks.
    """

    def __init__(self, model: nn.Module, proof: Proof) -> None:
        names = {re.sub(r"(\.\d+)\..*", r"\1", layer.layout.name) for layer in proof.layers}
        self._blocks = [model.get_submodule(name) for name in sorted(names)]
        self._count = 0
        self._handles: list[Any] = []

    @property
    def tokens(self) -> float:
        """Number of tokens, mean over blocks."""
        return self._count / len(self._blocks)

    def __enter__(self) -> None:
        self._count = 0
        self._handles = [block.register_forward_hook(self._add, with_kwargs=True) for block in self._blocks]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not any(hidden is given for given in (*args, *kwargs.values())):  # a skipped block returns its input
            self._count += hidden.shape[:-1].numel()


@contextmanager
def _peak(cuda: bool, *, wanted: bool) -> Iterator[list[float | None]]:
    """Yield a list that holds, after the context, the peak of memory in it in MiB; None where it is not known."""
    found: list[float | None] = [None]
    if not wanted:
        yield found
    elif cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found[0] = (torch.cuda.max_memory_allocated() - before) / 2**20
    else:
        resident = _resident("VmRSS", reset=True)
        yield found
        most = _resident("VmHWM")
        found[0] = None if resident is None or most is None else (most - resident) / 2**10


def _resident(name: str, *, reset: bool = False) -> int | None:
    """Return resident memory of this process in KiB, or its peak since the last reset; None where it is not known."""
    if os.environ.get("MIMALLOC_PURGE_DELAY") != "0":
        return None
    try:
        if reset:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except (OSError, AttributeError):
        return None
    return None if found is None else int(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
