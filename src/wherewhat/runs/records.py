"""Scores by training step: the recorder that collects them, run directories with them, and learning curves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wherewhat.boundary import user_path
from wherewhat.chart_style import UNIT, curves_over_steps, plain
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import JSON, read_object
from wherewhat.measures.measurement import measurements
from wherewhat.options import checked
from wherewhat.runs.directory import CONFIG, RunDirectory
from wherewhat.runs.schema import ProfileFile, score_profiles, stored_scores, write_profiles
from wherewhat.runs.tables import FrameKind, as_frame
from wherewhat.scores import Column, Scores

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


TensorTable = Mapping[str, Column]
"""Tensors by name, with the names of their dimensions."""

Axes = Mapping[str, tuple[str, ...]]
"""Names of the dimensions of each tensor, by the tensor's name."""

RECORDS_FILE = "records.safetensors"
"""File of the records while a training is not finished."""

RECORDS = "records"
"""Part of a study's run directory that holds the records."""

_STEPS = "steps"


@dataclass(frozen=True)
class Records:
    """Scores of one model at several training steps.

    Attributes:
        steps: Number of training steps at each record, ascending, ``(records,)`` int64.
        values: Scores by name, ``(records, …)`` float32; NaN where a score is not defined.
        axes: Names of the dimensions after the first, by name.
        constants: Tensors that are the same at all steps, such as the numbers of test inputs.
    """

    steps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    values: Mapping[str, Tensor] = field(default_factory=dict)
    axes: Axes = field(default_factory=dict)
    constants: TensorTable = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, step: int) -> bool:
        return bool((self.steps == step).any())

    def __getitem__(self, name: str) -> Tensor:
        """Return scores ``(records, …)`` or a constant by name."""
        return self.values[name] if name in self.values else self.constants[name].values

    def joined(self, step: int, scores: Mapping[str, Tensor], axes: Axes) -> Records:
        """Return these records and one more, in the order of steps; scores that a record does not have are NaN."""
        steps = torch.cat([self.steps, torch.tensor([step])])
        order = steps.argsort()
        values, known = {}, {**self.axes, **axes}
        for name in {**self.values, **scores}:
            value = scores[name] if name in scores else torch.full_like(self.values[name][0], torch.nan)
            before = self.values.get(name, torch.full((len(self), *value.shape), torch.nan, dtype=value.dtype))
            if before.shape[1:] != value.shape:
                raise ConfigError(
                    f"a record with {name} of shape {tuple(value.shape)} does not continue those of shape "
                    f"{tuple(before.shape[1:])}: record every model in its own file"
                )
            values[name] = torch.cat([before, value[None]])[order]
        return Records(steps[order], values, {name: known[name] for name in values}, self.constants)

    def until(self, step: int) -> Records:
        """Return the records up to a step, with it."""
        kept = self.steps <= step
        return replace(self, steps=self.steps[kept], values={name: value[kept] for name, value in self.values.items()})

    def table(self) -> TensorTable:
        """Return everything as one table; :meth:`from_table` is the inverse."""
        scores = {name: Column(value, ("step", *self.axes[name])) for name, value in self.values.items()}
        return {_STEPS: Column(self.steps, ("step",)), **scores, **self.constants}

    @classmethod
    def from_table(cls, table: TensorTable) -> Records:
        """Return the records in a table."""
        if _STEPS not in table:
            raise StoreError("the table holds no records of a training: it has no steps")
        scores = {name: column for name, column in table.items() if name != _STEPS and column.axes[:1] == ("step",)}
        return cls(
            table[_STEPS].values,
            {name: column.values for name, column in scores.items()},
            {name: column.axes[1:] for name, column in scores.items()},
            {name: column for name, column in table.items() if name not in scores and name != _STEPS},
        )

    def write(self, path: Path) -> None:
        """Write a file atomically."""
        write_profiles(path, score_profiles(Scores(curves=self.table()), None))

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read what :meth:`write` wrote."""
        try:
            return cls.from_table(_curves(ProfileFile(path), None))
        except StoreError as error:
            raise StoreError(f"cannot read {path}: {error}") from error


class Recorder:
    """Score a model at training steps; to be given to a training as its ``record``.

    The file is written after every record, before the training can save a later state: a resumed training finds all
    records up to the step it resumes from. A step that was recorded before is not scored again.

    Args:
        score: Function from a model to its scores by name, float32 on the CPU; called without gradients.
        axes: Names of the dimensions of each score.
        constants: Tensors that are the same at all steps. A file with other constants belongs to another training and
            is refused.
        path: File of the records, which is continued if it exists; None keeps them in memory only.

    Attributes:
        records: All records.
        seconds_by_step: Wall time of each record that this process made.
    """

    def __init__(
        self,
        score: Callable[[Any], Mapping[str, Tensor]],
        axes: Axes,
        *,
        constants: TensorTable | None = None,
        path: Path | None = None,
    ) -> None:
        self._score, self._axes, self._path = score, axes, path
        self.records = Records(constants=constants or {})
        self.seconds_by_step: dict[int, float] = {}
        if path is not None and path.exists():
            records = Records.read(path)
            if not _equal(records.constants, self.records.constants):
                raise ConfigError(
                    f"{path} holds records of another training or of other inputs: choose another file, or remove it"
                )
            self.records = records

    def __call__(self, step: int, model: nn.Module) -> None:
        """Record ``model`` after ``step`` steps."""
        if step in self.records:
            return
        synchronize(model)  # so that pending training kernels do not count as time for recording
        started = time.perf_counter()
        with torch.no_grad():
            scores = self._score(model)
        self.records = self.records.joined(step, scores, self._axes)
        if self._path is not None:
            self.records.write(self._path)
        self.seconds_by_step[step] = time.perf_counter() - started

    @property
    def seconds(self) -> float:
        """Wall time of all records that this process made; the first includes compilation."""
        return sum(self.seconds_by_step.values())


def synchronize(model: nn.Module) -> None:
    """Wait for all kernels on the device of a model's first weight."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class StudyRun:
    """A finished run of a study."""

    directory: RunDirectory

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return self.directory.path

    @property
    def config(self) -> dict[str, Any]:
        """Configuration: everything that the results depend on."""
        return dict(self.directory.config)

    @property
    def details(self) -> dict[str, Any]:
        """Additional provenance: seconds, number of parameters, GPU."""
        extra: Any = self.directory.provenance()["extra"]
        return dict(extra)

    def records(self) -> Records:
        """Return the scores by training step."""
        return Records.from_table(self.table(RECORDS))

    def table(self, key: str) -> TensorTable:
        """Return the tensors of one part."""
        return _curves(self.directory.profiles(), key)


