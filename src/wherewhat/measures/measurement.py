"""The interface of a measurement: options, metrics, controls, and a function with a typed input.

A measurement is a subclass of :class:`LayerMeasurement`, :class:`TextMeasurement`, :class:`QuestionMeasurement`,
:class:`ChoicesMeasurement` or :class:`DocumentsMeasurement`, which say what it is measured on. Command line, help,
tables, export, sweeps, report and the documentation's index are generated from the subclass. Importing this module, and
the modules that declare measurements, does not import torch: methods import what they compute with.

Measurements are known by name: those of this package, registered ones, and those of installed packages, which name a
subclass by an entry point of the group ``wherewhat.measurements``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from wherewhat.boundary import MOST_TOKENS, check_at_most
from wherewhat.errors import ConfigError, MeasureError, WherewhatError
from wherewhat.imports import isolated, plugins
from wherewhat.options import nearest, short_repr
from wherewhat.scores import Metric, PendingCopies, Scores, on_cpu, real_tensor, stored_metric

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.caches.plan import Plan
    from wherewhat.captures.attention import LayerAttention
    from wherewhat.captures.blocks import Blocks
    from wherewhat.captures.stream import ResidualStream
    from wherewhat.measures.variants import VariantRuns


class Subject(Protocol):
    """Interface through which measurements run a model."""

    def run(
        self,
        ids: Tensor,
        reducer: Callable[[LayerAttention], None],
        *,
        logits: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor | None:
        """Run on ``ids`` ``(batch, n)``, pass each layer to ``reducer``, and return the logits if ``logits`` is True.

        ``positions``, ``(n,)`` or ``(batch, n)``, replaces the positions 0, 1, …; the attention mask stays the same.
        """

    def edited(
        self, ids: Tensor, editor: Callable[[LayerAttention], Tensor | None], *, positions: Tensor | None = None
    ) -> Tensor:
        """Return logits ``(batch, n, vocabulary)`` with attention outputs replaced by those that ``editor`` returns."""

    def reordered(self, orders: Mapping[int, Tensor]) -> AbstractContextManager[None]:
        """While open, permute the hidden states that enter a layer: row i is taken from row ``order[i]``.

        Orders are ``(n,)``, or ``(batch, n)`` for each text its own.
        """

    def trained_length(self) -> int:
        """Return the number of tokens of the texts that the model was trained on."""

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan of another model."""

    def key_mixing(self) -> Mapping[int, float]:
        """Return, by layer, how much keys depend on the inputs of other tokens: 0 where on their own token only.

        Above :data:`KEYS_MIX`, keys of swapped inputs are known only from running the layer again.
        """

    def blocks(self, ids: Tensor) -> AbstractContextManager[Blocks]:
        """Return the attention modules of a pass over ``ids`` ``(1, n)``, to be run again on changed inputs."""

    def variants(self, ids: Tensor, *, logits: bool = False) -> VariantRuns:
        """Return runs of variants of the model that differ in one layer, over ``ids`` ``(batch, n)`` as they are.

        With ``logits`` the logits of the next tokens are read, too.
        """

    def stream(self) -> ResidualStream:
        """Return how the heads add to the logits; raise a :class:`CaptureError` if the logits are no such sum."""


KEYS_MIX = 0.05
"""Largest key mixing of layers whose keys depend on their own token only: rounding is far less, mixing 0.4 or more."""


@dataclass(frozen=True)
class Question:
    """A prompt whose next token is the answer to a question.

    Attributes:
        ids: Token ids ``(1, n)``; the logits of the last predict the answer.
        candidates: Token ids of every possible answer; none is a prefix of another.
        correct: Index of the correct candidate.
        kind: The kind of question.
        size: Number of alternatives in the prompt: pairs, or symbols of a list.
        place: Position of the answer among them, from 0 (first) to 1 (last).
    """

    ids: Tensor
    candidates: tuple[tuple[int, ...], ...]
    correct: int
    kind: str
    size: int
    place: float

    __repr__ = short_repr


