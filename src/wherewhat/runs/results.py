"""Read a finished run: documents, heads, layers, curves, summaries with intervals, and tables of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, cast

from wherewhat.errors import ConfigError
from wherewhat.imports import require
from wherewhat.measures.measurement import (
    SHARE,
    UNBOUNDED,
    Curve,
    DocumentScores,
    LayerScores,
    Measurement,
    Metric,
    share_name,
    without,
)
from wherewhat.measures.registry import find_measurement
from wherewhat.measures.statistics import Interval, around, in_words, interval, wilson
from wherewhat.options import build_config, nearest
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.schema import ProfileFile, profile_name

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from wherewhat.captures.summary import Kinds


def stored_document(table: pa.Table, profiles: ProfileFile | None = None) -> DocumentScores:
    """Return the scores of one document, from its score table and, if given, its curves.

    Undefined values are NaN.
    """
    import torch  # a table of a finished run needs none

    columns = table.select(["layer", "head", "metric", "value"]).to_pydict()
    heads: dict[int, dict[str, dict[int, float]]] = {}
    whole: dict[int | None, dict[str, float]] = {}
    for layer, head, metric, value in zip(*columns.values(), strict=True):
        number = torch.nan if value is None else value
        if head is None:
            whole.setdefault(layer, {})[metric] = number
        else:
            heads.setdefault(layer, {}).setdefault(metric, {})[head] = number
    curves: dict[int | None, dict[str, Curve]] = {}
    if profiles is not None:
        for name in profiles:
            _, index, curve = name.rsplit("/", 2)
            layer = None if index == "-" else int(index)
            curves.setdefault(layer, {})[curve] = Curve(profiles[name], profiles.axes(name))
    indices = sorted({*heads, *(i for i in [*whole, *curves] if i is not None)})
    layers = [
        LayerScores(
            layer=i,
            heads={
                metric: torch.tensor([values[h] for h in sorted(values)], dtype=torch.float64)
                for metric, values in heads.get(i, {}).items()
            },
            whole=whole.get(i, {}),
            curves=curves.get(i, {}),
        )
        for i in indices
    ]
    return DocumentScores(layers, whole.get(None, {}), curves.get(None, {}))


_Values = dict[str | None, dict[int | None, list[float]]]
"""Values by document and layer; the layer of the model as a whole is None."""


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


def head_labels(
    values: Mapping[str, Mapping[tuple[int, int], Sequence[float]]], name: str
) -> dict[tuple[int, int], int]:
    """Return the code of each head's label, over all documents together where there are several; none if undefined.

    Args:
        values: Values by metric, layer and head, see :attr:`StoredRun.head_values`.
        name: The metric that holds the labels.
    """
    codes = values.get(f"{name}_together") or values.get(name) or {}
    return {place: int(listed[0]) for place, listed in codes.items() if listed and listed[0] >= 0}


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
        return self.measurement.all_metrics(self.config)

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
    def _rows(self) -> list[tuple[str, str | None, int | None, int | None, float | None]]:
        columns = self.directory.scores().select(["metric", "document", "layer", "head", "value"]).to_pydict()
        return list(zip(*columns.values(), strict=True))

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
        return {
            document: value
            for name, document, layer, _, value in self._rows
            if name == metric and document is not None and layer is None and value is not None
        }

    @cached_property
    def profiles(self) -> ProfileFile:
        """All curves by name, each read on access."""
        return self.directory.profiles()

    def curves(self, name: str) -> list[Tensor]:
        """Return a curve of the model as a whole, of every document that has it."""
        names = (profile_name(document, None, name) for document in self.documents)
        return [self.profiles[name] for name in names if name in self.profiles]

    def curve(self, layer: int, name: str, *, document: int = 0) -> Tensor | None:
        """Return a curve of a layer of one document, by default the first; None if there is none."""
        return self.profiles.get(profile_name(self.documents[document], layer, name))

    def without_each(self, metric: str) -> dict[str, float]:
        """Return a metric of all documents together, mean over heads, without each of them; empty if not stored."""
        found = self.profiles.get(profile_name(None, None, without(metric)))
        return {} if found is None else dict(zip(self.documents, found.tolist(), strict=True))

    @property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the codes of each metric that is a category, which is never averaged."""
        return self.measurement.codes

    def document_means(self, metric: str) -> dict[str, float]:
        """Return a metric of each document that has it, averaged over heads and layers."""
        if metric in self.categories:
            raise ConfigError(f"'{metric}' is a category, whose codes have no mean: count its values")
        found: dict[str, list[float]] = {}
        for name, document, _, _, value in self._rows:
            if name == metric and document is not None and value is not None:
                found.setdefault(document, []).append(value)
        return {document: sum(values) / len(values) for document, values in found.items()}

    @cached_property
    def head_values(self) -> dict[str, dict[tuple[int, int], list[float]]]:
        """Values of all documents by metric, layer and head; undefined ones are left out."""
        found: dict[str, dict[tuple[int, int], list[float]]] = {}
        for metric, _, layer, head, value in self._rows:
            if head is not None and layer is not None:
                values = found.setdefault(metric, {}).setdefault((layer, head), [])
                values += [] if value is None else [value]
        return found

    def head_documents(self, metric: str) -> dict[tuple[int, int], dict[str, float]]:
        """Return a metric by layer and head, and by document; undefined values are left out."""
        found: dict[tuple[int, int], dict[str, float]] = {}
        for name, document, layer, head, value in self._rows:
            if name != metric or document is None:
                continue
            if layer is not None and head is not None and value is not None:
                found.setdefault((layer, head), {})[document] = value
        return found

    @cached_property
    def head_means(self) -> dict[str, Heads]:
        """Means over documents of everything that the run has for each head, by metric; of categories the commonest."""
        means: dict[str, Heads] = {}
        for metric, places in self.head_values.items():
            layers = means.setdefault(metric, {})
            average = commonest if metric in self.categories else _average
            for layer in sorted({layer for layer, _ in places}):
                count = 1 + max(head for at, head in places if at == layer)
                listed = [places.get((layer, head)) for head in range(count)]
                layers[layer] = [average(values or ()) for values in listed]
        return means

    @cached_property
    def summaries(self) -> list[MetricSummary]:
        """A summary of each metric that the run holds."""
        by_metric: dict[str, _Values] = {}
        together: dict[str, dict[int | None, float]] = {}
        for name, document, layer, head, value in self._rows:
            if value is None:
                continue
            by_metric.setdefault(name, {}).setdefault(document, {}).setdefault(layer, []).append(value)
            if document is None and head is None:
                together.setdefault(name, {})[layer] = value
        pooled, found = self._pooled(), []
        for metric in self.metrics:
            if metric.name not in by_metric:
                continue
            if metric.name in self.categories:
                shares = _shares(metric, self.categories[metric.name], by_metric[metric.name])
                for share, values in shares:
                    kinds = _by_kind(values, None, self.kinds)
                    found.append(_summary(share, values, None, {}, len(self.documents), kinds))
                continue
            values, control = by_metric[metric.name], by_metric.get(metric.control or "")
            kinds = _by_kind(values, pooled.get(metric.name), self.kinds)
            summary = _summary(metric, values, control, together, len(self.documents), kinds)
            found.append(replace(summary, counts=self._counts(metric)))
        return found

    def _counts(self, metric: Metric) -> dict[str, HeadCount]:
        """Count the heads with the label of a metric."""
        if metric.counts is None:
            return {}
        name, label = metric.counts
        labels, code = head_labels(self.head_values, name), self.measurement.codes[name].index(label)
        single, found = self.head_documents(name), {}
        for kind, layers in {"": sorted({layer for layer, _ in labels}), **self.kinds}.items():
            codes = [x for (layer, _), x in labels.items() if layer in layers]
            listed = [by_document for (layer, _), by_document in single.items() if layer in layers]
            if codes:
                counts = (sum(one.get(document) == code for one in listed) for document in self.documents)
                found[kind] = HeadCount(codes.count(code), len(codes), tuple(counts))
        return found

    def _pooled(self) -> dict[str, dict[str, list[float]]]:
        """Scores pooled over the heads of each kind of layer, by metric and kind, one per document."""
        found: dict[str, dict[str, list[float]]] = {}
        if not self.measurement.pools or not self.kinds:
            return found
        table = self.directory.scores()
        documents = table["document"].to_pylist()
        for name in dict.fromkeys(document for document in documents if document is not None):
            rows = [index for index, document in enumerate(documents) if document == name]
            layers = stored_document(table.take(rows)).layers
            for kind, listed in self.kinds.items():
                numbers = self.measurement.pooled([layer for layer in layers if layer.layer in listed])
                for metric, value in numbers.items():
                    found.setdefault(metric, {}).setdefault(kind, []).append(value)
        return found


