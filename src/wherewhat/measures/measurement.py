"""The interface of a measurement: options, metrics, controls, and a function with a typed input.

A measurement is a subclass of :class:`LayerMeasurement`, :class:`TextMeasurement`, :class:`QuestionMeasurement`,
:class:`ChoicesMeasurement` or :class:`DocumentsMeasurement`, which say what it is measured on. Command line, help,
tables, export, sweeps, report and the documentation's index are generated from the subclass. Importing this module, and
the modules that declare measurements, does not import torch: methods import what they compute with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from wherewhat.errors import MeasureError

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.captures.attention import LayerAttention
    from wherewhat.captures.blocks import Blocks
    from wherewhat.measures.choices.answers import Choices


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
class Spans:
    """Words and sentences of a text as ranges of tokens.

    Attributes:
        words: First token and one past the last of each word, in order; None where the tokenizer does not tell.
        sentences: The same of each whole sentence.
        respelled: For each word the token ids that it has with two inner letters transposed; empty where it has none.
    """

    words: tuple[tuple[int, int], ...] | None = None
    sentences: tuple[tuple[int, int], ...] | None = None
    respelled: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Text:
    """A text in tokens.

    Attributes:
        ids: Token ids ``(1, n)``.
        prefix: Number of tokens in front that are no text, such as BOS.
        find_spans: Function that finds words and sentences; called once, when they are needed.
    """

    ids: Tensor
    prefix: int = 0
    find_spans: Callable[[], Spans] = Spans

    @cached_property
    def spans(self) -> Spans:
        """Words and sentences."""
        return self.find_spans()

    def first(self, n: int) -> Text:
        """Return the first ``n`` tokens, without spans."""
        return Text(self.ids[:, :n], self.prefix)


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


Control = Literal["random", "shuffled"]
"""A control model: freshly initialised, or with the entries of its query and key projections permuted."""


@dataclass(frozen=True)
class Capacity:
    """What a model and its texts allow a report to measure.

    Attributes:
        trained: Tokens of the texts it was trained on; None where it does not say.
        hard_limit: Whether it cannot compute more positions than it was made for.
        planes: Smallest number of planes in a layer that rotates; 0 if none rotates.
        shortest: Tokens of the shortest text.
    """

    trained: int | None
    hard_limit: bool
    planes: int
    shortest: int

    @property
    def rotates(self) -> bool:
        """Whether any layer rotates its queries and keys."""
        return self.planes > 0


@dataclass(frozen=True)
class ReportRun:
    """How a report runs a measurement.

    Attributes:
        passes: Time it takes relative to a plain pass over the same tokens, as measured on two cores.
        documents: Largest number of documents; None for as many as are asked for.
        tokens: Largest number of tokens of each; None likewise.
        controls: Control models to run it on as well.
        options: Options that differ from the measurement's defaults.
        beyond: Whether it goes beyond the positions the model was made for.
    """

    passes: float
    documents: int | None = None
    tokens: int | None = None
    controls: tuple[Control, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    beyond: bool = False


class Measurement(ABC):
    """What all measurements declare. Subclass one of the five kinds below, not this class.

    Attributes:
        name: Subcommand and name in the store.
        summary: One line for ``--help`` and the report.
        config: Frozen dataclass of its options; every field has a default and a ``help`` in its metadata.
        metrics: Its metrics, most important first.
        limits: What the numbers do not show.
        page: Name of its documentation page, without ``.md``; None for its own name.
        controls: Control models to measure beside the model.
        least_documents: Smallest number of documents.
        figure: Name of the figure that shows a run best.
        over: What the means in a table are over.
        revision: Bump when results change: runs of an earlier revision are measured again.
    """

    name: ClassVar[str]
    group: ClassVar[str] = "Measurements"
    summary: ClassVar[str]
    config: ClassVar[type[Any]]
    metrics: ClassVar[tuple[Metric, ...]]
    limits: ClassVar[str]
    page: ClassVar[str | None] = None
    controls: ClassVar[tuple[Control, ...]] = ("random",)
    least_documents: ClassVar[int] = 1
    figure: ClassVar[str] = "map"
    over: ClassVar[str] = "mean over heads and documents"
    revision: ClassVar[int] = 1

    def more_metrics(self, config: Any) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config; they come after ``metrics``."""
        return ()

    def all_metrics(self, config: Any) -> tuple[Metric, ...]:
        """Return all metrics under a config."""
        return self.metrics + self.more_metrics(config)

    def combine(self, documents: Sequence[DocumentScores], config: Any) -> DocumentScores:
        """Return scores of all documents of a run together, from those of each."""
        raise NotImplementedError

    @property
    def combines(self) -> bool:
        """Whether :meth:`combine` is defined."""
        return type(self).combine is not Measurement.combine

    def compare(self, estimates: Mapping[str, Estimate], config: Any) -> Comparison | None:
        """Return what a finished run compares, with verdicts; ``more_metrics`` are then shown there only."""
        return None

    def pooled(self, layers: Sequence[LayerScores]) -> Mapping[str, float]:
        """Return scores of the model from those of some of its layers; also used for each kind of layer."""
        return {}

    @property
    def pools(self) -> bool:
        """Whether :meth:`pooled` is defined."""
        return type(self).pooled is not Measurement.pooled

    def draw(self, run: Any) -> Any:
        """Return a Plotly figure of a finished :class:`~wherewhat.runs.results.StoredRun`; None for ``figure``."""
        return None

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun | None:
        """Return how a report runs it on texts of ``tokens`` tokens; None to leave it out of reports."""
        return None