@dataclass(frozen=True)
class Spans:
    """Words and sentences of a text as ranges of tokens.

    Attributes:
        words: First token and one past the last of each word, in order; None if the tokenizer gives no offsets.
        sentences: The same for each complete sentence.
        respelled: For each word its token ids with two inner letters transposed; empty where that is impossible.
    """

    words: tuple[tuple[int, int], ...] | None = None
    sentences: tuple[tuple[int, int], ...] | None = None
    respelled: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Text:
    """A text in tokens.

    Attributes:
        ids: Token ids ``(1, n)``.
        prefix: Number of leading tokens that are not text, such as BOS.
        find_spans: Function that finds words and sentences; called once, on first use.
        encode: Function that returns the token ids of another text, without a prefix; None for texts given as ids.
    """

    ids: Tensor
    prefix: int = 0
    find_spans: Callable[[], Spans] = Spans
    encode: Callable[[str], Sequence[int]] | None = None

    __repr__ = short_repr

    @cached_property
    def spans(self) -> Spans:
        """Words and sentences of the text."""
        return self.find_spans()

    def first(self, n: int) -> Text:
        """Return the first ``n`` tokens, without spans."""
        return Text(self.ids[:, :n], self.prefix)


@dataclass(frozen=True)
class Choices:
    """A question: a context and the continuations to choose from.

    Attributes:
        context: Tokens of the context, with the spans of its words and sentences.
        continuations: Token ids of each alternative.
        lengths: Number of characters of each alternative, without the leading space.
        gold: Index of the right alternative.
        blank: Tokens of an empty context: the prefix that the model expects, else BOS or EOS; may be empty.
        seed: Number of the item, added to the seed of its draws.
    """

    context: Text
    continuations: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    gold: int
    blank: tuple[int, ...]
    seed: int

    @property
    def longest(self) -> int:
        """Number of tokens of the longest alternative."""
        return max(map(len, self.continuations))


@dataclass(frozen=True)
class PromptSet:
    """Prompts to generate for a model's tokenizer.

    Attributes:
        name: Name of the set; its prompts are named after it and numbered.
        kind: Kind of prompt.
        count: Number of prompts.
        options: Options of the kind.
    """

    name: str
    kind: str
    count: int
    options: Mapping[str, Any]


Control = Literal["random", "shuffled"]
"""A control model: newly initialised, or with the entries of its query and key projections permuted."""


@dataclass(frozen=True)
class NoOptions:
    """The config of a measurement without options."""


