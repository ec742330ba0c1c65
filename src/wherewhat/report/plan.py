"""Which measurements a report is made of, and on how much text: a few minutes on two cores for a small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherewhat.errors import ConfigError
from wherewhat.pipeline.request import ModelRequest, Request
from wherewhat.text import read_documents

if TYPE_CHECKING:
    from wherewhat.models import Weights

DOCUMENTS, TOKENS = 4, 512
"""Documents and tokens of each by default."""

_START = 1000
"""Loading and proving a model takes about as long as the decomposition of so many tokens."""


@dataclass(frozen=True)
class Step:
    """One measurement of a report.

    Attributes:
        measurement: Its name.
        weights: The model and those of its twins that it is made on.
        documents: Most documents it is made on; None for as many as are asked for.
        tokens: Most tokens of each; None likewise.
        cost: Time for a token of a document beside that of ``axes``, to tell how much time is left.
        options: Options that differ from the measurement's own.
    """

    measurement: str
    weights: tuple[Weights, ...]
    documents: int | None
    tokens: int | None
    cost: float
    options: Mapping[str, Any] = field(default_factory=dict)


STEPS = (
    Step("axes", ("trained", "random", "shuffled"), None, None, 1.0),
    Step("heads", ("trained", "random"), 4, 256, 4.5, {"queries": 8}),
    Step("planes", ("trained",), 1, 256, 2.5),
    Step("distance", ("trained",), 1, 256, 5.0),
)


@dataclass(frozen=True)
class Planned:
    """One run of a report, and its share of the time."""

    request: Request
    cost: float


def plan(
    model: ModelRequest, *, text: Sequence[str] | None = None, documents: int | None = None, tokens: int = TOKENS
) -> list[Planned]:
    """The runs of a report, in order; the first is the one all others stand beside.

    Args:
        model: The model, with trained weights.
        text: Files or folders; None for the embedded text.
        documents: Documents of the decomposition; the first four by default. The others use fewer.
        tokens: Tokens of each; the others use 256 at most.

    Raises:
        ConfigError: If standard input is given: each measurement reads the text again.
        TextError: If the text cannot be read or there is too little of it.
    """
    if text is not None and "-" in text:
        raise ConfigError("--text - can be read only once, but a report reads its text several times: give a file")
    given = tuple(text) if text else None
    if documents is None:
        documents = DOCUMENTS if given is None else min(DOCUMENTS, len(read_documents(given)))
    planned = []
    for step in STEPS:
        count = min(step.documents or documents, documents)
        request = Request(
            measurement=step.measurement,
            model=model,
            text=given,
            documents=count,
            tokens=min(step.tokens or tokens, tokens),
            options=step.options,
        )
        cost = _START + step.cost * count * request.tokens
        planned += [Planned(request if w == "trained" else request.twin(w), cost) for w in step.weights]
    return planned
