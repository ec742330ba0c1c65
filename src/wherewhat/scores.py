"""Scores: the numbers of a model by metric, layer and head, with curves; declared, checked and held in arrays.

A measurement returns :class:`Scores`, which are checked once against its declared metrics, stored as columns, and read
back as the same type. Importing this module does not import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Integral
from typing import TYPE_CHECKING, Any

from wherewhat.errors import MeasureError
from wherewhat.options import nearest, short_repr

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNBOUNDED = (-math.inf, math.inf)
"""Range of differences, such as the rise of a loss."""

SHARE = (0.0, 1.0)
"""Range of shares, scores, probabilities and multiple correlations."""

CORRELATION = (-1.0, 1.0)
"""Range of correlations."""

NON_NEGATIVE = (0.0, math.inf)
"""Range of losses, entropies and distances."""

MODEL = -1
"""Index in place of a layer's for the scores of a model as a whole."""

_COLUMNS = ("", "layer", "head", "weights")
"""Names of columns beside those of metrics in tables, and no name."""

_ROUNDING = 1e-4
"""How far rounding may take a value beyond its declared range; whatever is further outside is an error."""


@dataclass(frozen=True)
class Metric:
    """Name, title and explanation of one number.

    Attributes:
        name: Name in ``scores.parquet``.
        title: Short title for a column.
        reading: One sentence that says how to read it.
        unit: Unit, empty for plain numbers.
        control: Name of the metric to compare it with, if any.
        control_title: Title of the control, in two or three words.
        error: Name under which its standard error over documents is stored, for metrics of all documents together.
            The error of a mean over heads is stored with the values of the layer or model as a whole.
        bounds: Names under which the bounds of its 95 % interval are stored likewise, if that is not Student's.
        proportion: Whether each document's value is 0 or 1, and the mean a proportion of documents.
        range: Least and greatest possible value; intervals do not extend beyond it.
        counts: For the share of heads with a label: the metric that holds the labels, and the label. The number of
            heads with this label, over all documents together, is then shown before the share.
        categories: Names that the values 0, 1, … stand for, such as labels of heads. Such a metric is a category, which
            is counted and never averaged; values below 0 are undefined.
    """

    name: str
    title: str
    reading: str
    _: KW_ONLY
    unit: str = ""
    control: str | None = None
    control_title: str = ""
    error: str | None = None
    bounds: tuple[str, str] | None = None
    proportion: bool = False
    range: tuple[float, float] = UNBOUNDED
    counts: tuple[str, str] | None = None
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the name can be that of a column."""
        if self.name in _COLUMNS:
            raise MeasureError(f"a metric is named {self.name!r}, as another column of tables: choose another name")


def stored_metric(
    name: str, *, unit: str = "", range: tuple[float, float] = UNBOUNDED, categories: tuple[str, ...] = ()
) -> Metric:
    """Return a metric that is stored for figures and for scores over documents, but shown in no table.

    A name with ``*`` stands for all names of this form, which depend on options.
    """
    return Metric(name, name.replace("_", " "), "", unit=unit, range=range, categories=categories)


def loss_metric(name: str, title: str, reading: str, *, control: str | None = None, control_title: str = "") -> Metric:
    """Return a metric that is a loss in nats."""
    return Metric(name, title, reading, unit="nats", control=control, control_title=control_title, range=NON_NEGATIVE)


def share_name(metric: str, category: str) -> str:
    """Return the name of the share of heads with a category, such as ``label=positional``."""
    return f"{metric}={category}"


def without(metric: str) -> str:
    """Return the name of the curve with a metric of all documents together without each one, ``(documents,)``.

    It holds means over heads; differences of two models on the same documents are paired by it.
    """
    return f"{metric}_without"


@dataclass(frozen=True)
class Column:
    """An array with named dimensions, such as one value per head and distance.

    Attributes:
        values: The numbers; NaN marks an undefined one.
        axes: Name of each dimension, such as ``("head", "distance")``.
    """

    values: Tensor
    axes: tuple[str, ...]

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check that it is a tensor and that every dimension has a name."""
        if not hasattr(self.values, "detach"):
            raise MeasureError(f"a column has values of type {type(self.values).__name__}: give a tensor")
        if self.values.ndim != len(self.axes):
            raise MeasureError(f"the axes {self.axes} do not fit an array of shape {tuple(self.values.shape)}")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Numbers of one layer, or of a model as a whole together with those of its layers.

    Attributes:
        layer: Index of the layer; :data:`MODEL` for the model.
        heads: Values per query head by metric, each ``(heads,)``; only of a layer.
        whole: Values of the layer, or of the model, as a whole by metric, such as controls that are the same for every
            head.
        curves: Columns with other dimensions by name, stored beside the scores.
        layers: Scores of the model's layers.
        metrics: Unit, range and categories of each metric, once the scores are checked.

    Examples:
        >>> Scores(layer=3, heads={"r": fit.r}, curves={"a": Column(fit.a, ("head", "distance"))})
    """

    layer: int = MODEL
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Column] = field(default_factory=dict)
    layers: Sequence[Scores] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict, repr=False)

    __repr__ = short_repr

    def __iter__(self) -> Iterator[Scores]:
        """Iterate over the layers in order, and then the scores of the model as a whole."""
        yield from sorted(self.layers, key=lambda scores: scores.layer)
        yield self

    @property
    def names(self) -> list[str]:
        """Names of all metrics, each once."""
        return list(dict.fromkeys(name for scores in self for name in (*scores.heads, *scores.whole)))

    def checked(self, declared: Iterable[Metric], *, of: str, controls: bool = True) -> Scores:
        """Return the scores on the CPU and in float64, or raise an error in one line.

        Refused are metrics that are not declared, metrics without their declared control, values outside the declared
        range, infinite ones, codes without a category, layers whose metrics have different numbers of heads, and two
        scores of the same layer.

        Args:
            declared: Metrics of the measurement.
            of: Name of the measurement, for errors.
            controls: Whether controls belong to these scores; those of all documents together may have them in the
                scores of each document.
        """
        return _checked([self], declared, of, controls)[0]

    def _check_layers(self, of: str) -> None:
        """Raise where a layer has no index of its own, and for values per head that are not of a layer."""
        indices: list[Any] = [layer.layer for layer in self.layers]
        for index in indices:
            if not isinstance(index, Integral) or index < 0:
                raise MeasureError(f"{of} returned scores for layer {index!r}: give each layer its index, from 0")
            if indices.count(index) > 1:
                raise MeasureError(f"{of} returned scores for layer {index} twice: give each layer its own index")
        if any(layer.layers for layer in self.layers):
            raise MeasureError(f"{of} returned layers of a layer: give them to the scores of the model")
        if self.heads and self.layer == MODEL:
            raise MeasureError(f"{of} returned values per head for the model as a whole: return Scores(layer=…)")
        wrong = next((name for part in self for name, x in part.curves.items() if not isinstance(x, Column)), None)
        if wrong is not None:
            raise MeasureError(f"{of} returned the curve '{wrong}' without names of its dimensions: return a Column")

    def _real(self, of: str) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return tensors of heads, and floats of the layer or the model; raise for other values."""
        import torch

        heads: dict[str, Any] = {**self.heads}
        if not all(type(x) is torch.Tensor and not x.is_complex() for x in heads.values()):
            heads = {name: real_tensor(x, f"{of} returned {name}") for name, x in heads.items()}
        whole: dict[str, Any] = {**self.whole}
        for name, value in whole.items():
            try:
                whole[name] = float(value.detach() if hasattr(value, "detach") else value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                kind = type(value).__name__
                raise MeasureError(f"{of} returned {name} as {kind}: return one real number") from error
        return heads, whole

    def _check_controls(self, of: str) -> None:
        """Raise for a metric that is defined somewhere and whose control is missing."""
        for name, metric in self.metrics.items():
            if metric.control is None or metric.control in self.metrics:
                continue
            heads = (bool((~part.heads[name].isnan()).any()) for part in self if name in part.heads)
            if any(heads) or any(not math.isnan(part.whole[name]) for part in self if name in part.whole):
                raise MeasureError(f"{of} returned '{name}' without its control '{metric.control}': return it, or NaN")


def checked_each(
    scores: Sequence[Scores], declared: Iterable[Metric], *, of: str, controls: bool = True
) -> Iterator[Scores]:
    """Yield each of several scores as :meth:`Scores.checked` returns it; raise at the first that is refused.

    All are checked at once.
    """
    known = [*declared]
    try:
        checked: Iterable[Scores] = _checked(scores, known, of, controls)
    except MeasureError:  # one by one, those before the wrong one are yielded
        checked = (item.checked(known, of=of, controls=controls) for item in scores)
    yield from checked


def _checked(items: Sequence[Scores], declared: Iterable[Metric], of: str, controls: bool) -> list[Scores]:
    """Return scores on the CPU and in float64; raise for the first wrong value, in the order of the checks."""
    import torch

    if not items:
        return []
    for item in items:
        item._check_layers(of)
    metrics = _declared(items, declared, of)
    real = {id(part): part._real(of) for item in items for part in (item, *item.layers)}
    parts = [part for item in items for part in item]
    heads, whole = zip(*(real[id(part)] for part in parts), strict=True)
    lengths = [count for part, values in zip(parts, heads, strict=True) for count in _head_counts(part, values, of)]
    tensors = [x for values in heads for x in values.values()]
    devices = {x.device for x in tensors}
    if len(devices) > 1 or any(device.type == "mps" for device in devices):  # which has no float64
        tensors = [x.cpu() for x in tensors]
    # One transfer for all layers and metrics.
    if len({x.dtype for x in tensors}) > 1:  # joined, they would lose digits
        tensors = [x.double() for x in tensors]
    joined = torch.cat(tensors).detach().double().cpu() if tensors else torch.zeros(0)
    single = torch.tensor([value for values in whole for value in values.values()], dtype=torch.float64)
    places = [
        (part, name) for values in (heads, whole) for part, named in zip(parts, values, strict=True) for name in named
    ]
    counts = torch.tensor([*lengths, *[1] * len(single)])
    _check_values(torch.cat([joined, single]), counts, places, metrics, of)
    pieces = iter(torch.split(joined, lengths))
    replaced = iter(
        [
            replace(part, heads={name: next(pieces) for name in named}, whole=values)
            for part, named, values in zip(parts, heads, whole, strict=True)
        ]
    )
    checked = []
    for item in items:
        layers = [next(replaced) for _ in item.layers]
        own = {name: metrics[name] for name in item.names}
        checked.append(replace(next(replaced), layers=layers, metrics=own))
        if controls:
            checked[-1]._check_controls(of)
    return checked


def _declared(items: Sequence[Scores], declared: Iterable[Metric], of: str) -> dict[str, Metric]:
    """Return the declaration of each metric; raise where one is missing."""
    known = [*declared]
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys(name for item in items for name in item.names):
        metric = declaration(name, known)
        if metric is None:
            names = [metric.name for metric in known]
            raise MeasureError(f"{of} returned '{name}', which is not one of its metrics: {nearest(str(name), names)}")
        metrics[name] = metric
    return metrics


def _head_counts(part: Scores, heads: Mapping[str, Tensor], of: str) -> list[int]:
    """Return the number of heads of each metric; raise where they differ, or there is not one value per head."""
    shapes = [x.shape for x in heads.values()]
    if len(set(shapes)) > 1 or any(len(shape) != 1 for shape in shapes[:1]):
        sizes = {name: tuple(x.shape) for name, x in heads.items()}
        raise MeasureError(f"{of} returned values per head of different shapes in layer {part.layer}: {sizes}")
    return [shape[0] for shape in shapes]


def _check_values(
    values: Tensor, counts: Tensor, places: Sequence[tuple[Scores, str]], metrics: Mapping[str, Metric], of: str
) -> None:
    """Raise for the first value that its declaration does not allow; ``counts`` are numbers of values by place."""
    import torch

    if not places:
        return
    limits = {name: _limits(metric) for name, metric in metrics.items()}
    low, high, category = zip(*(limits[name] for _, name in places), strict=True)
    least, most = (torch.tensor(x, dtype=torch.float64).repeat_interleave(counts) for x in (low, high))
    wrong = (values < least) | (values > most)
    if any(category):
        coded = torch.tensor(category).repeat_interleave(counts)
        wrong |= coded & (values != values.floor()) & ~values.isnan()
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        place, name = places[int((counts.cumsum(0) > first).nonzero()[0])]
        raise MeasureError(_outside(metrics[name], float(values[first]), place, of))


_PINNED = 2**29
"""Most bytes of pinned memory for the copies of one pass; torch keeps it for later ones."""


@dataclass
class PendingCopies:
    """Copies from GPUs that are not waited for one by one: their values may be read after :meth:`wait`."""

    _devices: set[torch.device] = field(default_factory=set)
    _pinned: int = 0

    def read(self, x: Tensor) -> Tensor:
        """Return a tensor on the CPU. A GPU writes directly into pinned memory, ten times as fast as into other."""
        import torch

        if not x.is_cuda or self._pinned + x.nbytes > _PINNED:
            return x.cpu()
        self._devices.add(x.device)
        self._pinned += x.nbytes
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

    def wait(self) -> None:
        """Wait until the GPUs have written all copies."""
        import torch

        for device in self._devices:
            torch.cuda.synchronize(device)


def on_cpu(scores: Sequence[Scores], *, pending: PendingCopies | None = None) -> list[Scores]:
    """Return scores with all tensors on the CPU; those of each device and dtype are copied at once.

    Args:
        scores: Scores of a model, or of its layers.
        pending: Makes the copies, for which the caller waits; by default this function does.
    """
    import torch

    tensors: dict[int, Tensor] = {}
    for part in (part for item in scores for part in item):
        columns = (column.values for column in part.curves.values())
        held: tuple[Any, ...] = (*part.heads.values(), *columns, *part.whole.values())
        tensors |= {id(x): x for x in held if isinstance(x, torch.Tensor)}
    copies: dict[int, Tensor] = {}
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors.values():
        if tensor.device.type == "cpu":
            copies[id(tensor)] = tensor.detach().cpu()
        else:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in alike.values():
        copies |= zip(map(id, group), copied_at_once(group, pending=pending), strict=True)
    return [_replaced(item, copies) for item in scores]


def _replaced(part: Scores, copies: Mapping[int, Tensor]) -> Scores:
    """Return scores with copies, by their identity, in place of tensors."""
    whole: dict[str, Any] = {**part.whole}
    return replace(
        part,
        heads={name: copies.get(id(x), x) for name, x in part.heads.items()},
        whole={name: copies.get(id(x), x) for name, x in whole.items()},
        curves={name: replace(x, values=copies.get(id(x.values), x.values)) for name, x in part.curves.items()},
        layers=[_replaced(layer, copies) for layer in part.layers],
    )


def copied_at_once(tensors: Sequence[Tensor], *, pending: PendingCopies | None = None) -> list[Tensor]:
    """Return tensors of one device and dtype on the CPU, by one copy; for ``pending`` see :func:`on_cpu`.

    Parts of one tensor, such as the heads of several texts, share its memory, which is copied once and as it is.
    """
    import torch

    by_memory: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    flat: list[Tensor] = []
    places: dict[int, tuple[tuple[int, ...], int]] = {}  # strides and offset of each tensor in the joined copy
    end = 0
    for parts in by_memory.values():
        size = parts[0].untyped_storage().nbytes() // parts[0].itemsize
        if size <= 2 * sum(part.numel() for part in parts):
            places |= {id(part): (part.stride(), end + int(part.storage_offset())) for part in parts}
            flat.append(parts[0].detach().as_strided((size,), (1,), 0))
            end += size
        else:  # little of a large tensor
            for part in parts:
                own = part.detach().contiguous()
                places[id(part)] = own.stride(), end
                flat.append(own.view(-1))
                end += len(flat[-1])
    copies = pending or PendingCopies()
    copy = copies.read(torch.cat(flat))
    if pending is None:
        copies.wait()
    return [copy.as_strided(tensor.shape, *places[id(tensor)]) for tensor in tensors]


def declaration(name: str, declared: Sequence[Metric]) -> Metric | None:
    """Return the metric of that name, or the first whose name with ``*`` stands for it; None if there is none."""
    same = next((metric for metric in declared if metric.name == name), None)
    alike = next((metric for metric in declared if "*" in metric.name and fnmatchcase(str(name), metric.name)), None)
    return same if same is not None or alike is None else replace(alike, name=name)


def real_tensor(values: Any, what: str) -> Tensor:
    """Return a tensor of real numbers; raise an error that begins with ``what`` for other values."""
    import torch

    try:
        tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        tensor = None
    if tensor is None or tensor.is_complex():
        raise MeasureError(f"{what} as {type(values).__name__}: return real numbers")
    return tensor


def _limits(metric: Metric) -> tuple[float, float, bool]:
    """Return the least and greatest accepted value of a metric, and whether it is a category; codes may be below 0."""
    low, high = (-math.inf, len(metric.categories) - 1) if metric.categories else metric.range
    rounding = 0 if metric.categories else _ROUNDING
    # No infinite value is accepted.
    return max(low - rounding, -sys.float_info.max), min(high + rounding, sys.float_info.max), bool(metric.categories)


def _outside(metric: Metric, value: float, scores: Scores, of: str) -> str:
    where = "the model as a whole" if scores.layer == MODEL else f"layer {scores.layer}"
    low, high = (0, len(metric.categories) - 1) if metric.categories else metric.range
    allowed = (
        "give a finite number, or NaN where it is undefined" if math.isinf(value) else f"it is {low:g} to {high:g}"
    )
    return f"{of} returned {metric.name} = {value:g} for {where}: {allowed}"