def commonest(codes: Sequence[float]) -> float | None:
    """Return the code that most documents have; the first of several, and None if none is defined."""
    defined = [code for code in codes if code >= 0]
    return max(defined, key=defined.count) if defined else None


def _average(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shares(metric: Metric, names: Sequence[str], documents: _Values) -> Iterator[tuple[Metric, _Values]]:
    """Yield each category that occurs as a metric: 1 where a value is this category, 0 where it is another."""
    defined: _Values = {}
    for document, layers in documents.items():
        kept = {layer: [code for code in codes if code >= 0] for layer, codes in layers.items()}
        defined[document] = {layer: codes for layer, codes in kept.items() if codes}
    defined = {document: layers for document, layers in defined.items() if layers}
    seen = {code for layers in defined.values() for codes in layers.values() for code in codes}
    for code, name in enumerate(names):
        if code in seen:
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
            )
            yield (
                share,
                {
                    document: {layer: [float(x == code) for x in codes] for layer, codes in layers.items()}
                    for document, layers in defined.items()
                },
            )


def _by_kind(documents: _Values, pooled: Mapping[str, Sequence[float]] | None, kinds: Kinds) -> dict[str, Interval]:
    """Mean of each kind's layers per document, with intervals over documents; kinds without numbers are left out."""
    if pooled is not None:
        return {kind: interval(values) for kind, values in pooled.items()}
    found = {}
    for kind, listed in kinds.items():
        chosen: list[dict[int | None, list[float]]] = [
            {i: layers[i] for i in listed if i in layers} for layers in documents.values()
        ]
        if values := [_mean(layers) for layers in chosen if layers]:
            found[kind] = interval(values)
    return found


