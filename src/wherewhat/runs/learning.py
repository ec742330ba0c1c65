"""Learning curves: records of a training as a table, as panels of curves, and as a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wherewhat.boundary import user_path
from wherewhat.errors import StoreError
from wherewhat.hashes import read_object
from wherewhat.measures.registry import measurements
from wherewhat.options import checked
from wherewhat.runs.layout import CONFIG
from wherewhat.runs.records import RECORDS, RECORDS_FILE, Records, StudyRun, open_study_run
from wherewhat.runs.results import FrameKind, as_frame

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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
        return cls(Records.from_table(run.table(RECORDS)), run.config, path)

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
        found = {}
        for measurement in self._measured():
            declared = measurements().get(measurement)
            known = [] if declared is None else [(metric.name, metric.title) for metric in declared.metrics]
            # Of a measurement of a package that is not installed, the names are all that is known.
            known = known or [(name, name) for name in _metrics(self.records, measurement)]
            held = [(f"{measurement}.{name}", title) for name, title in known]
            found[measurement] = [one for one in held if one[0] in self.records.values][:MAIN_METRICS]
        return {measurement: metrics for measurement, metrics in found.items() if metrics}

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
        found = []
        for measurement, metrics in self.main_metrics().items():
            series = []
            for name, title in metrics:
                values, shown = self.records.values[name], f"{measurement}: {title}"
                series.append(Series(shown, values.double()) if values.ndim == 1 else spread_over_heads(shown, values))
            defined = torch.cat([one.mean for one in series]).nan_to_num(0.5)
            found.append(CurvePanel(measurement, series, unit=bool(((defined >= 0) & (defined <= 1)).all())))
        return found

    def plot(self) -> Figure:
        """Return a Plotly figure of the main metrics by step; bands are quartiles over heads."""
        from plotly.subplots import make_subplots

        panels = self.panels()
        if not panels:
            raise StoreError(f"the training '{self.name}' has no records yet")
        steps = self.records.steps.tolist()
        figure = make_subplots(rows=len(panels), shared_xaxes=True, subplot_titles=[panel.title for panel in panels])
        for row, panel in enumerate(panels, 1):
            for number, series in enumerate(panel.series):
                colour = _COLOURS[number % len(_COLOURS)]
                if series.low is not None and series.high is not None:
                    band = {"x": [*steps, *steps[::-1]], "y": [*series.high.tolist(), *series.low.tolist()[::-1]]}
                    fill = {"fill": "toself", "fillcolor": colour, "opacity": 0.15, "line": {"width": 0}}
                    figure.add_scatter(**band, **fill, showlegend=False, hoverinfo="skip", row=row, col=1)
                line = {"color": colour, "shape": "hv" if series.steps else "linear"}
                figure.add_scatter(x=steps, y=series.mean.tolist(), name=series.name, line=line, row=row, col=1)
        figure.update_layout(title=self.name, height=120 + 260 * len(panels), template="plotly_white")
        figure.update_xaxes(title_text="step", row=len(panels), col=1)
        return figure

    def _measured(self) -> list[str]:
        return list(self.config.get("measurements", {}))


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def _metrics(records: Records, measurement: str) -> list[str]:
    prefix = f"{measurement}."
    return [name.removeprefix(prefix) for name in records.values if name.startswith(prefix)]


def _shown(name: str) -> str:
    """Return the name of a metric as users see it; a slash cannot be part of a stored name."""
    return name.replace(".", "/", 1)