def study_config(study: str, **values: JSON) -> dict[str, JSON]:
    """Return the configuration of a run: what ``values`` say, the study's name, and the version of its files."""
    return {"study": study, "study_version": 2, **values}


def open_study_run(path: Path, study: str) -> RunDirectory:
    """Open the finished run directory of a study."""
    run = RunDirectory.load(path)
    if run.config.get("study") != study:
        raise StoreError(f"{path} is not a run of the study '{study}': give a directory that it made")
    return run


def save_table(run: RunDirectory, key: str, table: TensorTable, *, seconds: float) -> None:
    """Save tensors as a part of a run, unless the part is there already."""
    if not run.has(key):
        run.save(key, Scores(curves=table), document=key, seconds=seconds)


def read_part(run: RunDirectory, key: str) -> TensorTable:
    """Return the tensors of one part, before or after the run is finished."""
    return run.part(key).curves


def _curves(file: ProfileFile, document: str | None) -> TensorTable:
    return stored_scores(None, file).get(document, Scores()).curves


def _equal(table: TensorTable, other: TensorTable) -> bool:
    return table.keys() == other.keys() and all(torch.equal(table[name].values, other[name].values) for name in table)


TRAINING = "training"
"""Name of the study whose runs are recorded trainings."""

MAIN_METRICS = 4
"""Number of metrics of a measurement that are logged and drawn; all of them are stored."""


@dataclass(frozen=True)
class Series:
    """One curve over the steps of a training.

    Attributes:
        name: Name in the legend.
        mean: Values, ``(records,)``.
        low: Lower end of a band around them; None without a band.
        high: Upper end.
        steps: Whether the curve is drawn in steps, for counts.
    """

    name: str
    mean: Tensor
    low: Tensor | None = None
    high: Tensor | None = None
    steps: bool = False


@dataclass(frozen=True)
class CurvePanel:
    """Curves on one vertical axis.

    Attributes:
        title: Title of the axis.
        series: The curves.
        unit: Whether the axis shows 0 to 1; it is fitted to the curves otherwise.
    """

    title: str
    series: Sequence[Series]
    unit: bool = False

    def plain(self, numbers: Callable[[Tensor], list[float | None]]) -> dict[str, Any]:
        """Return it as plain JSON, with ``numbers`` of each tensor."""
        bounds = ("mean", "low", "high")
        return {
            "title": self.title,
            "range": UNIT if self.unit else None,
            "series": [
                {
                    "name": series.name,
                    **{name: None if (curve := getattr(series, name)) is None else numbers(curve) for name in bounds},
                    "shape": "hv" if series.steps else "linear",
                }
                for series in self.series
            ],
        }


def spread_over_heads(name: str, values: Tensor) -> Series:
    """Return the mean over heads of scores ``(records, heads)``, with a band between their quartiles."""
    heads = values.double()
    low, high = heads.nanquantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=1)
    return Series(name, heads.nanmean(1), low, high)


