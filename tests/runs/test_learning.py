"""Identity: tables and figures of a recorded training hold its records."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import tiny, tokens
from wherewhat.errors import StoreError
from wherewhat.runs.records import Records, TrainingRun
from wherewhat.runs.training import TrainingRecorder
from wherewhat.scores import Column


@pytest.fixture(scope="module")
def run():
    watch = TrainingRecorder(tiny("llama"), tokens(16, batch=2), every=1, measurements=["axes", "heads"])
    watch(1)
    return watch.finish()


def test_table(run):
    frame = run.table("pandas")
    assert list(frame.columns) == ["step", "metric", "layer", "head", "value"]
    records = run.records
    heads = len(records["layer"])
    r = frame[(frame.metric == "axes/r") & (frame.step == 1)]
    assert r.value.tolist() == pytest.approx(records["axes.r"][1].tolist())
    assert [*zip(r.layer, r["head"], strict=True)] == [
        *zip(*(records[n].tolist() for n in ("layer", "head")), strict=True)
    ]
    whole = frame[frame.metric == "axes/pooled_r"]
    assert whole.layer.isna().all()
    assert whole.value.tolist() == pytest.approx(records["axes.pooled_r"].tolist())
    per_head = sum(value.ndim == 2 for value in records.values.values())
    assert len(frame) == 2 * (per_head * heads + len(records.values) - per_head)
    assert run.table().schema.field("layer").type == "int32"
    assert run.table("polars").shape == frame.shape
    assert repr(run) == f"TrainingRun of {run.name}: 2 records, steps 0 to 1, axes, heads; in memory"


def test_undefined_values_are_null():
    records = Records().joined(0, {"axes.r": torch.tensor(torch.nan)}, {"axes.r": ()})
    run = TrainingRun(
        Records(records.steps, records.values, records.axes, tiny_constants()), {"measurements": {"axes": {}}}
    )
    assert run.table().to_pylist()[0]["value"] is None
    assert run.last() == {}


def tiny_constants():
    return {name: Column(torch.tensor([0]), ("head",)) for name in ("layer", "head")}


def test_figure_has_a_panel_per_measurement(run):
    figure = run.plot()
    lines = [trace for trace in figure.data if trace.name]
    assert [line.name for line in lines][:2] == ["axes: r", "axes: pooled r"]
    assert list(lines[0].y) == pytest.approx(run.records["axes.r"].double().mean(1).tolist())
    assert {trace.yaxis for trace in lines} == {"y", "y2"}
    values = {"mine.b": torch.tensor(1.0), "mine.a": torch.tensor(2.0)}
    unknown = TrainingRun(Records().joined(0, values, {"mine.a": (), "mine.b": ()}), {"measurements": {"mine": {}}})
    assert unknown.main_metrics() == {"mine": [("mine.b", "b"), ("mine.a", "a")]}  # of no installed measurement


def test_no_records_yet(tmp_path):
    run = TrainingRun(Records(constants=tiny_constants()), {"name": "new", "measurements": {"axes": {}}})
    assert "no steps" in repr(run)
    for draw in (run.plot, run.table):
        with pytest.raises(StoreError, match="'new' has no records yet"):
            draw()
    with pytest.raises(StoreError, match="is not the run directory of a recorded training"):
        TrainingRun.load(tmp_path)


def test_records_are_joined_in_the_order_of_steps_cut_and_read_back(tmp_path):
    axes = {"a": ("head",), "b": ()}
    records = Records().joined(0, {"a": torch.ones(2)}, axes).joined(5, {"b": torch.tensor(3.0)}, axes)
    records = records.joined(9, {"a": torch.zeros(2), "b": torch.tensor(4.0)}, axes)
    assert records["a"].nan_to_num(-1).tolist() == [[1, 1], [-1, -1], [0, 0]]  # NaN where a record has no score
    assert records["b"].nan_to_num(-1).tolist() == [-1, 3, 4]
    assert records.axes == axes
    records = Records(constants={"layer": Column(torch.tensor([0, 1]), ("head",))})
    for step in (10, 0, 5):
        records = records.joined(step, {"a": torch.full((2,), float(step)), "b": torch.tensor(0.5)}, axes)
    kept = records.until(5)
    assert kept.steps.tolist() == [0, 5]
    assert kept["a"].tolist() == [[0, 0], [5, 5]]
    assert len(records.until(-1)) == 0
    for wanted in (records, kept, records.until(-1)):
        wanted.write(tmp_path / "records.safetensors")
        found = Records.read(tmp_path / "records.safetensors")
        assert found.steps.tolist() == wanted.steps.tolist()
        assert found.axes == wanted.axes
        assert found["layer"].tolist() == [0, 1]
