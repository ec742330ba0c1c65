"""``make_report``: measure models and collect everything into a report."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from wherewhat.boundary import output_folder, user_path
from wherewhat.errors import ConfigError, printable
from wherewhat.files import JSON, config_hash, run_folder_name
from wherewhat.options import checked
from wherewhat.progress import Progress, Silent, Work, duration
from wherewhat.report.data import headline
from wherewhat.report.excerpt import Excerpt, ExcerptFile, take_excerpt
from wherewhat.report.learning import learning_curves
from wherewhat.report.measurements import (
    CONTROL_MODELS,
    DOCUMENTS,
    TOKENS,
    Coming,
    GivenText,
    Pace,
    given_text,
    measure,
    schedule,
)
from wherewhat.report.page import Profiled, Report, plotly_js, waiting_page, write_page
from wherewhat.report.sections import collect
from wherewhat.report.side_by_side import ComparedModel, compare_models
from wherewhat.runs.collection import Runs
from wherewhat.runs.execution import LastModel
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.request import (
    MemoryModel,
    ModelRequest,
    Request,
    common_length,
    file_names,
    given_options,
    model_request,
)
from wherewhat.text.documents import Document, documents_of

_LOADING = 1200
"""Tokens of a pass that takes about as long as loading and proving the model, where that was not timed."""
_PAGES_SHARE = 0.05
"""Largest share of the time that pages of an unfinished report take."""
QUICK = (2, 128)
"""Documents and tokens of each of a quick report."""


def _requests(models: Any) -> Any:
    """Return one or several models as a list of requests."""
    if isinstance(models, list | tuple):
        return [model_request(model) for model in models]
    request = model_request(models)
    return [request] if isinstance(request, ModelRequest | MemoryModel) else request


@checked(models=_requests, files=file_names, texts=documents_of)
def make_report(
    models: Sequence[ModelRequest | MemoryModel],
    *,
    out: str | os.PathLike[str],
    files: Sequence[str] | None = None,
    texts: tuple[Document, ...] | None = None,
    documents: int | None = None,
    tokens: int | None = None,
    quick: bool = False,
    training: Sequence[Path] = (),
    again: bool = False,
    progress: Progress | None = None,
    write: bool = False,
) -> Report:
    """Measure what is missing and collect everything into a report.

    Args:
        models: The model, in memory or by name, or several to be shown side by side, including control models. A model
            in memory brings its tokenizer as a pipeline, or as :class:`~wherewhat.runs.request.MemoryModel`.
        out: Folder of run directories.
        files: Files, folders or ``-``; None for the embedded text.
        texts: Strings, documents or token ids instead.
        documents: Documents of the decomposition; the first four by default.
        tokens: Tokens of each; 512 by default.
        quick: Use at most two documents, of 128 tokens, where these are not given, and no control model but the random
            one.
        training: Trainings to show: run directories of recorded trainings or of the multi-hop laboratory, or folders of
            them; those in ``out`` are always shown.
        again: Measure anew what is finished in ``out``.
        progress: Progress callback; silent by default.
        write: Write the page to ``out``, of models by name: after the first measurement, several times while others
            are made, and in the end.
    """
    work, out = Work(progress or Silent()), output_folder(out, name="--out")
    listed = list(models)
    for number, model in enumerate(listed):
        if model in listed[:number]:
            raise ConfigError(f"{model.model} ({model.weights}) was given twice: give each model once")
    most, length = QUICK if quick else (DOCUMENTS, TOKENS)
    tokens = length if tokens is None else tokens
    # Raises for wrong values and for a missing plotly before anything is read or loaded.
    Request(measurement="axes", documents=documents, tokens=tokens)
    plotly_js()
    learning = learning_curves([user_path(folder, name="--training") for folder in training], out=out)
    inputs = given_text(files, documents=documents, out=out, texts=texts, default=most)
    command = _command(listed, inputs, documents=len(inputs.documents), tokens=tokens, quick=quick, training=training)
    with (progress or Silent()).watch(work):
        pages = _Pages(listed, learning, command, quick=quick, work=work)
        try:
            if write:
                work.begin("looking for the model")
                pages.start([ExcerptFile.of(model, inputs.documents, tokens=tokens, out=out) for model in listed], out)
            for number, model in enumerate(listed, 1):
                if len(listed) > 1:
                    work.say(f"model {number} of {len(listed)}: {model.model} ({model.weights})")
                measured = _measured(
                    model,
                    inputs,
                    pages,
                    tokens=tokens,
                    quick=quick,
                    out=out,
                    work=work,
                    again=again,
                    others=len(listed) - number,
                )
                pages.add(*measured)
            return pages.finish()
        finally:
            pages.end()


class _Pages:
    """The page of a report, while its runs are made and in the end."""

    def __init__(
        self,
        models: Sequence[ModelRequest | MemoryModel],
        learning: list[dict[str, Any]],
        command: str | None,
        *,
        quick: bool,
        work: Work,
    ) -> None:
        self._models, self._learning, self._command, self._quick = models, learning, command, quick
        self._work = work
        self._stored: list[ExcerptFile] = []
        self._measured: list[tuple[Excerpt, Runs]] = []
        self._path: Path | None = None
        self._through: Path | None = None
        self._waiting, self._new = "", list[Path]()
        self._written, self._cost = -math.inf, 0.0

    def start(self, stored: Sequence[ExcerptFile], out: Path) -> None:
        """Say where the page will be, and write one there that waits for the first measurement if there is none."""
        self._path = out / f"{self._name(stored)}.html"
        # There, what a killed process leaves is removed after an hour.
        self._through = KnownRuns(out).folder
        if not self._path.exists():
            folders = (self._through, *self._through.parents)
            self._new = [folder for folder in folders if not folder.exists()]
            self._waiting = waiting_page(self._names(stored))
            write_page(self._path, self._waiting, through=self._through)
        self._work.say(f"the page: {self._path}; it can be opened now, and is completed while this command runs")

    def add(self, stored: ExcerptFile, seen: Excerpt, runs: Runs) -> None:
        """Add a model whose runs are all made."""
        self._stored.append(stored)
        self._measured.append((seen, runs))

    def write_partial(
        self, stored: ExcerptFile, seen: Excerpt, runs: Callable[[], Runs], coming: Sequence[Coming], count: int
    ) -> None:
        """Write the page of the runs so far, unless the last one is too recent for what a page costs."""
        started = time.perf_counter()
        if self._path is None or started - self._written < self._cost / _PAGES_SHARE:
            return
        if self._cost:
            self._work.after -= self._cost
        self._work.begin("writing the page of the measurements so far", self._cost)
        left = {
            "done": count - len(coming),
            "count": count,
            "written": round(1000 * time.time()),
            "left": round(self._work.left()),
            "coming": [
                {"name": run.request.measurement, "weights": run.request.model.weights, "seconds": round(run.seconds)}
                for run in coming
            ],
        }
        # Models that follow are named once they are measured.
        report = self._report([*self._stored, stored], [*self._measured, (seen, runs())])
        write_page(self._path, replace(report, data={**report.data, "unfinished": left}).html(), through=self._through)
        self._waiting, self._written = "", time.perf_counter()
        self._cost = self._written - started
        self._work.begin("")
        self._work.after += self._cost  # the page in the end

    def finish(self) -> Report:
        """Return the report of all models, written if the page was started."""
        self._work.after = 0.0
        self._work.begin("writing the page", self._cost)
        report = self._report(self._stored, self._measured)
        if self._path is not None:
            self._waiting = ""
            write_page(self._path, report.html(), through=self._through)
        return report

    def end(self) -> None:
        """Remove the page that waits for the first measurement, and its folder, if there was none."""
        if self._path is None or not self._waiting:
            return
        with suppress(OSError):
            # Another process may have written the first page meanwhile.
            if self._path.read_text("utf-8") == self._waiting:
                self._path.unlink()
        for folder in self._new:
            with suppress(OSError):  # the folder holds something
                folder.rmdir()

    def _names(self, stored: Sequence[ExcerptFile]) -> list[str]:
        return _unique_names(self._models[: len(stored)], [file.model for file in stored])

    def _name(self, stored: Sequence[ExcerptFile]) -> str:
        """Return the file name of the page, which depends on what was asked for, not on what is measured already."""
        studies: list[JSON] = [study["name"] for study in self._learning]
        excerpts: list[JSON] = [file.path.name for file in stored]
        key = config_hash({"excerpts": excerpts, "quick": self._quick, "studies": studies})
        return run_folder_name(f"report-{'-'.join(self._names(stored))}", key)

    def _report(self, stored: Sequence[ExcerptFile], measured: Sequence[tuple[Excerpt, Runs]]) -> Report:
        named = list(zip(self._names(stored), measured, strict=True))
        data: dict[str, Any] = {
            "models": [collect(runs, seen, name=name) for name, (seen, runs) in named],
            "comparison": compare_models([ComparedModel(name, *pair) for name, pair in named]),
            "learning": self._learning,
            "command": self._command,
        }
        profiled = [
            Profiled(name, [finding["text"] for finding in shown["findings"]], headline(runs), runs.left_out)
            for (name, (_, runs)), shown in zip(named, data["models"], strict=True)
        ]
        return Report(self._name(stored), data, profiled)


def seen_model(
    model: ModelRequest | MemoryModel,
    documents: Sequence[Document],
    *,
    tokens: int | None,
    out: Path,
    work: Work,
    models: LastModel,
    again: bool = False,
) -> tuple[ExcerptFile, Excerpt, Pace]:
    """Return the excerpt of a model, stored or made now, with its file and the model's expected speed.

    The model is loaded only if there is no excerpt, or it is made ``again``. Without a number of tokens of each
    document there are 512, or as many as model and texts have.
    """
    stored = ExcerptFile.of(model, documents, tokens=tokens or 0, out=out, models=models)
    seen = None if again else stored.read()
    if seen is not None:
        return stored, seen, Pace(_LOADING * seen.seconds, seen.seconds)
    work.begin(f"loading {model.model} ({model.weights})")
    started = time.perf_counter()
    loaded = models.loaded(model, say=work.say)
    proof = models.proof()
    start = time.perf_counter() - started
    work.say(f"loaded and verified in {duration(start)}; running it once on the first tokens")
    work.begin("running the model on the first tokens")
    seen = take_excerpt(loaded, documents, tokens=tokens or common_length(loaded, documents), proof=proof)
    stored.write(seen)
    return stored, seen, Pace(start, seen.seconds)


def _measured(
    model: ModelRequest | MemoryModel,
    inputs: GivenText,
    pages: _Pages,
    *,
    tokens: int,
    quick: bool,
    out: Path,
    work: Work,
    again: bool,
    others: int,
) -> tuple[ExcerptFile, Excerpt, Runs]:
    """Return excerpt and runs of one model, which is loaded only if something is missing."""
    models = LastModel()
    stored, seen, pace = seen_model(
        model, inputs.documents, tokens=tokens, out=out, work=work, models=models, again=again
    )
    inputs.keep()
    scheduled, left_out = schedule(
        model,
        seen.capacity,
        files=inputs.sources,
        texts=inputs.texts,
        documents=len(inputs.documents),
        tokens=tokens,
        controls=CONTROL_MODELS[:1] if quick else CONTROL_MODELS,
    )

    def complete(runs: Runs) -> Runs:
        shown = {other.name for other in runs.others}
        runs.left_out.extend(line for line in left_out if line.partition(":")[0] not in shown)
        return runs

    runs = measure(
        scheduled,
        out=out,
        pace=pace,
        work=work,
        models=models,
        again=again,
        others=others,
        partial=lambda runs, *rest: pages.write_partial(stored, seen, lambda: complete(runs()), *rest),
    )
    return stored, seen, complete(runs)


def _unique_names(models: Sequence[ModelRequest | MemoryModel], names: Sequence[str]) -> list[str]:
    """Return a unique name for each model: its own, with its weights, with the name as given, with a number."""
    names = [
        printable(name) + ("" if model.weights == "trained" else f" ({model.weights})")
        for model, name in zip(models, names, strict=True)
    ]
    specs = [printable(str(model.model)) for model in models]
    names = [f"{name} [{spec}]" if names.count(name) > 1 else name for name, spec in zip(names, specs, strict=True)]
    return [f"{name} #{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _command(
    models: Sequence[ModelRequest | MemoryModel],
    inputs: GivenText,
    *,
    documents: int,
    tokens: int,
    quick: bool,
    training: Sequence[Path],
) -> str | None:
    """Return the command that makes the same report; None unless the models are all names with all weights."""
    listed = [replace(model, model=str(model.model)) for model in models if isinstance(model, ModelRequest)]
    if len(listed) < len(models) or inputs.texts is not None:
        return None
    first = listed[0]
    names, weights = (list(dict.fromkeys(getattr(model, field) for model in listed)) for field in ("model", "weights"))
    if listed != [replace(first, model=name, weights=kind) for name in names for kind in weights]:
        return None
    words = ["wherewhat", "report", *names]
    for name in weights if weights != ["trained"] else []:
        words += ["--weights", name]
    for source in inputs.sources or ():
        words += ["--text", source]
    words += [*["--quick"] * quick, "--documents", str(documents), "--tokens", str(tokens)]
    for path in training:
        words += ["--training", str(path)]
    return shlex.join([*words, *given_options(first, leave_out=("model", "weights"))])
