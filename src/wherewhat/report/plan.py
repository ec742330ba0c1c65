"""The measurements of a report and how much text each uses."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from wherewhat.extend.methods import find_method
from wherewhat.files import make_folder, write_file
from wherewhat.measures.frequencies.measurement import BANDS
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import Document
from wherewhat.text.files import read_documents

if TYPE_CHECKING:
    from wherewhat.models.loaded import Weights


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
class Step:
    """One measurement of a report.

    Attributes:
        measurement: Its name.
        twins: Twins of a trained model that it is made on as well, as controls.
        documents: Most documents it is made on; None for as many as are asked for.
        tokens: Most tokens of each; None likewise.
        passes: Time it takes beside a plain pass over the same tokens, as seen on two cores.
        options: Options that differ from the measurement's own.
    """

    measurement: str
    twins: tuple[Weights, ...]
    documents: int | None
    tokens: int | None
    passes: float
    options: Mapping[str, Any] = field(default_factory=dict)


STEPS = (
    Step("axes", ("random", "shuffled"), None, None, 1.5),
    Step("heads", ("random",), 4, 256, 8.0, {"queries": 8}),
    Step("planes", (), 1, 256, 4.0),
    Step("distance", (), 1, 256, 11.0),
    Step("frequencies", (), 3, 128, 22.0),
    Step(
        "perturb",
        (),
        3,
        256,
        20.0,
        {
            "kinds": ("words", "position_jitter"),
            "rates": (0.01, 0.05, 0.1, 0.2, 0.5),
            "seeds": 1,
            "axes": False,
            "equivalence": False,
        },
    ),
)

_METHODS = ("none", "sliding-window", "streaming-llm")
_BEYOND_METHODS = (*_METHODS, "lm-infinite", "yarn")
_LENGTH_DOCUMENTS = 3
_BEYOND, _WINDOW = 4, 4
"""A text of so many trained lengths, or of so many windows."""
_LONGEST = 2048
_ROOMY = 32
"""Trained length or window from which on three runs can be planted in it."""
_SHORTEST = 16


@dataclass(frozen=True)
class Room:
    """What a model and its texts leave room for.

    Attributes:
        trained: Tokens of the texts it was trained on; None where it does not say.
        wall: Whether no more than its positions can be computed at all.
        planes: Fewest planes that a rotating layer has; 0 if none rotates.
        shortest: Tokens of the shortest of the texts that are measured.
    """

    trained: int | None
    wall: bool
    planes: int
    shortest: int

    @property
    def rotates(self) -> bool:
        """Whether any layer rotates its queries and keys."""
        return self.planes > 0


@dataclass(frozen=True)
class Planned:
    """One run of a report, and how many tokens' passes it costs."""

    request: Request
    cost: float


def plan(
    model: ModelRequest,
    room: Room,
    *,
    text: Sequence[str] | None = None,
    documents: int = DOCUMENTS,
    tokens: int = TOKENS,
) -> list[Planned]:
    """The runs of a report, in order; the first is the one all others stand beside.

    Args:
        model: The model. A trained one has its twins beside it.
        room: What it and the texts leave room for.
        text: Files or folders; None for the embedded text.
        documents: Documents of the decomposition; the others use fewer.
        tokens: Tokens of each; the others use 256 at most, but for the length curve, which has as many, or
            twice as many where that goes beyond the trained length.
    """
    planned, twins = [], []
    for step in STEPS:
        request = Request(
            measurement=step.measurement,
            model=model,
            text=tuple(text) if text else None,
            documents=min(step.documents or documents, documents),
            tokens=min(step.tokens or tokens, tokens),
            options=_options(step, room),
        )
        planned.append(_planned(request, step.passes))
        if model.weights == "trained":
            twins += [_planned(request.twin(weights), step.passes) for weights in step.twins]
    lengths = length_request(planned[0].request, room)
    if lengths is not None:
        planned.append(_planned(lengths, 3 + 5.5 * len(lengths.options["methods"])))
    # One after the other of the same weights, because a model is kept for as long as no other is asked for.
    return planned + sorted(twins, key=lambda twin: str(twin.request.model.weights))


def _options(step: Step, room: Room) -> Mapping[str, Any]:
    """Options of a step; no more bands than there are planes."""
    if step.measurement == "frequencies" and 0 < room.planes < BANDS:
        return {**step.options, "bands": room.planes}
    return step.options


def _planned(request: Request, passes: float) -> Planned:
    return Planned(request, passes * (request.documents or 1) * request.tokens)


def length_request(first: Request, room: Room) -> Request | None:
    """A length curve that takes seconds: beyond the trained length where that is short, else within it.

    Texts of four trained lengths are run where twice ``tokens`` are enough for at least two of them. Elsewhere, as with
    the 8,192 positions of SmolLM2, the text stays inside the trained length and the methods get a window of a quarter
    of the text: what a small window costs. Rescaled frequencies have no meaning there and are left out.

    Args:
        first: The decomposition.
        room: What model and texts leave room for.

    Returns:
        The request, or None where the texts are too short for any.
    """
    most = min(2 * first.tokens, room.shortest, _LONGEST)
    trained = room.trained
    documents = min(_LENGTH_DOCUMENTS, first.documents or _LENGTH_DOCUMENTS)
    request = replace(first, measurement="extend", documents=documents)
    if trained is not None and not room.wall and most >= 2 * trained:
        options = {"methods": _possible(_BEYOND_METHODS, room), **_planting(trained)}
        return replace(request, tokens=min(_BEYOND * trained, most), beyond=True, options=options)
    if first.tokens < _SHORTEST:
        return None
    window = first.tokens // _WINDOW
    options = {"methods": _possible(_METHODS, room), "trained": window, "window": window, **_planting(window)}
    return replace(request, options=options)


def _planting(edge: int) -> dict[str, Any]:
    """Where what is to be found again is planted, so that it fits into one trained length or window."""
    return (
        {"depths": (0, 50, 100), "run": max(2, min(16, edge // 16))} if edge >= _ROOMY else {"depths": (0,), "run": 2}
    )


def _possible(methods: Sequence[str], room: Room) -> tuple[str, ...]:
    """Those of the methods that a model without rotation has as well."""
    return tuple(name for name in methods if room.rotates or not find_method(name).rotary)
