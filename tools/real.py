"""``make real``: every measurement of a report on every real model that can be had, and one table of the results.

    python tools/real.py                          # all of tools/real_models.py, downloaded where they are missing
    python tools/real.py smollm2 ./my-model       # models of your own

Runs ``check``, ``axes``, ``heads``, ``planes``, ``frequencies``, ``residual`` and ``report`` on short texts. Finished
runs are kept in ``--out`` and not measured again. Exits with 1 if a model that was found did not deliver everything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from real_models import NAMES, UnavailableError, fetch
from wherewhat.cli.tables import Table
from wherewhat.errors import WherewhatError
from wherewhat.measures.frequencies import BANDS
from wherewhat.measures.measurement import find_measurement
from wherewhat.measures.statistics import Interval, interval
from wherewhat.models.loaded import max_positions
from wherewhat.models.source import Weights
from wherewhat.progress import TerminalProgress
from wherewhat.report.report import make_report
from wherewhat.report.views import Capacity, ReportRun
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, run
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import MetricSummary, StoredRun

COLUMNS = ("layers × heads", "r", "pooled r", "pure heads", "slow planes", "frequency ID", "additive cost", "report")
_AXES_TOKENS = 512


@dataclass
class Outcome:
    """What one model delivered.

    Attributes:
        name: The model.
        lines: Numbers by line of the table and column: the model, its controls, its kinds of layers.
        problems: One line for everything that it did not deliver.
        seconds: Wall time of all of it.
    """

    name: str
    lines: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def put(self, column: str, value: Interval | float | str, *, line: str = "") -> None:
        """Fill a cell, by default one of the model itself."""
        if isinstance(value, Interval):
            reach = "" if value.high is None else f" ± {value.high - value.mean:.3f}"
            value = f"{value.mean:.3f}{reach}"
        elif isinstance(value, float):
            value = f"{value:.3f}"
        self.lines.setdefault(line, {})[column] = value


class Trial:
    """All measurements of one model, one after the other; what fails is noted and the rest goes on."""

    def __init__(self, name: str, model: str, options: argparse.Namespace, progress: TerminalProgress) -> None:
        self._outcome = Outcome(name)
        self._model = ModelRequest(model=model, device=options.device)
        self._options, self._progress = options, progress
        self._models = LastModel()
        self._positions = 0

    def run(self) -> Outcome:
        """Measure everything."""
        started = time.perf_counter()
        if self._try("check", self._check):
            self._try("axes", self._axes)
            self._try("heads", self._heads)
            self._try("planes", self._planes)
            self._try("frequencies", self._frequencies)
            self._try("residual", self._residual)
            self._try("axes (random)", lambda: self._axes("random"))
            self._try("heads (random)", lambda: self._heads("random"))
            self._models.forget()
            self._try("report", self._report)
        self._models.forget()
        self._outcome.seconds = time.perf_counter() - started
        return self._outcome

    def _try(self, what: str, step: Callable[[], None]) -> bool:
        started = time.perf_counter()
        problem = None
        try:
            step()
        except WherewhatError as error:
            problem = f"{what}: {error}"
        except Exception as error:  # noqa: BLE001 - a bug in one measurement is a line below the table, not its end
            problem = f"{what}: {type(error).__name__}: {error}"
        if problem is not None:
            self._outcome.problems.append(problem)
        said = problem or f"{what} in {time.perf_counter() - started:.0f} s"
        print(f"{self._outcome.name}: {said}", file=sys.stderr, flush=True)
        return problem is None

    def _check(self) -> None:
        loaded = self._models.loaded(self._model, say=self._progress.say)
        layers = self._models.proof().layers
        self._positions = max_positions(loaded.model)[0] or _AXES_TOKENS
        heads = sorted({layer.heads for layer in layers})
        self._outcome.put("layers × heads", f"{len(layers)} × {' or '.join(map(str, heads))}")

    def _axes(self, weights: Weights = "trained") -> None:
        directory, found = self._measured("axes", weights, tokens=_AXES_TOKENS)
        for metric, column in (("r", "r"), ("pooled_r", "pooled r")):
            self._outcome.put(column, found[metric].overall, line=_line(weights))
            for kind, layers in StoredRun(directory).kinds.items():
                self._outcome.put(column, found[metric].kinds[kind], line=_line(weights, kind, layers))

    def _heads(self, weights: Weights = "trained") -> None:
        directory, found = self._measured("heads", weights)
        pure = ("heads_positional", "heads_symbolic")
        shares = [sum(values[name] for name in pure) for values in _by_document(directory, pure)]
        self._outcome.put("pure heads", interval(shares), line=_line(weights))
        for kind, layers in StoredRun(directory).kinds.items():
            share = sum(found[name].kinds[kind].mean for name in pure)
            self._outcome.put("pure heads", share, line=_line(weights, kind, layers))

    def _planes(self) -> None:
        self._with_control("slow planes", self._measured("planes")[1]["slow_dominance"])

    def _frequencies(self) -> None:
        self._with_control("frequency ID", self._measured("frequencies")[1]["mean_frequency"])

    def _residual(self) -> None:
        directory, _ = self._measured("residual", options={"layers": False})
        losses = _by_document(directory, ("loss_strength_0", "loss"))
        self._outcome.put("additive cost", interval([values["loss_strength_0"] - values["loss"] for values in losses]))

    def _report(self) -> None:
        made = make_report(
            self._model,
            out=self._options.out,
            documents=self._options.documents,
            tokens=min(self._options.tokens, self._positions),
            progress=self._progress,
        )
        path = made.write(self._options.out / f"{made.name}.html")
        self._outcome.put("report", f"{path.stat().st_size / 1e6:.1f} MB")
        self._outcome.problems += [f"report leaves out {line}" for line in made.data["models"][0]["left_out"]]

    def _with_control(self, column: str, summary: MetricSummary) -> None:
        self._outcome.put(column, summary.overall)
        if summary.control is not None:
            self._outcome.put(column, summary.control, line="even")

    def _measured(
        self,
        name: str,
        weights: Weights = "trained",
        *,
        tokens: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[RunDirectory, dict[str, MetricSummary]]:
        """A finished run and its summaries, as a report makes it where it has one, so that it is made once."""
        capacity = Capacity(None, hard_limit=False, planes=BANDS, shortest=self._options.tokens)
        step = find_measurement(name).report_run(capacity, tokens=self._options.tokens) or ReportRun(0.0)
        tokens = tokens or min(step.tokens or self._options.tokens, self._options.tokens)
        request = Request(
            measurement=name,
            model=replace(self._model, weights=weights),
            documents=min(step.documents or self._options.documents, self._options.documents),
            tokens=min(tokens, self._positions),
            options=options or step.options,
        )
        directory = run(request, out=self._options.out, progress=self._progress, models=self._models)
        return directory, {summary.metric.name: summary for summary in StoredRun(directory).summaries}


def _line(weights: Weights, kind: str = "", layers: Sequence[int] = ()) -> str:
    """Name of a line of the table: empty for the trained model as a whole."""
    return ", ".join([*([f"{kind} ({len(layers)})"] if kind else []), *([weights] if weights != "trained" else [])])


def _by_document(directory: RunDirectory, metrics: Sequence[str]) -> list[dict[str, float]]:
    """Means over layers of some metrics, for each document."""
    columns = directory.scores().select(["document", "metric", "value"]).to_pydict()
    found: dict[str, dict[str, list[float]]] = {}
    for document, metric, value in zip(*columns.values(), strict=True):
        if document is not None and metric in metrics:
            found.setdefault(document, {}).setdefault(metric, []).append(value)
    return [{name: sum(values) / len(values) for name, values in named.items()} for named in found.values()]


def show(outcomes: Sequence[Outcome], skipped: Sequence[str], console: Console) -> None:
    """Print the table, and below it what is missing from it and why."""
    table = Table(title="real models: mean ± 95 % over documents, with controls below", title_justify="left")
    for column in ("model", *COLUMNS, "seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for outcome in outcomes:
        own = outcome.lines.pop("", {})
        cells = (own.get(column, "failed") for column in COLUMNS)
        table.add_row(escape(outcome.name), *cells, f"{outcome.seconds:.0f}")
        for line, numbers in outcome.lines.items():
            table.add_row(f"  {line}", *(numbers.get(column, "") for column in COLUMNS), "")
        table.add_section()
    console.print(table)
    for line in [*(f"{outcome.name}: {problem}" for outcome in outcomes for problem in outcome.problems), *skipped]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def main() -> int:
    """Measure every model, print the table; return 1 if one did not deliver everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", default=list(NAMES), help=f"{', '.join(NAMES)} (all by default), or any model of your own"
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder that holds run directories")
    parser.add_argument("--documents", type=int, default=2, help="documents of the embedded text")
    parser.add_argument("--tokens", type=int, default=128, help=f"tokens of each; axes always has {_AXES_TOKENS}")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    options = parser.parse_args()
    progress = TerminalProgress(Console(stderr=True))
    outcomes, skipped = [], []
    for name in options.models:
        try:
            model = fetch(name, say=lambda line: print(line, file=sys.stderr)) if name in NAMES else name
        except UnavailableError as error:
            skipped.append(f"{name}: skipped, {error}")
            continue
        outcomes.append(Trial(name, model, options, progress).run())
    console = Console()
    show(outcomes, skipped, console if console.is_terminal else Console(width=170))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