class LayerMeasurement(Measurement):
    """A measurement of one layer at a time, while the forward pass runs."""

    @abstractmethod
    def measure(self, layer: LayerAttention, config: Any) -> LayerScores:
        """Return the scores of one layer."""

    def check(self, layers: Sequence[LayerScores]) -> None:
        """Refuse, with a :class:`~wherewhat.errors.MeasureError`, a model whose layers give nothing to measure."""


class TextMeasurement(Measurement):
    """A measurement of a model on one text."""

    @abstractmethod
    def measure(self, subject: Subject, text: Text, config: Any) -> DocumentScores:
        """Return the scores of one text."""


class QuestionMeasurement(Measurement):
    """A measurement of a model on prompts that end in a question, which it makes itself."""

    over: ClassVar[str] = "mean over prompts"

    @abstractmethod
    def prompts(self, config: Any) -> Sequence[PromptSet]:
        """Return the prompts to make."""

    @abstractmethod
    def measure(self, subject: Subject, question: Question, config: Any) -> DocumentScores:
        """Return the scores of one prompt."""


class ChoicesMeasurement(Measurement):
    """A measurement of a model on questions with alternatives."""

    over: ClassVar[str] = "mean over items"

    @abstractmethod
    def measure(self, subject: Subject, choices: Choices, config: Any) -> DocumentScores:
        """Return the scores of one question."""


class DocumentsMeasurement(Measurement):
    """A measurement of a model on all documents together; a single document has no scores."""

    @abstractmethod
    def measure(self, subject: Subject, texts: Sequence[Text], config: Any) -> DocumentScores:
        """Return the scores of all texts together."""


def measure_text(measurement: Measurement, subject: Subject, text: Text, config: Any) -> DocumentScores:
    """Measure one text: each layer during one pass, or as the measurement does it."""
    if isinstance(measurement, TextMeasurement):
        return measurement.measure(subject, text, config)
    if not isinstance(measurement, LayerMeasurement):
        raise MeasureError(f"{measurement.name} is not measured on a single text")
    layers: list[LayerScores] = []
    subject.run(text.ids, lambda layer: layers.append(measurement.measure(layer, config)))
    measurement.check(layers)
    return DocumentScores(layers, measurement.pooled(layers))