class Measurement(ABC):
    """Declaration common to all measurements. Subclass one of the five kinds below, not this class.

    How a measurement looks on a page, in a terminal and as a figure is its view, see :mod:`wherewhat.report.views`.

    Attributes:
        name: Subcommand and name in the store.
        summary: One line for ``--help`` and the report; by default the first line of the class's docstring.
        config: Frozen dataclass of its options; every field has a default and a ``help`` in its metadata.
        metrics: Its metrics, most important first.
        stored: Metrics that are stored for figures and for scores over documents, but shown in no table.
        limits: Limitations of the numbers.
        controls: Control models to measure as well.
        least_documents: Smallest number of documents.
        revision: Bump when results change: runs of an earlier revision are measured again.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    config: ClassVar[type[Any]] = NoOptions
    metrics: ClassVar[tuple[Metric, ...]]
    stored: ClassVar[tuple[Metric, ...]] = ()
    limits: ClassVar[str] = ""
    controls: ClassVar[tuple[Control, ...]] = ("random",)
    least_documents: ClassVar[int] = 1
    revision: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        """Take the summary from the docstring where the class has none."""
        super().__init_subclass__()
        if not hasattr(cls, "summary") and cls.__doc__ and Measurement not in cls.__bases__:
            cls.summary = cls.__doc__.strip().splitlines()[0]

    def more_metrics(self, config: Any) -> tuple[Metric, ...]:
        """Return the metrics whose names depend on the config; they come after ``metrics``."""
        return ()

    def combine(self, documents: Sequence[Scores], config: Any) -> Scores:
        """Return scores of all documents of a run together, from the scores of each."""
        raise NotImplementedError

    def pooled(self, layers: Sequence[Scores]) -> Mapping[str, float]:
        """Return scores of the model from the scores of some of its layers; also used for each kind of layer."""
        return {}


def all_metrics(measurement: Measurement, config: Any) -> tuple[Metric, ...]:
    """Return all metrics of a measurement under a config."""
    return measurement.metrics + measurement.more_metrics(config)


def declared_metrics(measurement: Measurement, config: Any) -> list[Metric]:
    """Return everything that a measurement may store under a config: metrics, their controls and errors, and others.

    A control that is not a metric of its own has the unit, range and categories of its metric.
    """
    metrics = {metric.name: metric for metric in (*all_metrics(measurement, config), *measurement.stored)}
    for metric in all_metrics(measurement, config):
        if metric.control is not None:
            like = stored_metric(metric.control, unit=metric.unit, range=metric.range, categories=metric.categories)
            metrics.setdefault(metric.control, like)
        for name in (metric.error, *(metric.bounds or ())):
            if name is not None:
                metrics.setdefault(name, stored_metric(name, unit=metric.unit))
    return list(metrics.values())


def categories_of(measurement: Measurement) -> dict[str, tuple[str, ...]]:
    """Return the names of the codes of each metric that is a category."""
    metrics = (*measurement.metrics, *measurement.stored)
    return {metric.name: metric.categories for metric in metrics if metric.categories}


def defines(measurement: Measurement, method: Literal["combine", "pooled"]) -> bool:
    """Return whether a measurement has scores of all documents together, or of the model from its layers."""
    return getattr(type(measurement), method) is not getattr(Measurement, method)


class LayerMeasurement(Measurement):
    """A measurement of one layer at a time, while the forward pass runs.

    Define :meth:`measure`, or :meth:`measure_texts` to compute several texts of a pass at once.

    Attributes:
        swaps_keys: Whether layers need their ``key_mixing``.
    """

    swaps_keys: ClassVar[bool] = False

    def measure(self, layer: LayerAttention, config: Any) -> Scores | Mapping[str, Tensor]:
        """Return the scores of one layer, or only values per head by metric: ``(heads,)`` or ``(kv_heads,)`` each."""
        raise NotImplementedError

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: Any) -> Sequence[Scores]:
        """Return the scores of one layer on each text of the pass; none if it does not measure the layer.

        Tensors may stay on the device: they are copied while the next layer is computed. ``layer.merged`` has the heads
        of all texts, and :func:`~wherewhat.measures.tensors.scores_by_text` splits what is computed from it.
        """
        return [measure_layer(self, layer.text(text), config) for text in range(len(texts))]

    def check(self, layers: Sequence[Scores]) -> None:
        """Raise a :class:`~wherewhat.errors.MeasureError` if no layer of the model can be measured."""

    def complete(self, subject: Subject, text: Text, scores: Scores, config: Any) -> Scores:
        """Return the scores of one text with what is measured after the pass."""
        return scores


_UNDEFINED = LayerMeasurement.measure, LayerMeasurement.measure_texts


class TextMeasurement(Measurement):
    """A measurement of a model on one text."""

    @abstractmethod
    def measure(self, subject: Subject, text: Text, config: Any) -> Scores | Mapping[str, float]:
        """Return the scores of one text, or only values of the model as a whole by metric."""

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: Any) -> Sequence[Scores]:
        """Return the scores of each of several texts of one length, which a measurement may run together."""
        return [as_scores(self, self.measure(subject, text, config)) for text in texts]


class QuestionMeasurement(Measurement):
    """A measurement of a model on generated prompts that end in a question."""

    @abstractmethod
    def prompts(self, config: Any) -> Sequence[PromptSet]:
        """Return the prompts to generate."""

    @abstractmethod
    def measure(self, subject: Subject, question: Question, config: Any) -> Scores:
        """Return the scores of one prompt."""


class ChoicesMeasurement(Measurement):
    """A measurement of a model on questions with alternatives."""

    @abstractmethod
    def measure(self, subject: Subject, choices: Choices, config: Any) -> Scores:
        """Return the scores of one question."""


class DocumentsMeasurement(Measurement):
    """A measurement of a model on all documents together; a single document has no scores."""

    @abstractmethod
    def measure(self, subject: Subject, texts: Sequence[Text], config: Any) -> Scores:
        """Return the scores of all texts together."""

    def measure_layer(self, layer: LayerAttention, config: Any) -> Scores:
        """Return the scores of one layer of a pass over all texts; used where all of them fit into one pass."""
        raise NotImplementedError

    def joined(self, layers: Sequence[Scores]) -> Scores:
        """Return the scores of the model from those of :meth:`measure_layer`."""
        return Scores(layers=layers, whole=self.pooled(layers))


def measure_text(measurement: Measurement, subject: Subject, text: Text, config: Any) -> Scores:
    """Return the scores of one text, for measurements of layers and of texts."""
    if isinstance(measurement, TextMeasurement):
        return as_scores(measurement, measurement.measure(subject, text, config))
    if not isinstance(measurement, LayerMeasurement):
        raise MeasureError(f"{measurement.name} is not measured on a single text")
    (outcome,) = measure_pass(subject, [text], [(measurement, config)])
    if isinstance(outcome, WherewhatError):
        raise outcome
    return outcome[0]


def measure_pass(
    subject: Subject, texts: Sequence[Text], wanted: Sequence[tuple[LayerMeasurement | DocumentsMeasurement, Any]]
) -> list[list[Scores] | WherewhatError]:
    """Measure layers in one pass over texts of one length, under several measurements.

    The numbers of a layer are copied from the device while it computes the next ones, and are not waited for before the
    end of the pass. A measurement that raises an error does not stop the others.

    Args:
        subject: The model.
        texts: The texts.
        wanted: Measurements with their configs; one of all documents together needs a ``measure_layer``, and all of its
            documents in this pass.

    Returns:
        For each measurement the scores of each text, or of all texts together, or the error that it raised.
    """
    import torch

    readings = [_Reading(measurement, config, len(texts)) for measurement, config in wanted]
    swapping = any(isinstance(measurement, LayerMeasurement) and measurement.swaps_keys for measurement, _ in wanted)
    mixing = subject.key_mixing() if swapping else {}
    finite: dict[int, Tensor] = {}
    pending = PendingCopies()

    def measure(layer: LayerAttention) -> None:
        if swapping:
            layer = replace(layer, key_mixing=mixing.get(layer.layer))
        # A sum is finite if all its terms are, and is a single kernel.
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in (layer.rot_q, layer.rot_k)]
        finite[layer.layer] = pending.read(torch.stack(sums).isfinite().all())
        for reading in readings:
            reading.add(layer, texts, pending)

    subject.run(torch.cat([text.ids for text in texts]), measure)
    pending.wait()
    wrong = [layer for layer, flag in finite.items() if not bool(flag)]
    if wrong:
        raise MeasureError(
            f"queries or keys of layer {wrong[0]} are not finite: the model's activations overflow; use float32 or "
            "bfloat16"
        )
    return [reading.scores(subject, texts) for reading in readings]


class _Reading:
    """What one measurement reads in a pass."""

    def __init__(self, measurement: LayerMeasurement | DocumentsMeasurement, config: Any, texts: int) -> None:
        self._measurement, self._config = measurement, config
        self._layers: list[list[Scores]] = [
            [] for _ in range(texts if isinstance(measurement, LayerMeasurement) else 1)
        ]
        self._error: WherewhatError | None = None

    def add(self, layer: LayerAttention, texts: Sequence[Text], pending: PendingCopies) -> None:
        """Measure a layer; ``pending`` makes the copies of its numbers."""
        measurement = self._measurement
        if self._error is not None:
            return
        try:
            if isinstance(measurement, LayerMeasurement):
                of_texts = measurement.measure_texts(layer, texts, self._config)
            else:
                of_texts = [measurement.measure_layer(layer, self._config)]
        except WherewhatError as error:
            self._error = error
            return
        if of_texts:
            for layers, scores in zip(self._layers, on_cpu([*of_texts], pending=pending), strict=True):
                layers.append(scores)

    def scores(self, subject: Subject, texts: Sequence[Text]) -> list[Scores] | WherewhatError:
        """Return the scores of the model; the copies of its numbers must be complete."""
        measurement = self._measurement
        if self._error is not None:
            return self._error
        models = [Scores(layers=layers) for layers in self._layers]
        try:
            if isinstance(measurement, DocumentsMeasurement):
                return [measurement.joined(models[0].layers)]
            return [
                measurement.complete(subject, text, _with_pooled(measurement, model), self._config)
                for text, model in zip(texts, models, strict=True)
            ]
        except WherewhatError as error:
            return error


def _with_pooled(measurement: LayerMeasurement, model: Scores) -> Scores:
    """Return the scores of a model's layers with those of the whole, checked by the measurement."""
    measurement.check(model.layers)
    return replace(model, whole=measurement.pooled(model.layers))


