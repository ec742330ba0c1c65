"""Identity: the page's learning curves are the records; trainings are found where users look for them."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import tokens
from helpers.training import train_loop, trainee
from wherewhat.errors import ConfigError
from wherewhat.progress import counted
from wherewhat.report.learning import learning_curves, page_data, training_curves
from wherewhat.runs.records import CurvePanel, Series
from wherewhat.runs.training import TrainingRecorder
from wherewhat_lab.multihop.learning import curves


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished training, and one that was killed, in the output folder of a trainer."""
    out = tmp_path_factory.mktemp("output") / "wherewhat"
    for name in ("finished", "killed"):
        model = trainee()
        watch = TrainingRecorder(model, tokens(16, batch=2), every=2, measurements="axes", out=out, name=name)
        train_loop(model, watch, steps=4)
        if name == "finished":
            watch.finish()
    return out


def test_finished_and_killed_trainings_are_shown(folder):
    found = training_curves(folder)
    assert [one["title"] for one in found.values()] == ["finished", "killed"]
    assert found == training_curves(folder.parent)
    (killed,) = (path for path in found if "killed" in path.name)
    assert training_curves(killed) == {killed: found[killed]}
    one = found[killed]
    assert one["steps"] == [0, 2, 4]
    (panel,) = one["panels"]
    assert panel["title"] == "axes"
    assert panel["range"] == [-0.03, 1.03]
    assert [series["name"] for series in panel["series"]][:2] == ["axes: r", "axes: pooled r"]
    assert panel["series"][0]["low"][0] <= panel["series"][0]["mean"][0] <= panel["series"][0]["high"][0]
    assert panel["series"][1]["low"] is None  # of the whole model
    assert "recorded at 3 steps on 2 texts of 16 tokens" in one["note"]


@pytest.mark.slow
def test_both_kinds_of_training(folder, multihop_study, tmp_path):
    found = learning_curves([folder, multihop_study.path], out=tmp_path)
    assert [one["title"] for one in found] == [curves(multihop_study)["title"], "finished", "killed"]
    assert learning_curves([], out=folder) == found[1:]
    assert len(learning_curves([folder], out=folder)) == 2
    with pytest.raises(ConfigError, match="holds no training: give a run directory"):
        learning_curves([tmp_path], out=tmp_path)


def test_a_training_without_records_yet_is_left_out(folder, tmp_path):
    (path,) = folder.glob("training-killed-*")
    copied = tmp_path / path.name
    copied.mkdir()
    (copied / "config.json").write_bytes((path / "config.json").read_bytes())
    assert training_curves(tmp_path) == {}


def test_curves_are_thinned_and_undefined_values_are_missing():
    steps = torch.arange(1000)
    values = torch.linspace(0, 1, 1000).double()
    values[-1] = torch.nan
    one = page_data(name="a", title="b", note="c", steps=steps, panels=[CurvePanel("d", [Series("e", values)])])
    assert len(one["steps"]) == 240
    assert (one["steps"][0], one["steps"][-1]) == (0, 999)
    assert one["panels"][0]["series"][0]["mean"][-1] is None
    assert one["panels"][0]["range"] is None
    assert len(one["table"]["rows"]) == 5
    assert one["table"]["rows"][0] == ["0", "0.000"]
    assert one["table"]["rows"][-1] == ["999", "undefined"]

    series = Series("counts", torch.tensor([3, 4]), steps=True)
    one = page_data(name="a", title="b", note="c", steps=torch.tensor([0, 50]), panels=[CurvePanel("d", [series])])
    assert one["table"]["rows"] == [["0", "3"], ["50", "4"]]
    assert [counted(count, "layer") for count in (1, 2)] == ["1 layer", "2 layers"]
