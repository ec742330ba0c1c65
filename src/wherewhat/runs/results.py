"""Read a finished run: documents, heads, layers, curves and summaries with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import (
    Measurement,
    all_metrics,
    categories_of,
    declared_metrics,
    defines,
    find_measurement,
)
from wherewhat.measures.statistics import Interval, around, in_words, interval, wilson
from wherewhat.options import build_config
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.schema import ProfileFile, profile_name, stored_scores, table_arrays
from wherewhat.scores import MODEL, SHARE, UNBOUNDED, Metric, Scores, declaration, share_name, without

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from torch import Tensor

    from wherewhat.captures.layer_proofs import Kinds


@dataclass(frozen=True)
class Numbers:
    """Values of one metric, in the order of documents, layers and heads.

    Attributes:
        documents: Names of documents, sorted; None for all documents together comes last.
        document: Index of the document of each value.
        layer: Its layer; :data:`~wherewhat.scores.MODEL` for the model as a whole.
        head: Its head; :data:`~wherewhat.scores.MODEL` for the layer as a whole.
        value: The value; NaN where it is undefined.
    """

    documents: Sequence[str | None]
    document: NDArray[np.int64]
    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    value: NDArray[np.float64]

    def where(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Numbers:
        """Return some of the values."""
        return replace(self, **{name: getattr(self, name)[rows] for name in ("document", "layer", "head", "value")})

    @property
    def defined(self) -> Numbers:
        """The values that are defined."""
        return self.where(~np.isnan(self.value))

    @property
    def of_documents(self) -> Numbers:
        """The values of single documents."""
        return self.where(self.document != len(self.documents) - 1)

    @property
    def of_heads(self) -> Numbers:
        """The values of single heads."""
        return self.where(self.head != MODEL)

    def by_document(self) -> dict[str | None, float]:
        """Return the mean of each document."""
        return {self.documents[d]: mean for (d,), mean in self._means(self.document)}

    def by_layer(self) -> dict[int, list[float]]:
        """Return the means of each layer, one per document that has it."""
        means: dict[int, list[float]] = {}
        for (_, layer), mean in self._means(self.document, self.layer):
            if layer != MODEL:
                means.setdefault(layer, []).append(mean)
        return dict(sorted(means.items()))

    def _means(self, *keys: NDArray[np.int64]) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield means over neighbours with the same keys; rows are sorted by document and layer."""
        if not len(self.value):
            return
        changes = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        sums, counts = np.add.reduceat(self.value, starts), np.diff([*starts, len(self.value)])
        for start, mean in zip(starts, (sums / counts).tolist(), strict=True):
            yield tuple(int(key[start]) for key in keys), mean


def read_numbers(table: pa.Table) -> dict[str, Numbers]:
    """Return the values of a sorted score table by metric."""
    documents, metrics, document, layer, head, codes, value = table_arrays(table)
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(metrics) + 1))
    rows = [order[start:end] for start, end in pairwise(ends)]
    named = zip(metrics, rows, strict=True)
    return {name: Numbers(documents, document[at], layer[at], head[at], value[at]) for name, at in named}


@dataclass(frozen=True)
class HeadCount:
    """Number of heads with a label.

    Its range over documents is given instead of an interval: how many heads are sinks differs between texts in a way
    that Student's interval does not cover.

    Attributes:
        count: Heads that have it over all documents together.
        total: Heads with any label.
        documents: Heads that have it in each document, labelled alone.
    """

    count: int
    total: int
    documents: tuple[int, ...]

    def words(self) -> str:
        """Return ``14 of 270; 12 to 17 in single documents``."""
        single = f"; {self.single} in single documents" if len(self.documents) > 1 else ""
        return f"{self.count} of {self.total}{single}"

    @property
    def single(self) -> str:
        """Range over documents in words."""
        low, high = min(self.documents), max(self.documents)
        return str(low) if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class MetricSummary:
    """One metric of one run.

    Attributes:
        metric: The metric.
        overall: Mean over all heads and layers, per document, with its interval.
        layers: The same for each layer by index.
        control: The control metric over all layers, if there is one.
        kinds: Mean over the layers of each kind, where the model has layers of several kinds.
        counts: Of the share of heads with a label: the numbers of heads by kind of layer; under "" of the whole model.
            Empty for other metrics.
    """

    metric: Metric
    overall: Interval
    layers: dict[int, Interval]
    control: float | None
    kinds: dict[str, Interval] = field(default_factory=dict)
    counts: dict[str, HeadCount] = field(default_factory=dict)

    def words(self, kind: str = "") -> str:
        """Return the mean with its interval, of the model or of a kind of layer; of a label the number of heads."""
        mean = self.kinds[kind] if kind else self.overall
        if kind in self.counts:
            return self.counts[kind].words()
        return in_words(mean) if math.isfinite(mean.mean) else "undefined"


