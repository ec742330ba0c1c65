"""The schedule of a report: its texts, and the runs with their number of documents and tokens."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.measures.measurement import Capacity
from wherewhat.measures.registry import measurements
from wherewhat.runs.request import MemoryModel, ModelRequest, Request
from wherewhat.text.documents import Document, check_count
from wherewhat.text.files import read_documents

DOCUMENTS, TOKENS = 4, 512
"""Documents and tokens of each by default."""

_STANDARD_INPUT = "-"


@dataclass(frozen=True)
class GivenText:
    """The texts of a report.

    Attributes:
        sources: Files and folders to read it from; None for the embedded text.
        documents: The documents.
        kept: The file for the content of standard input, and that content; None if it was not given.
        texts: The documents if they are only in memory.
    """

    sources: tuple[str, ...] | None
    documents: list[Document]
    kept: tuple[Path, bytes] | None = None
    texts: tuple[Document, ...] | None = None

    def keep(self) -> None:
        """Write the content of standard input to its file, so that it can be read again."""
        if self.kept is None:
            return
        path, data = self.kept
        if not path.is_file() or path.read_bytes() != data:
            make_folder(path.parent)
            write_file(path, data)


class _RecordedStream:
    """A stream that records what is read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = bytearray()

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(size)
        self.data += found
        return found

    def isatty(self) -> bool:
        return self._stream.isatty()


def given_text(
    text: Sequence[str] | None,
    *,
    documents: int | None,
    out: Path,
    texts: tuple[Document, ...] | None = None,
    default: int = DOCUMENTS,
) -> GivenText:
    """Read the texts of a report.

    Args:
        text: Files, folders or ``-``; None for the embedded text.
        documents: Number of documents; the first ``default`` by default.
        out: Folder of run directories, and of the content of standard input.
        texts: Documents in memory instead.
        default: Largest number of documents where none was asked for.
    """
    if texts is not None:
        if text:
            raise ConfigError("text (files) and texts (strings or token ids) were both given: give one of them")
        check_count(documents, len(texts))
        chosen = texts[: documents or default]
        return GivenText(None, list(chosen), texts=chosen)
    sources = tuple(text) if text else None
    if sources is None:
        return GivenText(None, read_documents(None, count=documents or default))
    piped = getattr(sys.stdin, "buffer", None) if _STANDARD_INPUT in sources else None
    recorded = None if piped is None else _RecordedStream(piped)
    found = read_documents(sources, stdin=cast("BinaryIO | None", recorded), count=documents)
    if documents is None:
        found = found[:default]
    if recorded is None:
        return GivenText(sources, found)
    data = bytes(recorded.data)
    # The file has the name of the document, so that the runs are those of `--text -` in other commands.
    path = out / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}" / "stdin.txt"
    return GivenText(tuple(str(path) if s == _STANDARD_INPUT else s for s in sources), found, (path, data))


@dataclass(frozen=True)
class ScheduledRun:
    """One run of a report, and its cost in tokens of a plain pass."""

    request: Request
    cost: float


def schedule(
    model: ModelRequest | MemoryModel,
    capacity: Capacity,
    *,
    text: Sequence[str] | None = None,
    texts: tuple[Document, ...] | None = None,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> tuple[list[ScheduledRun], list[str]]:
    """Return the runs of a report, in order, and one line for each measurement that is left out.

    The first run is the decomposition of the model.

    Args:
        model: The model. A trained model is measured together with its control models.
        capacity: What the model and the texts allow to be measured.
        text: Files or folders; None for the embedded text.
        texts: Documents in memory instead.
        documents: Documents of the decomposition; the others use fewer.
        tokens: Tokens of each; the others use fewer, except a length curve beyond the trained length.
    """
    scheduled, controls, left_out = [], [], []
    for measurement in measurements().values():
        run = measurement.report_run(capacity, tokens=tokens)
        if run is None:
            continue
        if isinstance(run, str):
            left_out.append(f"{measurement.name}: {run}")
            continue
        length = run.tokens or tokens if run.beyond else min(run.tokens or tokens, tokens)
        request = Request(
            measurement=measurement.name,
            model=model,
            text=tuple(text) if text else None,
            texts=texts,
            documents=min(run.documents or documents, documents),
            tokens=length,
            beyond=run.beyond,
            options=run.options,
        )
        cost = run.passes * (request.documents or 1) * length
        scheduled.append(ScheduledRun(request, cost))
        if model.weights == "trained":
            controls += [ScheduledRun(request.with_weights(weights), cost) for weights in run.controls]
    # Sorted by weights, because a model is kept only until another one is requested.
    return scheduled + sorted(controls, key=lambda control: str(control.request.model.weights)), left_out
