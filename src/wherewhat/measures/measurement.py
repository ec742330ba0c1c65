"""The interface of a measurement: config, function, metrics, and what it is measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from wherewhat.captures.attention import LayerAttention

if TYPE_CHECKING:
    from wherewhat.captures.blocks import Blocks


class Estimate(Protocol):
    """A mean over documents with its 95 % interval; the bounds are None where documents are too few for one."""

    @property
    def mean(self) -> float:
        """The mean."""

    @property
    def low(self) -> float | None:
        """Lower bound."""

    @property
    def high(self) -> float | None:
        """Upper bound."""


@dataclass(frozen=True)
class Compared:
    """One of the things compared.

    Attributes:
        name: Its name.
        metrics: Names of its metrics by title of the column they stand in.
        verdict: What the numbers come to, in words.
    """

    name: str
    metrics: Mapping[str, str]
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """All of them.

    Attributes:
        what: What they are, as the title of a column.
        rows: One entry each, all with the same columns.
        notes: What holds for all of them.
    """

    what: str
    rows: tuple[Compared, ...]
    notes: tuple[str, ...]


class Subject(Protocol):
    """A model as measurements see it: something that runs on tokens and shows its layers."""

    def run(
        self,
        ids: Tensor,
        reducer: Callable[[LayerAttention], None],
        *,
        logits: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Run on ``ids`` ``(batch, n)``, hand each layer to ``reducer``, return logits if asked for.

        With ``positions`` ``(n,)`` the tokens stand there; who sees whom stays as it is.
        """

    def edited(
        self, ids: Tensor, editor: Callable[[LayerAttention], Tensor | None], *, positions: Tensor | None = None
    ) -> Tensor:
        """Logits ``(batch, n, vocabulary)`` with layers' attention outputs replaced by what ``editor`` returns."""

    def reordered(self, orders: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """While open, hidden states that enter a layer are put in another order: place i takes that of ``order[i]``."""

    def trained_length(self) -> int:
        """Tokens of the texts it was trained on."""

    def key_mixing(self) -> Mapping[int, float]:
        """How far swapping two inputs of a layer is from swapping its keys, by layer: 0 where each token makes its own.

        Above :data:`KEYS_MIX` a layer's keys cannot be told from its inputs without running it.
        """

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """The attention modules of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""


KEYS_MIX = 0.05
"""Layers with more key mixing are not token by token: rounding stays far below, real mixing is 0.4 and more."""


@dataclass(frozen=True)
class Curve:
    """Numbers that belong together, such as one value per distance and head.

    Attributes:
        values: The numbers.
        axes: What each dimension is, such as ``("head", "distance")``.
    """

    values: Tensor
    axes: tuple[str, ...]


@dataclass(frozen=True)
class LayerScores:
    """Numbers of one layer on one document.

    Attributes:
        layer: Index of the layer.
        heads: Values per query head by metric, each ``(heads,)``.
        whole: Values of the layer as a whole by metric: controls that are the same for every head.
        curves: Curves by name, stored beside the scores.
    """

    layer: int
    heads: Mapping[str, Tensor]
    whole: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """Words for one number, so that tables and reports can explain it.

    Attributes:
        name: Name in ``scores.parquet``.
        title: Short title for a column.
        unit: Unit, empty for plain numbers.
        reading: One sentence that says how to read it.
        control: Name of the metric to read it against, if any.
        control_title: What the control is, in two or three words.
        error: Name under which its standard error over documents is stored, for numbers over all documents together:
            that of a mean over heads stands with the layer or the model as a whole.
        bounds: Names under which the ends of its 95 % interval are stored likewise, where that is not Student's.
        proportion: Whether each document's value is 0 or 1, and the mean a share of documents.
    """

    name: str
    title: str
    unit: str
    reading: str
    control: str | None = None
    control_title: str = ""
    error: str | None = None
    bounds: tuple[str, str] | None = None
    proportion: bool = False


@dataclass(frozen=True)
class DocumentScores:
    """Numbers of one model on one document.

    Attributes:
        layers: One entry per layer.
        whole: Values of the model as a whole by metric, such as a correlation pooled over all heads.
        curves: Curves of the model as a whole by name.
    """

    layers: Sequence[LayerScores]
    whole: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A text whose next token is an answer that can be right or wrong.

    Attributes:
        ids: Token ids ``(1, n)``; the logits of the last predict the answer.
        candidates: Token ids of every possible answer; none begins with another.
        correct: Which of them is right.
        kind: The kind of question.
        size: Number of alternatives in the text: pairs, or symbols of a list.
        place: Where the answer stands among them, from 0 (first) to 1 (last).
    """

    ids: Tensor
    candidates: tuple[tuple[int, ...], ...]
    correct: int
    kind: str
    size: int
    place: float


@dataclass(frozen=True)
class Text:
    """A text in tokens, with where its words and sentences are.

    Attributes:
        ids: Token ids ``(1, n)``.
        prefix: Number of tokens in front that are no text, such as BOS.
        words: First token and one past the last of each word, in order; None where the tokenizer does not tell.
        sentences: The same of each whole sentence.
        respelled: For each word the token ids that it has with two inner letters transposed; empty where it has none.
    """

    ids: Tensor
    prefix: int = 0
    words: tuple[tuple[int, int], ...] | None = None
    sentences: tuple[tuple[int, int], ...] | None = None
    respelled: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PromptSet:
    """Prompts to be made for a model's tokenizer.

    Attributes:
        name: Name of the set; its prompts are numbered after it.
        kind: Kind of prompt.
        count: How many.
        options: Options of the kind.
    """

    name: str
    kind: str
    count: int
    options: Mapping[str, Any]


Measure = Callable[[Subject, Any, Any], DocumentScores]
Across = Callable[[Subject, Sequence[Tensor], Any], DocumentScores]


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        name: Subcommand and name in the store.
        summary: One line for ``--help`` and the report.
        config: Frozen dataclass of its options; every field has a default and a ``help`` in its metadata.
        measure: Function from subject, token ids ``(1, n)`` (a :class:`Question` where ``prompts`` is given, a
            :class:`Text` where ``spans`` is, ``Choices`` where ``items`` is) and config
            to the document's numbers; None if a single document has none.
        metrics: Words for what it measures, most important first.
        limits: What the numbers do not show.
        twins: Twins of the model to measure beside it, as controls.
        combine: Numbers over all documents of a run together, from those of each; None if there are none.
        across: The same where they need the model: function from subject, token ids ``(n,)`` of every document and
            config. At most one of the two is given.
        least_documents: Fewest documents it makes sense for.
        prompts: The prompts it is measured on in place of documents, by config; None for documents.
        more_metrics: Words for numbers whose names depend on the config; they come after ``metrics``.
        spans: Whether it must know where words and sentences are.
        items: Whether it is measured on questions with alternatives in place of documents.
        compare: What stands side by side in a finished run, with verdicts, from the estimates of its metrics and the
            config; ``more_metrics`` are then shown there and not one below the other.
        pooled: Numbers of the model from those of some of its layers, to be taken of each kind of layer as well.
        revision: To be raised when its numbers change: what an earlier one measured is measured anew.
    """

    name: str
    summary: str
    config: type[Any]
    measure: Measure | None
    metrics: tuple[Metric, ...]
    limits: str
    twins: tuple[Literal["random", "shuffled"], ...] = ("random",)
    combine: Callable[[Sequence[DocumentScores], Any], DocumentScores] | None = None
    across: Across | None = None
    least_documents: int = 1
    prompts: Callable[[Any], Sequence[PromptSet]] | None = None
    more_metrics: Callable[[Any], tuple[Metric, ...]] | None = None
    spans: bool = False
    items: bool = False
    compare: Callable[[Mapping[str, Estimate], Any], Comparison] | None = None
    pooled: Callable[[Sequence[LayerScores]], Mapping[str, float]] | None = None
    revision: int = 1

    def words(self, config: Any) -> tuple[Metric, ...]:
        """Words for all that it measures under a config."""
        return self.metrics + (self.more_metrics(config) if self.more_metrics is not None else ())


def per_layer(
    function: Callable[[LayerAttention, Any], LayerScores],
    whole: Callable[[Sequence[LayerScores]], Mapping[str, float]] = lambda layers: {},
) -> Measure:
    """A measurement that looks at each layer by itself, while the forward pass runs.

    Args:
        function: Numbers of one layer.
        whole: Numbers of the model, from those of its layers.
    """

    def measure(subject: Subject, ids: Tensor, config: Any) -> DocumentScores:
        found: list[LayerScores] = []
        subject.run(ids, lambda attention: found.append(function(attention, config)))
        return DocumentScores(found, whole(found))

    return measure


def option(default: Any, help_text: str) -> Any:
    """A config field with a default and one line of help."""
    return field(default=default, metadata={"help": help_text})
