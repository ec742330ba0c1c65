"""The measurements of a report and how much text each uses."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from wherewhat.files import make_folder, write_file
from wherewhat.measures.measurement import Capacity
from wherewhat.measures.registry import measurements
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import Document
from wherewhat.text.files import read_documents

if TYPE_CHECKING:
    pass


_STANDARD_INPUT = "-"


@dataclass(frozen=True)
class GivenText:
    """What a report is measured on.

    Attributes:
        sources: Files and folders to read it from; None for the embedded text.
        documents: The documents.
        kept: The file that stands for standard input and the bytes that belong into it; None if it was not given.
    """

    sources: tuple[str, ...] | None
    documents: list[Document]
    kept: tuple[Path, bytes] | None = None

    def keep(self) -> None:
        """Write what came from standard input to its file, so that it can be read again."""
        if self.kept is None:
            return
        path, data = self.kept
        if not path.is_file() or path.read_bytes() != data:
            make_folder(path.parent)
            write_file(path, data)


class _Heard:
    """A stream that remembers what was read from it; how much that may be is for the reader to say."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = bytearray()

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(size)
        self.data += found
        return found

    def isatty(self) -> bool:
        return self._stream.isatty()


def given_text(text: Sequence[str] | None, *, documents: int | None, out: Path) -> GivenText:
    """Read the texts that a report is asked for.

    Args:
        text: Files, folders or ``-``; None for the embedded text.
        documents: How many documents to use; the first four by default.
        out: Folder that holds run directories, and standard input if that is given.
    """
    sources = tuple(text) if text else None
    if sources is None:
        return GivenText(None, read_documents(None, count=documents or DOCUMENTS))
    piped = getattr(sys.stdin, "buffer", None) if _STANDARD_INPUT in sources else None
    heard = None if piped is None else _Heard(piped)
    found = read_documents(sources, stdin=cast("BinaryIO | None", heard), count=documents)
    if documents is None:
        found = found[:DOCUMENTS]
    if heard is None:
        return GivenText(sources, found)
    data = bytes(heard.data)
    # The name of the file is that of the document, so that the runs are those of `--text -` anywhere else.
    path = out / f"stdin-{hashlib.sha256(data).hexdigest()[:12]}" / "stdin.txt"
    return GivenText(tuple(str(path) if s == _STANDARD_INPUT else s for s in sources), found, (path, data))


DOCUMENTS, TOKENS = 4, 512
"""Documents and tokens of each by default."""


@dataclass(frozen=True)
class Planned:
    """One run of a report, and how many tokens' passes it costs."""

    request: Request
    cost: float


def plan(
    model: ModelRequest,
    capacity: Capacity,
    *,
    text: Sequence[str] | None = None,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> list[Planned]:
    """The runs of a report, in order; the first is the one all others stand beside.

    Args:
        model: The model. A trained one has its control models beside it.
        capacity: What it and the texts allow.
        text: Files or folders; None for the embedded text.
        documents: Documents of the decomposition; the others use fewer.
        tokens: Tokens of each; the others use fewer, but for a length curve beyond the trained length.
    """
    planned, controls = [], []
    for measurement in measurements().values():
        run = measurement.report_run(capacity, tokens=tokens)
        if run is None:
            continue
        request = Request(
            measurement=measurement.name,
            model=model,
            text=tuple(text) if text else None,
            documents=min(run.documents or documents, documents),
            tokens=run.tokens or tokens if run.beyond else min(run.tokens or tokens, tokens),
            beyond=run.beyond,
            options=run.options,
        )
        planned.append(_planned(request, run.passes))
        if model.weights == "trained":
            controls += [_planned(request.with_weights(weights), run.passes) for weights in run.controls]
    # One after the other of the same weights, because a model is kept for as long as no other is asked for.
    return planned + sorted(controls, key=lambda control: str(control.request.model.weights))


def _planned(request: Request, passes: float) -> Planned:
    return Planned(request, passes * (request.documents or 1) * request.tokens)