def as_scores(measurement: Measurement, scores: Scores | Mapping[str, float]) -> Scores:
    """Return what a measurement of a model returned as scores."""
    if not isinstance(scores, Scores | Mapping):
        raise MeasureError(
            f"{measurement.name} returned {type(scores).__name__}: return values of the model by metric, or Scores"
        )
    return scores if isinstance(scores, Scores) else Scores(whole=scores)


def measure_layer(measurement: LayerMeasurement, layer: LayerAttention, config: Any) -> Scores:
    """Return the scores of one layer; values of key heads are repeated for the query heads that read them."""
    scores = measurement.measure(layer, config)
    if isinstance(scores, Scores):
        return scores
    if not isinstance(scores, Mapping):
        raise MeasureError(
            f"{measurement.name} returned {type(scores).__name__} for layer {layer.layer}: return values per head by "
            "metric, or Scores"
        )
    heads = {}
    for name, of_heads in scores.items():
        values = real_tensor(of_heads, f"{measurement.name} returned {name}")
        if tuple(values.shape) not in ((layer.heads,), (layer.kv_heads,)):
            raise MeasureError(
                f"{measurement.name} returned {name} of shape {tuple(values.shape)} for layer {layer.layer}: return "
                f"one value per head, ({layer.heads},)"
            )
        heads[name] = values.detach().repeat_interleave(layer.heads // len(values))
    return Scores(layer=layer.layer, heads=heads)


def check_minimum(config: Any, least: int, *names: str, most: int = MOST_TOKENS) -> None:
    """Raise an error if an option of ``config`` is below ``least``, or above ``most``."""
    for name in names:
        if getattr(config, name) < least:
            raise ConfigError(f"{name} is {getattr(config, name)}: at least {least} is needed")
        check_at_most(most, **{name: getattr(config, name)})


BUILT_IN = {
    "axes": "axes.axes_measurement.AxesMeasurement",
    "distance": "distance.distance_measurement.DistanceMeasurement",
    "planes": "planes.planes_measurement.PlanesMeasurement",
    "residual": "residual.ResidualMeasurement",
    "split": "split.split_measurement.SplitMeasurement",
    "heads": "heads.heads_measurement.HeadsMeasurement",
    "removal": "removal.RemovalMeasurement",
    "frequencies": "frequencies.frequencies_measurement.FrequenciesMeasurement",
    "prompts": "prompts.PromptsMeasurement",
    "perturb": "perturb.perturb_measurement.PerturbMeasurement",
    "choices": "choices.ItemChoices",
    "extend": "extend.extend_measurement.ExtendMeasurement",
    "attention": "heads.heads_measurement.AttentionMeasurement",
}
"""Module and class of each measurement of this package by name; one that is asked for by name is imported alone."""

GROUP = "wherewhat.measurements"
"""Entry points of measurements."""

_Declared = TypeVar("_Declared", bound=type[Measurement])
_known: dict[str, Measurement] = {}


def register(declared: _Declared) -> _Declared:
    """Add a measurement; use it as a class decorator.

    A class may be registered again after it was changed: in a notebook or script (``__main__``), or by
    ``importlib.reload`` of its module.
    """
    if not (isinstance(declared, type) and issubclass(declared, Measurement)):
        raise ConfigError(f"{declared!r} is not a measurement: give a subclass of wherewhat.Measurement")
    missing = [name for name in ("name", "summary", "metrics") if not hasattr(declared, name)]
    missing += sorted(declared.__abstractmethods__)
    if issubclass(declared, LayerMeasurement) and (declared.measure, declared.measure_texts) == _UNDEFINED:
        missing.append("measure")
    if missing:
        raise ConfigError(f"the measurement {declared.__name__} has no {missing[0]}: define {', '.join(missing)}")
    if not is_dataclass(declared.config):
        raise ConfigError(f"the config of the measurement {declared.__name__} is {declared.config!r}: give a dataclass")
    names = [metric.name for metric in declared.metrics]
    for metric in declared.metrics:
        if names.count(metric.name) > 1 or metric.control == metric.name:
            what = "twice" if names.count(metric.name) > 1 else "as its own control"
            raise ConfigError(f"the measurement {declared.__name__} declares the metric '{metric.name}' {what}")
    measurement = declared()
    known = measurements().get(measurement.name)
    places = {(kind.__module__, kind.__qualname__) for kind in (type(known), declared)}
    again = len(places) == 1 and (declared.__module__ == "__main__" or type(known) is not declared)
    if known is not None and not again:
        raise ConfigError(f"there is already a measurement '{measurement.name}': choose another name")
    _known[measurement.name] = measurement
    return declared


def measurements() -> dict[str, Measurement]:
    """Return all measurements by name, in the order in which they are shown."""
    if not _known:
        _known.update({name: _built_in(name) for name in BUILT_IN})
        for name, declared in plugins(GROUP).items():
            with isolated(GROUP, name):
                register(declared)
    return _known


@functools.cache
def _built_in(name: str) -> Measurement:
    module, kind = BUILT_IN[name].rsplit(".", 1)
    measurement: Measurement = getattr(import_module(f"wherewhat.measures.{module}"), kind)()
    return measurement


def find_measurement(name: str) -> Measurement:
    """Return the measurement of that name."""
    if not _known and name in BUILT_IN:
        return _built_in(name)
    known = measurements()
    if name not in known:
        raise ConfigError(f"there is no measurement '{name}': {nearest(name, known, cutoff=0.6)}")
    return known[name]
