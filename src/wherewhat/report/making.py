"""``make_report``: a model's name in, a report out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from wherewhat.pipeline.progress import Progress, Silent
from wherewhat.pipeline.request import ModelRequest
from wherewhat.pipeline.running import load_model
from wherewhat.report.collect import collect
from wherewhat.report.headline import headline
from wherewhat.report.looking import look
from wherewhat.report.measuring import measure
from wherewhat.report.page import Report, check_plotly
from wherewhat.report.plan import TOKENS, plan
from wherewhat.store.hashing import config_hash
from wherewhat.store.naming import run_folder_name
from wherewhat.text import read_documents


def make_report(
    model: ModelRequest,
    *,
    out: Path,
    text: Sequence[str] | None = None,
    documents: int | None = None,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> Report:
    """Measure what is missing and collect everything into a report.

    Args:
        model: The model, with trained weights.
        out: Folder that holds run directories.
        text: Files or folders; None for the embedded text.
        documents: Documents of the decomposition; the first four by default.
        tokens: Tokens of each.
        progress: Where to tell how far it is; silent by default.

    Raises:
        WherewhatError: If anything about the model, the text or the disk is wrong.
    """
    progress = progress or Silent()
    check_plotly()
    runs = measure(plan(model, text=text, documents=documents, tokens=tokens), out=out, progress=progress)
    progress.say("looking at the first tokens, and writing the page")
    request, _ = runs.first
    document = read_documents(request.text, count=request.documents)[0]
    seen = look(load_model(model, say=progress.say), document.text, tokens=request.tokens)
    command = _command(model, text=request.text, documents=request.documents, tokens=request.tokens)
    key = config_hash({"runs": [directory.config_hash for _, directory in runs.finished]})
    name = run_folder_name(f"report-{seen.facts['name']}", key)
    return Report(name, collect(runs, seen, command=command), headline(runs))


def _command(model: ModelRequest, *, text: Sequence[str] | None, documents: int | None, tokens: int) -> str:
    """The command that makes the same report."""
    words = ["wherewhat", "report", str(model.model)]
    for source in text or ():
        words += ["--text", source]
    words += ["--documents", str(documents), "--tokens", str(tokens)]
    default = ModelRequest()
    for option in ("device", "dtype", "revision"):
        if (value := getattr(model, option)) != getattr(default, option):
            words += [f"--{option}", str(value)]
    return shlex.join([*words, "--offline"] if model.offline else words)
