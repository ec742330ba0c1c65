"""Measure a model from Python; the result is a finished run with tables, figures and a page."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from wherewhat.boundary import output_file, output_folder
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import make_folder
from wherewhat.measures.measurement import Control, find_measurement
from wherewhat.options import checked
from wherewhat.progress import Progress, TerminalProgress
from wherewhat.report.figures import PICTURES, ending, figure, save_figure, save_table
from wherewhat.report.page import result_page
from wherewhat.report.sections import result_data
from wherewhat.report.views import view_of
from wherewhat.rules.roles import role_table
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import run_with_controls
from wherewhat.runs.identity import Controlled
from wherewhat.runs.request import MemoryModel, ModelRequest, Request, model_request
from wherewhat.runs.results import MetricSummary, StoredRun
from wherewhat.runs.tables import FrameKind, as_frame, curve_table, head_table, layer_table

if TYPE_CHECKING:
    import pyarrow as pa
    from plotly.graph_objects import Figure

    from wherewhat.runs.schema import ProfileFile


class Result:
    """A finished run with tables, figures and a page; in a notebook it is displayed as a table.

    Attributes:
        directory: Its run directory.
        stored: Reader of its scores and curves.
        controls: Results of the control models that were measured with it, by their weights.
        left_out: Why a control model is missing, by its weights.

    Examples:
        >>> result = wherewhat.measure("axes", model, ids, controls=("random",))
        >>> result.heads().sort_values("unique_c")  # a DataFrame with one row per head
        >>> result.plot("map", metric="r_behaviour")
        >>> result.report("page.html")
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        controls: Mapping[str, Result] | None = None,
        left_out: Mapping[str, str] | None = None,
        folder: _TemporaryFolder | None = None,
    ) -> None:
        """Use :func:`measure`, :func:`run` or :meth:`load`."""
        self.directory = directory
        self.stored = StoredRun(directory)
        self.controls = dict(controls or {})
        self.left_out = dict(left_out or {})
        self._folder = folder  # temporary folder of a run in memory, removed with the last result that is in it

    @classmethod
    @checked()
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Open a finished run for reading."""
        return cls(RunDirectory.load(path))

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self.directory.path

    @property
    def config(self) -> Mapping[str, Any]:
        """Everything that the numbers depend on."""
        return self.directory.config

    @property
    def measurement(self) -> str:
        """Name of the measurement."""
        return self.stored.measurement.name

    def scores(self) -> pa.Table:
        """Return all scores as stored: one row per document, layer, head and metric."""
        return self.directory.scores()

    def profiles(self) -> ProfileFile:
        """Return all curves by name, each read on access."""
        return self.directory.profiles()

    def provenance(self) -> dict[str, Any]:
        """Return versions, hashes, device and times."""
        return dict(self.directory.provenance())

    @property
    def in_memory(self) -> bool:
        """Whether the run is kept only as long as this object; use :meth:`save` to keep it."""
        return self._folder is not None

    @checked()
    def save(self, out: str | os.PathLike[str]) -> Result:
        """Copy the run and those of its control models into a folder of run directories; return the copy.

        A run that the folder holds already is left as it is.
        """
        controls = {weights: control.save(out) for weights, control in self.controls.items()}
        saved = _copy(self.path, output_folder(out, name="out", writable=False))
        return Result(RunDirectory.load(saved), controls=controls, left_out=self.left_out)

    def summary(self) -> list[MetricSummary]:
        """Return means over heads with intervals over documents, and their controls."""
        return self.stored.summaries

    @checked()
    def heads(self, *, tidy: bool = False, frame: FrameKind = "pandas") -> Any:
        """Return one row per head with one column per metric: means over documents.

        Args:
            tidy: Return one row per document, head and metric instead.
            frame: Library of the table: pandas, polars or pyarrow.
        """
        return as_frame(head_table(self._runs, tidy=tidy), frame)

    @checked()
    def roles(self, *, frame: FrameKind = "pandas") -> Any:
        """Return one row per role of a head, such as induction, with the numbers that say so; of a run of ``heads``.

        Args:
            frame: Library of the table: pandas, polars or pyarrow.
        """
        if self.measurement != "heads":
            raise ConfigError(f"a run of {self.measurement} has no roles: measure 'heads'")
        return as_frame(role_table(self._runs), frame)

    @checked()
    def layers(self, *, tidy: bool = False, frame: FrameKind = "pandas") -> Any:
        """Return one row per layer with one column per metric: means over heads and documents.

        Args:
            tidy: Return one row per layer and metric instead, with the 95 % interval over documents.
            frame: Library of the table: pandas, polars or pyarrow.
        """
        return as_frame(layer_table(self._runs, tidy=tidy), frame)

    @checked()
    def curves(self, name: str | None = None, *, frame: FrameKind = "pandas") -> Any:
        """Return curves with one row per value, such as the distance term of every head.

        Args:
            name: Name of the curve, such as ``a``; all curves by default.
            frame: Library of the table: pandas, polars or pyarrow.
        """
        return as_frame(curve_table(self._runs, name), frame)

    @checked()
    def plot(self, name: str | None = None, **options: Any) -> Figure:
        """Return a figure; see :func:`wherewhat.report.figures.figure`."""
        return figure(self.stored, name, **options)

    @checked()
    def export(self, path: str | os.PathLike[str], name: str | None = None, **options: Any) -> Path:
        """Write a figure (.png, .svg, .pdf, .html) or a table (.csv, .parquet): all scores, or ``roles`` by name."""
        path = output_file(path, name="the file")
        if ending(path) in PICTURES:
            return save_figure(self.plot(name, **options), path)
        if name == "roles" and not options:
            return save_table(self.roles(frame="pyarrow"), path)
        if name is not None or options:
            raise ConfigError(f"{path.name} holds all scores: leave out the figure and its options")
        return save_table(self.directory.scores(), path)

    @checked()
    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the numbers, controls, figure and provenance of this run; return its path.

        It is one HTML file that opens offline. :func:`wherewhat.make_report` makes the report of all measurements.
        """
        return result_page(result_data(self._runs, self.left_out)).write(path)

    @property
    def _runs(self) -> dict[str, StoredRun]:
        controls = {weights: control.stored for weights, control in self.controls.items()}
        return {str(self.config["weights"]): self.stored, **controls}

    def __repr__(self) -> str:
        """Return a table of means, intervals and controls."""
        run = self.stored
        header, rows = self._header, [_cells(summary, self._beside) for summary in run.summaries]
        keep = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
        table = [[row[i] for i in keep] for row in (header, *rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(keep))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        place = "in memory" if self.in_memory else str(self.path)
        return "\n".join([f"{run.measurement.name}: {run.title}", *lines, *self._missing, place])

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows; names of models and documents are escaped."""
        run = self.stored
        header = [*self._header, *(f"{kind} ({len(layers)})" for kind, layers in run.kinds.items())]
        rows = ""
        for summary in run.summaries:
            kinds = [summary.words(kind) if kind in summary.kinds else "" for kind in run.kinds]
            first, *cells = map(html.escape, [*_cells(summary, self._beside), *kinds])
            rows += (
                f'<tr title="{html.escape(summary.metric.reading)}"><td style="text-align:left">{first}</td>'
                + "".join(f"<td>{cell}</td>" for cell in cells)
                + "</tr>"
            )
        return (
            f"<b>{html.escape(run.measurement.name)}</b>: {html.escape(run.title)}<table><thead><tr>"
            + "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in header)
            + f"</tr></thead><tbody>{rows}</tbody></table>"
            f"<small>{html.escape(' '.join([*self._missing, run.measurement.limits]))}</small>"
        )

    @property
    def _header(self) -> list[str]:
        controls = (f"one {weights} control" for weights in self.controls)
        return [view_of(self.stored.measurement).over, "value (95 %)", *controls, "control"]

    @property
    def _missing(self) -> list[str]:
        return [f"No {weights} control: {reason}" for weights, reason in self.left_out.items()]

    @property
    def _beside(self) -> dict[str, dict[str, MetricSummary]]:
        """Values of the control models by weights and metric."""
        return {
            weights: {summary.metric.name: summary for summary in control.summary()}
            for weights, control in self.controls.items()
        }


@checked()
def run(
    request: Request | str,
    *,
    out: str | os.PathLike[str] | None = None,
    controls: Sequence[Control] = (),
    again: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Measure what a request describes and return the finished run.

    Args:
        request: What to measure; the name of a measurement means ``Request(name)``, with the embedded model and text.
        out: Folder of run directories, in which finished parts are found again; None keeps the run in memory.
        controls: Weights of control models to measure as well, such as ``("random", "shuffled")``.
        again: Measure anew what is finished in ``out``.
        progress: Progress callback; by default progress is shown on a terminal and in notebooks.
    """
    asked = Request(request) if isinstance(request, str) else request
    return _run_all([asked], out=out, controls=controls, again=again, progress=progress)[0]


def _run_all(
    requests: Sequence[Request],
    *,
    out: str | os.PathLike[str] | None,
    controls: Sequence[Control],
    again: bool,
    progress: Progress | None,
) -> list[Result]:
    """Measure requests of one model and return their finished runs; arguments as for :func:`run`."""
    for request in requests:
        find_measurement(request.measurement)
    folder = _TemporaryFolder() if out is None else None
    place = folder.path if folder is not None else output_folder(cast("str", out), name="out", writable=False)
    progress = progress or TerminalProgress()
    controlled = run_with_controls(requests, controls, out=place, progress=progress, again=again)
    return [_result(of_request, folder) for of_request in controlled]


@overload
def measure(measurement: str, model: Any = ..., ids: Any = ..., **options: Any) -> Result: ...


@overload
def measure(measurement: Sequence[str], model: Any = ..., ids: Any = ..., **options: Any) -> dict[str, Result]: ...


@checked()
def measure(
    measurement: str | Sequence[str],
    model: Any = "smollm2",
    ids: Any = None,
    *,
    texts: Any = None,
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    tokenizer: Any = None,
    controls: Sequence[Control] = (),
    out: str | os.PathLike[str] | None = None,
    documents: int | None = None,
    tokens: int | None = None,
    prompts: str | None = None,
    items: str | None = None,
    beyond: bool = False,
    chunk: int | None = None,
    seed: int = 0,
    again: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Result | dict[str, Result]:
    """Measure a model, in memory or by name, and return the result, or the results of several measurements by name.

    Args:
        measurement: Name of the measurement, such as ``axes``, ``heads`` or one of your own, or several names:
            measurements of layers then share their passes.
        model: A model of transformers, a PEFT model, a pipeline, what :func:`wherewhat.load` returned, or a name,
            folder or file.
        ids: Token ids: ``(n,)`` for one document, ``(documents, n)`` or a list of lists for several.
        texts: Strings, documents or a column of a dataset instead; by default the embedded prose.
        files: Files or folders to read texts from.
        tokenizer: Tokenizer of a model in memory, for texts.
        controls: Control models to measure as well: ``random``, ``shuffled``.
        out: Folder of run directories; None keeps the run in memory until it is saved.
        documents: Number of documents; by default all that are given.
        tokens: Tokens of each document; by default as many as the shortest has, of texts at most 512.
        prompts: Kind of prompts to generate instead of texts.
        items: Task or file of questions with alternatives, for the measurement ``choices``.
        beyond: Allow texts longer than the model's trained length.
        chunk: Run longer documents in chunks of this many tokens.
        seed: Seed of control models and prompts.
        again: Measure anew what is finished in ``out``.
        progress: Progress callback; by default progress is shown on a terminal and in notebooks.
        options: Options of the measurement, by name; of several measurements a mapping for each, by its name.

    Examples:
        >>> wherewhat.measure("axes", model, ids)
        >>> results = wherewhat.measure(["axes", "heads"], model, ids, heads={"queries": 8})
        >>> results["heads"].heads()
    """
    if ids is not None and texts is not None:
        raise ConfigError("ids and texts were both given: give one of them")
    asked = model_request(model, tokenizer)
    if seed and isinstance(asked, ModelRequest | MemoryModel):
        asked = replace(asked, seed=seed)
    names = [measurement] if isinstance(measurement, str) else list(measurement)
    requests = [
        Request(
            name,
            model=asked,
            files=cast("Any", files),
            texts=texts if ids is None else ids,
            documents=documents,
            tokens=tokens,
            prompts=prompts,
            items=items,
            beyond=beyond,
            chunk=chunk,
            options=chosen,
        )
        for name, chosen in zip(names, _options_by_name(measurement, names, options), strict=True)
    ]
    results = _run_all(requests, out=out, controls=controls, again=again, progress=progress)
    return results[0] if isinstance(measurement, str) else dict(zip(names, results, strict=True))


def _options_by_name(
    measurement: str | Sequence[str], names: Sequence[str], options: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the options of each measurement."""
    if isinstance(measurement, str):
        return [options]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"measurement is {list(names)}: give one or more names, each once")
    for name, chosen in options.items():
        if name not in names or not isinstance(chosen, Mapping):
            example = f"{names[0]}={{…}}"
            raise ConfigError(f"the option {name} is not of one of {', '.join(names)}: give their options as {example}")
    return [options.get(name, {}) for name in names]


class _TemporaryFolder:
    """A folder that is removed with this object, or at the end of the process."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="wherewhat-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


def _result(controlled: Controlled, folder: _TemporaryFolder | None) -> Result:
    """Return the run of the model itself, with those of its control models."""
    # Opened again, which verifies that each is complete.
    first, *others = ((weights, RunDirectory.load(directory.path)) for weights, directory in controlled.runs.items())
    controls = {weights: Result(directory, folder=folder) for weights, directory in others}
    return Result(first[1], controls=controls, left_out=controlled.left_out, folder=folder)


def _copy(run: Path, out: Path) -> Path:
    """Copy a run directory into a folder, so that it appears there complete or not at all."""
    target = out / run.name
    if target.exists():
        return target
    make_folder(out)
    try:
        with tempfile.TemporaryDirectory(dir=out, prefix=".saving-") as started:
            shutil.copytree(run, Path(started) / run.name)
            (Path(started) / run.name).rename(target)
    except OSError as error:
        raise StoreError(f"cannot save to {out}: {error.strerror or error}") from error
    return target


def _cells(summary: MetricSummary, beside: Mapping[str, Mapping[str, MetricSummary]]) -> list[str]:
    """Return title, value and controls of a metric."""
    metric = summary.metric
    own = "" if summary.control is None else f"{summary.control:.4g} {metric.control_title}"
    others = [named[metric.name].words() if metric.name in named else "" for named in beside.values()]
    title = f"{metric.title} ({metric.unit})" if metric.unit else metric.title
    return [title, summary.words(), *others, own]