Heads = dict[int, list[float | None]]
"""Values of every head by layer."""


class StoredRun:
    """Scores and curves of a finished run."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    @cached_property
    def measurement(self) -> Measurement:
        """The measurement."""
        return find_measurement(str(self.directory.config["measurement"]))

    @property
    def options(self) -> dict[str, Any]:
        """Options of the measurement as they were stored."""
        return cast("dict[str, Any]", self.directory.config["options"])

    @cached_property
    def config(self) -> Any:
        """The measurement's config; options that no longer exist are left out."""
        known = {option.name for option in dataclasses.fields(self.measurement.config)}
        return build_config(self.measurement.config, {k: v for k, v in self.options.items() if k in known})

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """Its metrics, most important first."""
        return all_metrics(self.measurement, self.config)

    @cached_property
    def documents(self) -> list[str]:
        """Names of the documents, in order."""
        return [str(document["name"]) for document in cast("list[dict[str, Any]]", self.directory.config["documents"])]

    @property
    def title(self) -> str:
        """Model, weights and amount of text."""
        config = self.directory.config
        weights = "" if config["weights"] == "trained" else f" ({config['weights']})"
        return f"{config['model']}{weights}, {len(self.documents)} × {config['tokens']} tokens"

    @cached_property
    def kinds(self) -> Kinds:
        """Layers by kind; empty for runs that do not say."""
        extra = cast("dict[str, Any]", self.directory.provenance().get("extra") or {})
        kinds: Kinds = extra.get("layer_kinds") or {}
        return dict(sorted(kinds.items(), key=lambda kind: kind[1]))  # the file has them by name

    @cached_property
    def numbers(self) -> Mapping[str, Numbers]:
        """Values of everything that the run holds, by metric."""
        return read_numbers(self.directory.scores())

    @cached_property
    def parts(self) -> Mapping[str | None, Scores]:
        """Scores and curves of each document, and under None of all documents together."""
        return stored_scores(self.directory.scores(), self.profiles)

    def range_of(self, metric: str) -> tuple[float, float]:
        """Return the range of possible values of a metric; unbounded for metrics that are not declared."""
        return next((known.range for known in self.metrics if known.name == metric), UNBOUNDED)

    def values(self, metric: str, *, less: str | None = None) -> list[float]:
        """Return a metric of the model as a whole on each document that has it, less another metric if one is given."""
        first = self._whole(metric)
        if less is None:
            return list(first.values())
        second = self._whole(less)
        return [value - second[name] for name, value in first.items() if name in second]

    def _whole(self, metric: str) -> dict[str, float]:
        """Return a metric of the model as a whole by document; undefined values are left out."""
        if metric not in self.numbers:
            return {}
        numbers = self.numbers[metric].of_documents.defined
        return cast("dict[str, float]", numbers.where(numbers.layer == MODEL).by_document())

    @cached_property
    def profiles(self) -> ProfileFile:
        """All curves by name, each read on access."""
        return self.directory.profiles()

    def curves(self, name: str) -> list[Tensor]:
        """Return a curve of the model as a whole, of every document that has it."""
        names = (profile_name(document, MODEL, name) for document in self.documents)
        return [self.profiles[name] for name in names if name in self.profiles]

    def curve(self, layer: int, name: str, *, document: int = 0) -> Tensor | None:
        """Return a curve of a layer of one document, by default the first; None if there is none."""
        return self.profiles.get(profile_name(self.documents[document], layer, name))

    def without_each(self, metric: str) -> dict[str, float]:
        """Return a metric of all documents together, mean over heads, without each of them; empty if not stored."""
        profile = self.profiles.get(profile_name(None, MODEL, without(metric)))
        return {} if profile is None else dict(zip(self.documents, profile.tolist(), strict=True))

    @cached_property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the codes of each metric that is a category, which is never averaged."""
        declared = declared_metrics(self.measurement, self.config)
        metrics = {name: declaration(name, declared) for name in (*categories_of(self.measurement), *self.numbers)}
        return {name: metric.categories for name, metric in metrics.items() if metric is not None and metric.categories}

    def document_means(self, metric: str) -> dict[str, float]:
        """Return a metric of each document that has it, averaged over heads and layers."""
        if metric in self.categories:
            raise ConfigError(f"'{metric}' is a category, whose codes have no mean: count its values")
        if metric not in self.numbers:
            return {}
        return cast("dict[str, float]", self.numbers[metric].of_documents.defined.by_document())

    @cached_property
    def head_metrics(self) -> list[str]:
        """Names of the metrics that the run has for each head."""
        return [name for name, numbers in self.numbers.items() if (numbers.head != MODEL).any()]

    def head_values(self, metric: str) -> dict[tuple[int, int], list[float]]:
        """Return the values of all documents by layer and head; undefined ones are left out."""
        numbers = self.numbers[metric].of_heads.defined
        listed = (numbers.layer.tolist(), numbers.head.tolist(), numbers.value.tolist())
        values: dict[tuple[int, int], list[float]] = {}
        for layer, head, value in zip(*listed, strict=True):
            values.setdefault((layer, head), []).append(value)
        return values

    def head_documents(self, metric: str) -> dict[tuple[int, int], dict[str, float]]:
        """Return a metric by layer and head, and by document; undefined values are left out."""
        if metric not in self.numbers:
            return {}
        numbers = self.numbers[metric].of_heads.of_documents.defined
        listed = (numbers.layer.tolist(), numbers.head.tolist(), numbers.document.tolist(), numbers.value.tolist())
        values: dict[tuple[int, int], dict[str, float]] = {}
        for layer, head, document, value in zip(*listed, strict=True):
            values.setdefault((layer, head), {})[str(numbers.documents[document])] = value
        return values

    def head_means(self, metric: str) -> Heads:
        """Return the mean over documents of every head by layer; of a category the commonest."""
        numbers = self.numbers[metric].of_heads
        if metric in self.categories:
            values = self.head_values(metric)
            sizes = {int(layer): 1 + int(numbers.head[numbers.layer == layer].max()) for layer in set(numbers.layer)}
            return {
                layer: [commonest(values.get((layer, head), [])) for head in range(size)]
                for layer, size in sorted(sizes.items())
            }
        means: Heads = {}
        for layer in sorted(set(numbers.layer.tolist())):
            here = numbers.where(numbers.layer == layer)
            size, known = 1 + int(here.head.max()), here.defined
            sums, counts = (np.bincount(known.head, weights, size) for weights in (known.value, None))
            listed = zip(sums.tolist(), counts.tolist(), strict=True)
            means[layer] = [value / count if count else None for value, count in listed]
        return means

    def labels(self, metric: str) -> dict[tuple[int, int], int]:
        """Return the code of each head's category, over all documents together where there are several.

        Undefined ones are left out.
        """
        names = (name for name in (f"{metric}_together", metric) if name in self.numbers)
        values = next((by_head for name in names if (by_head := self.head_values(name))), {})
        return {place: int(listed[0]) for place, listed in values.items() if listed[0] >= 0}

    @cached_property
    def summaries(self) -> list[MetricSummary]:
        """A summary of each metric that the run holds."""
        return [summary for metric in self.metrics for summary in self._summaries(metric)]

    def summary(self, name: str) -> MetricSummary | None:
        """Return the summary of one metric, or of the share of a category; None if the run does not hold it."""
        metrics = (metric for metric in self.metrics if metric.name in (name, name.partition("=")[0]))
        return next((one for metric in metrics for one in self._summaries(metric) if one.metric.name == name), None)

    def _summaries(self, metric: Metric) -> Iterator[MetricSummary]:
        """Yield the summary of a metric, or of each category that occurs; none if the run does not hold it."""
        numbers = self._defined(metric.name)
        if numbers is None:
            return
        if metric.categories:
            for share, values in _shares(metric, numbers):
                kinds = _by_kind(values, None, self.kinds)
                yield _summary(share, values, None, {}, len(self.documents), kinds)
            return
        kinds = _by_kind(numbers, self._pooled.get(metric.name), self.kinds)
        control = self._defined(metric.control or "")
        summary = _summary(metric, numbers, control, self._together(metric), len(self.documents), kinds)
        yield replace(summary, counts=self._counts(metric))

    def _defined(self, metric: str) -> Numbers | None:
        """Return the defined values of a metric; None if there are none."""
        numbers = self.numbers[metric].defined if metric in self.numbers else None
        return numbers if numbers is not None and len(numbers.value) else None

    def _together(self, metric: Metric) -> dict[str, dict[int, float]]:
        """Return error and bounds of a metric of all documents together by name and layer."""
        by_name = {}
        for name in (metric.error, *(metric.bounds or ())):
            if name in self.numbers:
                numbers = self.numbers[name].defined
                together = numbers.document == len(numbers.documents) - 1
                whole = numbers.where(together & (numbers.head == MODEL))
                by_name[name] = dict(zip(whole.layer.tolist(), whole.value.tolist(), strict=True))
        return by_name

    def _counts(self, metric: Metric) -> dict[str, HeadCount]:
        """Count the heads with the label of a metric."""
        if metric.counts is None:
            return {}
        name, label = metric.counts
        labels, code = self.labels(name), self.categories[name].index(label)
        numbers = self.numbers[name].of_heads.of_documents
        having = numbers.where(numbers.value == code)
        head_counts = {}
        for kind, layers in {"": sorted({layer for layer, _ in labels}), **self.kinds}.items():
            codes = [x for (layer, _), x in labels.items() if layer in layers]
            if codes:
                inside = having.document[np.isin(having.layer, layers)]
                counts = {str(numbers.documents[d]): int((inside == d).sum()) for d in set(numbers.document)}
                single = tuple(counts.get(document, 0) for document in self.documents)
                head_counts[kind] = HeadCount(codes.count(code), len(codes), single)
        return head_counts

    @cached_property
    def _pooled(self) -> dict[str, dict[str, list[float]]]:
        """Scores pooled over the heads of each kind of layer, by metric and kind, one per document."""
        pooled: dict[str, dict[str, list[float]]] = {}
        if not defines(self.measurement, "pooled") or not self.kinds:
            return pooled
        for document, scores in stored_scores(self.directory.scores()).items():
            for kind, listed in self.kinds.items() if document is not None else ():
                numbers = self.measurement.pooled([layer for layer in scores.layers if layer.layer in listed])
                for metric, value in numbers.items():
                    pooled.setdefault(metric, {}).setdefault(kind, []).append(value)
        return pooled


def commonest(codes: Sequence[float]) -> float | None:
    """Return the code that most documents have; the first of several, and None if none is defined."""
    defined = [code for code in codes if code >= 0]
    return max(defined, key=defined.count) if defined else None


def _shares(metric: Metric, numbers: Numbers) -> Iterator[tuple[Metric, Numbers]]:
    """Yield each category that occurs as a metric: 1 where a value is this category, 0 where it is another."""
    known = numbers.where(numbers.value >= 0)
    for code, name in enumerate(metric.categories):
        if (known.value == code).any():
            share = replace(
                metric,
                name=share_name(metric.name, name),
                title=f"{metric.title}: {name}",
                reading=f"Share of '{name}'. {metric.reading}",
                unit="",
                control=None,
                control_title="",
                error=None,
                bounds=None,
                proportion=False,
                range=SHARE,
                categories=(),
            )
            yield share, replace(known, value=(known.value == code).astype(np.float64))


def _by_kind(numbers: Numbers, pooled: Mapping[str, Sequence[float]] | None, kinds: Kinds) -> dict[str, Interval]:
    """Mean of each kind's layers per document, with intervals over documents; kinds without numbers are left out."""
    if pooled is not None:
        return {kind: interval(values) for kind, values in pooled.items()}
    means = {kind: numbers.where(np.isin(numbers.layer, layers)).by_document() for kind, layers in kinds.items()}
    return {kind: interval(list(values.values())) for kind, values in means.items() if values}


def _summary(
    metric: Metric,
    numbers: Numbers,
    control: Numbers | None,
    together: Mapping[str, Mapping[int, float]],
    count: int,
    kinds: Mapping[str, Interval],
) -> MetricSummary:
    errors = together.get(metric.error or "", {})
    low, high = (together.get(name, {}) for name in metric.bounds or ("", ""))

    def between(values: Sequence[float], layer: int) -> Interval:
        """Return the interval over documents, or the stored one where documents were measured together."""
        if layer in low and layer in high:
            bounds = Interval(values[0], low[layer], high[layer], count)
        elif layer in errors:
            bounds = around(values[0], errors[layer], count)
        else:
            bounds = wilson(values) if metric.proportion else interval(values)
        return bounds.within(metric.range)

    means = None if control is None else list(control.by_document().values())
    return MetricSummary(
        metric=metric,
        overall=between(list(numbers.by_document().values()), MODEL),
        layers={layer: between(values, layer) for layer, values in numbers.by_layer().items()},
        control=None if means is None else sum(means) / len(means),
        kinds={kind: value.within(metric.range) for kind, value in kinds.items()},
    )
