"""``make_report``: measure models and collect everything into a report."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wherewhat.boundary import output_folder, user_path
from wherewhat.errors import ConfigError, printable
from wherewhat.files import config_hash, run_folder_name
from wherewhat.options import checked
from wherewhat.progress import Progress, Silent
from wherewhat.report.data import headline
from wherewhat.report.excerpt import Excerpt, ExcerptFile, take_excerpt
from wherewhat.report.learning import learning_curves
from wherewhat.report.measurements import TOKENS, GivenText, Pace, given_text, measure, schedule
from wherewhat.report.page import Profiled, Report, plotly_js
from wherewhat.report.sections import collect
from wherewhat.report.side_by_side import ComparedModel, compare_models
from wherewhat.runs.collection import Runs
from wherewhat.runs.execution import LastModel
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

_LOADING = 3000
"""Tokens of a pass that takes about as long as loading and proving the model, where that was not timed."""


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
    tokens: int = TOKENS,
    training: Sequence[Path] = (),
    again: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Measure what is missing and collect everything into a report.

    Args:
        models: The model, in memory or by name, or several to be shown side by side, including control models. A model
            in memory brings its tokenizer as a pipeline, or as :class:`~wherewhat.runs.request.MemoryModel`.
        out: Folder of run directories.
        files: Files, folders or ``-``; None for the embedded text.
        texts: Strings, documents or token ids instead.
        documents: Documents of the decomposition; the first four by default.
        tokens: Tokens of each.
        training: Trainings to show: run directories of recorded trainings or of the multi-hop laboratory, or folders of
            them; those in ``out`` are always shown.
        again: Measure anew what is finished in ``out``.
        progress: Progress callback; silent by default.
    """
    progress, out = progress or Silent(), output_folder(out, name="--out")
    listed = list(models)
    for number, model in enumerate(listed):
        if model in listed[:number]:
            raise ConfigError(f"{model.model} ({model.weights}) was given twice: give each model once")
    # Raises for wrong values and for a missing plotly before anything is read or loaded.
    Request(measurement="axes", documents=documents, tokens=tokens)
    plotly_js()
    learning = learning_curves([user_path(folder, name="--training") for folder in training], out=out)
    inputs = given_text(files, documents=documents, out=out, texts=texts)
    measured = []
    for number, model in enumerate(listed, 1):
        if len(listed) > 1:
            progress.say(f"model {number} of {len(listed)}: {model.model} ({model.weights})")
        measured.append(_measured(model, inputs, tokens=tokens, out=out, progress=progress, again=again))
    progress.say("writing the page")
    names = _unique_names(listed, [seen for seen, _ in measured])
    data: dict[str, Any] = {
        "models": [collect(runs, seen, name=name) for name, (seen, runs) in zip(names, measured, strict=True)],
        "comparison": compare_models([ComparedModel(name, *pair) for name, pair in zip(names, measured, strict=True)]),
        "learning": learning,
        "command": _command(listed, inputs, documents=len(inputs.documents), tokens=tokens, training=training),
    }
    hashes = [run.directory.config_hash for _, runs in measured for run in runs.shown]
    key = config_hash({"runs": list(hashes), "studies": [study["name"] for study in learning]})
    profiled = [
        Profiled(name, [finding["text"] for finding in shown["findings"]], headline(runs), runs.left_out)
        for name, shown, (_, runs) in zip(names, data["models"], measured, strict=True)
    ]
    return Report(run_folder_name(f"report-{'-'.join(names)}", key), data, profiled)


def seen_model(
    model: ModelRequest | MemoryModel,
    documents: Sequence[Document],
    *,
    tokens: int | None,
    out: Path,
    progress: Progress,
    models: LastModel,
    again: bool = False,
) -> tuple[Excerpt, Pace]:
    """Return the excerpt of a model, stored or made now, and the model's expected speed.

    The model is loaded only if there is no excerpt, or it is made ``again``. Without a number of tokens of each
    document there are 512, or as many as model and texts have.
    """
    stored = ExcerptFile.of(model, documents, tokens=tokens or 0, out=out, models=models)
    seen = None if again else stored.read()
    if seen is not None:
        return seen, Pace(_LOADING * seen.seconds, seen.seconds)
    progress.say(f"loading {model.model} ({model.weights}) and running it on the first tokens")
    started = time.perf_counter()
    loaded = models.loaded(model, say=progress.say)
    length = tokens or common_length(loaded, documents)
    seen = take_excerpt(loaded, documents, tokens=length, proof=models.proof())
    start = time.perf_counter() - started - length * len(seen.passages) * seen.seconds
    stored.write(seen)
    return seen, Pace(start, seen.seconds)


def _measured(
    model: ModelRequest | MemoryModel, inputs: GivenText, *, tokens: int, out: Path, progress: Progress, again: bool
) -> tuple[Excerpt, Runs]:
    """Return excerpt and runs of one model, which is loaded only if something is missing."""
    models = LastModel()
    seen, pace = seen_model(
        model, inputs.documents, tokens=tokens, out=out, progress=progress, models=models, again=again
    )
    inputs.keep()
    scheduled, left_out = schedule(
        model, seen.capacity, files=inputs.sources, texts=inputs.texts, documents=len(inputs.documents), tokens=tokens
    )
    runs = measure(scheduled, out=out, pace=pace, progress=progress, models=models, again=again)
    shown = {other.name for other in runs.others}
    runs.left_out.extend(line for line in left_out if line.partition(":")[0] not in shown)
    return seen, runs


def _unique_names(models: Sequence[ModelRequest | MemoryModel], seen: Sequence[Excerpt]) -> list[str]:
    """Return a unique name for each model: its own, with its weights, with the name as given, with a number."""
    names = [
        printable(str(excerpt.facts["name"])) + ("" if model.weights == "trained" else f" ({model.weights})")
        for model, excerpt in zip(models, seen, strict=True)
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
    words += ["--documents", str(documents), "--tokens", str(tokens)]
    for path in training:
        words += ["--training", str(path)]
    return shlex.join([*words, *given_options(first, leave_out=("model", "weights"))])