@dataclass(frozen=True, repr=False)
class TrainingRun:
    """Scores of a model at several steps of its training.

    Attributes:
        records: The scores: per head ``(records, heads)``, or of the whole model ``(records,)``, under names such as
            ``axes.r``; the constants ``layer`` and ``head`` are the indices of the heads.
        config: What was recorded: measurements with their options, documents, tokens, model.
        path: Run directory; None if the records are in memory only.

    Examples:
        >>> run = TrainingRun.load("runs/training-gpt2-0123456789ab")
        >>> run.table("pandas").query("metric == 'axes/r'")
        >>> run.plot()
    """

    records: Records
    config: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    @checked()
    def load(cls, path: str | os.PathLike[str]) -> TrainingRun:
        """Open the run directory of a training that is finished, was killed, or still runs."""
        path = user_path(path, name="the run directory", error=StoreError)
        config = read_object(path / CONFIG)
        if config is None or config.get("study") != TRAINING:
            raise StoreError(f"{path} is not the run directory of a recorded training: choose one named training-…")
        if (path / RECORDS_FILE).exists():
            return cls(Records.read(path / RECORDS_FILE), config, path)
        run = StudyRun(open_study_run(path, TRAINING))
        return cls(run.records(), run.config, path)

    @property
    def name(self) -> str:
        """Name of the training."""
        return str(self.config.get("name", ""))

    def __repr__(self) -> str:
        steps = self.records.steps.tolist()
        span = f"steps {steps[0]:,} to {steps[-1]:,}" if steps else "no steps"
        where = "in memory" if self.path is None else str(self.path)
        return f"TrainingRun of {self.name}: {len(steps)} records, {span}, {', '.join(self._measured())}; {where}"

    def main_metrics(self) -> dict[str, list[tuple[str, str]]]:
        """Return names and titles of the main metrics of each measurement that the records hold."""
        main = {}
        for measurement in self._measured():
            declared = measurements().get(measurement)
            prefix = f"{measurement}."
            if declared is not None and declared.metrics:
                numbers = [metric for metric in declared.metrics if not metric.categories]
                known = [(f"{prefix}{metric.name}", metric.title) for metric in numbers]
            else:  # of a package that is not installed: the names are all that is known
                known = [(name, name.removeprefix(prefix)) for name in self.records.values if name.startswith(prefix)]
            main[measurement] = [metric for metric in known if metric[0] in self.records.values][:MAIN_METRICS]
        return {measurement: metrics for measurement, metrics in main.items() if metrics}

    def last(self) -> dict[str, float]:
        """Return the main metrics of the last record by names such as ``axes/r``: means over heads, where defined."""
        names = [name for metrics in self.main_metrics().values() for name, _ in metrics]
        means = {_shown(name): float(self.records.values[name][-1].double().nanmean()) for name in names}
        return {name: value for name, value in means.items() if value == value}

    @checked()
    def table(self, frame: FrameKind = "pyarrow") -> Any:
        """Return one row per step, metric and head: ``step``, ``metric``, ``layer``, ``head`` and ``value``.

        Layer and head are null for values of the whole model; the value is null where a metric is not defined.

        Args:
            frame: ``pyarrow``, ``pandas`` or ``polars``.
        """
        import pyarrow as pa

        layers, heads = (self.records[name].tolist() for name in ("layer", "head"))
        none = [None]
        tables = []
        for name, values in self.records.values.items():
            single = values.ndim == 1
            count = 1 if single else len(heads)
            numbers = values.double().flatten()
            columns = {
                "step": pa.array(self.records.steps.repeat_interleave(count).numpy(), pa.int64()),
                "metric": pa.array([_shown(name)] * len(numbers), pa.string()),
                "layer": pa.array((none if single else layers) * len(self.records), pa.int32()),
                "head": pa.array((none if single else heads) * len(self.records), pa.int32()),
                "value": pa.array(numbers.numpy(), pa.float64(), from_pandas=True),  # NaN becomes null
            }
            tables.append(pa.table(columns))
        if not tables:
            raise StoreError(f"the training '{self.name}' has no records yet")
        return as_frame(pa.concat_tables(tables), frame)

    def panels(self) -> list[CurvePanel]:
        """Return one panel of curves per measurement, with its main metrics."""
        panels = []
        for measurement, metrics in self.main_metrics().items():
            series = []
            for name, title in metrics:
                values, shown = self.records.values[name], f"{measurement}: {title}"
                series.append(Series(shown, values.double()) if values.ndim == 1 else spread_over_heads(shown, values))
            defined = torch.cat([curve.mean for curve in series]).nan_to_num(0.5)
            panels.append(CurvePanel(measurement, series, unit=bool(((defined >= 0) & (defined <= 1)).all())))
        return panels

    def plot(self) -> Figure:
        """Return a Plotly figure of the main metrics by step; bands are quartiles over heads."""
        from plotly.graph_objects import Figure

        panels = [panel.plain(Tensor.tolist) for panel in self.panels()]
        if not panels:
            raise StoreError(f"the training '{self.name}' has no records yet")
        figure = Figure(curves_over_steps(self.records.steps.tolist(), panels))
        return figure.update_layout(
            title=plain(self.name), height=120 + 260 * len(panels), template="plotly_white", margin_t=60
        )

    def _measured(self) -> list[str]:
        return list(self.config.get("measurements", {}))


def _shown(name: str) -> str:
    """Return the name of a metric as users see it; a slash cannot be part of a stored name."""
    return name.replace(".", "/", 1)