def _summary(
    metric: Metric,
    documents: _Values,
    control: _Values | None,
    together: Mapping[str, Mapping[int | None, float]],
    count: int,
    kinds: Mapping[str, Interval],
) -> MetricSummary:
    indices = sorted({layer for layers in documents.values() for layer in layers if layer is not None})

    errors = together.get(metric.error or "", {})
    low, high = (together.get(name, {}) for name in metric.bounds or ("", ""))

    def between(values: Sequence[float], layer: int | None) -> Interval:
        """Return the interval over documents, or the stored one where documents were measured together."""
        if layer in low and layer in high:
            found = Interval(values[0], low[layer], high[layer], count)
        elif layer in errors:
            found = around(values[0], errors[layer], count)
        else:
            found = wilson(values) if metric.proportion else interval(values)
        return found.within(metric.range)

    return MetricSummary(
        metric=metric,
        overall=between([_mean(layers) for layers in documents.values()], None),
        layers={i: between([_mean({i: v[i]}) for v in documents.values() if i in v], i) for i in indices},
        control=None if control is None else sum(map(_mean, control.values())) / len(control),
        kinds={kind: value.within(metric.range) for kind, value in kinds.items()},
    )


def _mean(layers: dict[int | None, list[float]]) -> float:
    values = [value for listed in layers.values() for value in listed]
    return sum(values) / len(values)


FrameKind = Literal["pandas", "polars", "pyarrow"]
"""Library of a table."""


def as_frame(table: pa.Table, kind: FrameKind) -> Any:
    """Return an Arrow table as a table of another library."""
    if kind == "polars":
        return require("polars", why="a polars table", install="'wherewhat[compare]'").from_arrow(table)
    if kind == "pandas":
        require("pandas", why="a pandas table", install="'wherewhat[notebook]', or ask for frame='pyarrow'")
        return table.to_pandas()
    return table


def head_table(runs: Mapping[str, StoredRun], *, tidy: bool) -> pa.Table:
    """Return the scores of single heads of a model and its control models, by weights.

    If `tidy`, there is one row per document, head and metric; otherwise one row per head and one column per metric,
    with means over documents.
    """
    tables = [_tidy_heads(run) if tidy else _wide_heads(run) for run in runs.values()]
    return _together(runs, tables)


