"""``make_report``: the names of models in, a report out."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.hashes import config_hash, run_folder_name
from wherewhat.imports import plugins
from wherewhat.options import checked
from wherewhat.progress import Progress, Silent
from wherewhat.report.data import headline
from wherewhat.report.excerpt import Look, look
from wherewhat.report.measurements import Pace, Runs, measure
from wherewhat.report.notes import Notes
from wherewhat.report.page import Profiled, Report, check_plotly
from wherewhat.report.plan import TOKENS, GivenText, given_text, plan
from wherewhat.report.sections import collect
from wherewhat.runs.execution import LastModel, load_model
from wherewhat.runs.request import ModelRequest, Request, model_request

_LOADING = 3000
"""Loading and proving a model takes about as long as a pass over so many tokens, where it was not timed."""


@checked(models=model_request)
def make_report(
    models: ModelRequest | Sequence[ModelRequest],
    *,
    out: str | os.PathLike[str],
    text: Sequence[str] | None = None,
    documents: int | None = None,
    tokens: int = TOKENS,
    multihop: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Report:
    """Measure what is missing and collect everything into a report.

    Args:
        models: The model or its name, or several models to be put side by side; control models count as models.
        out: Folder that holds run directories.
        text: Files, folders or ``-``; None for the embedded text.
        documents: Documents of the decomposition; the first four by default.
        tokens: Tokens of each.
        multihop: Trainings of the multi-hop laboratory, or folders of them; those in ``out`` are shown anyway.
        progress: Where to tell how far it is; silent by default.
    """
    progress, out = progress or Silent(), Path(out)
    listed = [models] if isinstance(models, ModelRequest) else list(models)
    for number, model in enumerate(listed):
        if model in listed[:number]:
            raise ConfigError(f"{model.model} ({model.weights}) was given twice: give each model once")
    # Refuses numbers that make no sense before anything is read or loaded.
    Request(measurement="axes", documents=documents, tokens=tokens)
    check_plotly()
    learning = _learning_curves(multihop, out=out)
    given = given_text(text, documents=documents, out=out)
    made = []
    for number, model in enumerate(listed, 1):
        if len(listed) > 1:
            progress.say(f"model {number} of {len(listed)}: {model.model} ({model.weights})")
        made.append(_measured(model, given, tokens=tokens, out=out, progress=progress))
    progress.say("writing the page")
    names = _told_apart(listed, [seen for seen, _ in made])
    data: dict[str, Any] = {
        "models": [collect(runs, seen, name=name) for name, (seen, runs) in zip(names, made, strict=True)],
        "learning": learning,
        "command": _command(listed, given, documents=len(given.documents), tokens=tokens, multihop=multihop),
    }
    hashes = [run.directory.config_hash for _, runs in made for _, run in runs.finished]
    key = config_hash({"runs": list(hashes), "studies": [one["name"] for one in learning]})
    profiled = [Profiled(name, headline(runs), runs.left_out) for name, (_, runs) in zip(names, made, strict=True)]
    return Report(run_folder_name(f"report-{'-'.join(names)}", key), data, profiled)


def _learning_curves(multihop: Sequence[Path], *, out: Path) -> list[dict[str, Any]]:
    """Return data of multi-hop trainings from the entry point ``learning`` of the group ``wherewhat.report``."""
    find = plugins("wherewhat.report").get("learning")
    if find is None:
        if multihop:
            raise ConfigError(f"--multihop {multihop[0]}: the laboratory is not installed; install wherewhat again")
        return []
    curves: list[dict[str, Any]] = find(multihop, out=out)
    return curves


def _measured(
    model: ModelRequest, given: GivenText, *, tokens: int, out: Path, progress: Progress
) -> tuple[Look, Runs]:
    """One model's look and runs; the model is loaded only where something is missing."""
    notes = Notes.of(model, given.documents, tokens=tokens, out=out)
    seen, start, models = notes.look(), None, LastModel()
    if seen is None:
        progress.say(f"loading {model.model} ({model.weights}), and looking at the first tokens")
        started = time.perf_counter()
        loaded = models.loaded(model, lambda: load_model(model, say=progress.say))
        seen = look(loaded, given.documents, tokens=tokens, proof=models.proof())
        del loaded
        start = time.perf_counter() - started - tokens * seen.seconds
        notes.keep_look(seen)
    given.keep()
    planned = plan(model, seen.capacity, text=given.sources, documents=len(given.documents), tokens=tokens)
    pace = Pace(_LOADING * seen.seconds if start is None else start, seen.seconds)
    return seen, measure(planned, notes=notes, pace=pace, progress=progress, models=models)


def _told_apart(models: Sequence[ModelRequest], seen: Sequence[Look]) -> list[str]:
    """A name for each model that no other has: its own, with its weights, with what the user typed, with a number."""
    names = [
        str(one.facts["name"]) if model.weights == "trained" else f"{one.facts['name']} ({model.weights})"
        for model, one in zip(models, seen, strict=True)
    ]
    names = [f"{name} [{m.model}]" if names.count(name) > 1 else name for name, m in zip(names, models, strict=True)]
    return [f"{name} #{i}" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]


def _command(
    models: Sequence[ModelRequest], given: GivenText, *, documents: int, tokens: int, multihop: Sequence[Path]
) -> str | None:
    """The command that makes the same report; None where the models are not every name with all weights alike."""
    listed = [replace(model, model=str(model.model)) for model in models]
    first = listed[0]
    names, weights = (list(dict.fromkeys(getattr(model, field) for model in listed)) for field in ("model", "weights"))
    if listed != [replace(first, model=name, weights=kind) for name in names for kind in weights]:
        return None
    words = ["wherewhat", "report", *names]
    for name in weights if weights != ["trained"] else []:
        words += ["--weights", name]
    for source in given.sources or ():
        words += ["--text", source]
    words += ["--documents", str(documents), "--tokens", str(tokens)]
    for path in multihop:
        words += ["--multihop", str(path)]
    for field in fields(first):
        value = getattr(first, field.name)
        if field.name not in ("model", "weights") and value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)