def layer_table(runs: Mapping[str, StoredRun], *, tidy: bool) -> pa.Table:
    """Return means over the heads of each layer of a model and its control models, by weights.

    If `tidy`, there is one row per layer and metric, with the 95 % interval over documents; otherwise one row per layer
    and one column per metric.
    """
    import pyarrow as pa

    numbers = [(name, pa.float64()) for name in ("mean", "low", "high")]
    schema = pa.schema([("layer", pa.int32()), ("metric", pa.string()), *numbers])
    tables = []
    for run in runs.values():
        if tidy:
            rows = [
                {"layer": layer, "metric": s.metric.name, "mean": about.mean, "low": about.low, "high": about.high}
                for s in run.summaries
                for layer, about in sorted(s.layers.items())
            ]
            tables.append(pa.Table.from_pylist(rows, schema=schema))
            continue
        layers = sorted({layer for s in run.summaries for layer in s.layers})
        columns: dict[str, Any] = {"layer": pa.array(layers, pa.int32())}
        for s in run.summaries:
            if s.layers:
                means = [s.layers[layer].mean if layer in s.layers else None for layer in layers]
                columns[s.metric.name] = pa.array(means, pa.float64())
        tables.append(pa.table(columns))
    return _together(runs, tables)


def curve_table(runs: Mapping[str, StoredRun], name: str | None) -> pa.Table:
    """Return the curves of a name, or all, one row per value, with a column for each of their dimensions."""
    import pyarrow as pa

    known = sorted({full.rsplit("/", 1)[1] for run in runs.values() for full in run.profiles})
    if name is not None and name not in known:
        raise ConfigError(f"there is no curve '{name}': {nearest(name, known)}")
    tables = []
    for run in runs.values():
        found = [_curve(run, full) for full in run.profiles if name in (None, full.rsplit("/", 1)[1])]
        tables.append(pa.concat_tables(found, promote_options="default"))
    return _together(runs, tables)


def _wide_heads(run: StoredRun) -> pa.Table:
    import pyarrow as pa

    means = run.head_means
    places = sorted({(i, h) for layers in means.values() for i, heads in layers.items() for h in range(len(heads))})
    columns: dict[str, Any] = {
        "layer": pa.array([layer for layer, _ in places], pa.int32()),
        "head": pa.array([head for _, head in places], pa.int32()),
    }
    order = [metric.name for metric in run.metrics if metric.name in means]
    for metric in dict.fromkeys([*order, *means]):
        layers = means[metric]
        values = [layers[i][h] if i in layers and h < len(layers[i]) else None for i, h in places]
        columns[metric] = pa.array(values, pa.float64())
    for metric, names in run.categories.items():
        if metric in columns:
            columns[metric] = pa.array([_commonest(run, metric, names, place) for place in places], pa.string())
    return pa.table(columns)


def _commonest(run: StoredRun, metric: str, names: Sequence[str], place: tuple[int, int]) -> str | None:
    """Return the name that most documents have for a head; the first of several."""
    code = commonest(run.head_values.get(metric, {}).get(place, []))
    return None if code is None else names[int(code)]


def _tidy_heads(run: StoredRun) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    scores = run.directory.scores()
    chosen = scores.filter(pc.is_valid(scores["head"])).select(["document", "layer", "head", "metric", "value"])
    plain = [column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column for column in chosen.columns]
    return pa.table(dict(zip(chosen.column_names, plain, strict=True)))


def _curve(run: StoredRun, full: str) -> pa.Table:
    """Return one curve of one layer and document as rows."""
    import pyarrow as pa
    import torch

    document, layer, name = full.rsplit("/", 2)
    values = run.profiles[full].double()
    count = values.numel()
    indices = torch.cartesian_prod(*map(torch.arange, values.shape)).view(count, -1)
    columns: dict[str, Any] = {
        "document": pa.array([None if document == "-" else document] * count, pa.string()),
        "layer": pa.array([None if layer == "-" else int(layer)] * count, pa.int32()),
        "curve": pa.array([name] * count, pa.string()),
    }
    for number, axis in enumerate(run.profiles.axes(full)):
        columns[axis] = pa.array(indices[:, number].numpy(), pa.int32())
    columns["value"] = pa.array(values.flatten().numpy(), pa.float64())
    return pa.table(columns)


def _together(runs: Mapping[str, StoredRun], tables: Sequence[pa.Table]) -> pa.Table:
    """Join the tables of runs, with a column of weights if there are several, and without empty columns."""
    import pyarrow as pa

    if len(tables) > 1:
        named = zip(runs, tables, strict=True)
        tables = [t.add_column(0, "weights", pa.array([weights] * len(t), pa.string())) for weights, t in named]
    joined = pa.concat_tables(tables, promote_options="default")
    empty = [name for name in joined.column_names if len(joined) and joined[name].null_count == len(joined)]
    return joined.drop_columns(empty)
