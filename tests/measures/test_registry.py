"""End-to-end: a measurement from outside the package is found in every place that lists measurements."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from wherewhat.errors import ConfigError
from wherewhat.measures import measurement as registry
from wherewhat.measures.measurement import LayerMeasurement, find_measurement, measurements, register
from wherewhat.options import option
from wherewhat.report import views
from wherewhat.report.report import make_report
from wherewhat.report.result import Result
from wherewhat.report.views import ReportRun, View, register_view
from wherewhat.runs.request import ModelRequest
from wherewhat.scores import Metric, Scores
from wherewhat.sweep.cells import expand
from wherewhat.sweep.file import read_sweep_file


@dataclass(frozen=True)
class KeyNormConfig:
    """Options of the measurement."""

    order: int = option(2, "order of the norm")


class KeyNorm(LayerMeasurement):
    """Mean norm of the keys of every head."""

    name = "key_norm"
    summary = "Mean norm of the keys, per head."
    config = KeyNormConfig
    metrics = (Metric("key_norm", "norm of keys", "Mean norm of the keys before rotation."),)
    limits = "A norm says nothing of a direction."

    def measure(self, layer, config):
        norms = layer.k[0].norm(config.order, -1).mean(-1).repeat_interleave(layer.heads // layer.kv_heads)
        return Scores(layer=layer.layer, heads={"key_norm": norms.cpu()})


@pytest.fixture
def key_norm(monkeypatch):
    monkeypatch.setattr(registry, "_known", dict(measurements()))
    monkeypatch.setattr(views, "VIEWS", dict(views.VIEWS))
    register(KeyNorm)
    register_view("key_norm", View(report=ReportRun(1.0, documents=1, controls=("random",))))


@pytest.mark.usefixtures("key_norm")
def test_a_registered_measurement_is_everywhere(model, text, cli, tmp_path):
    help_text = cli("--help").out
    assert "key_norm" in help_text
    assert KeyNorm.summary in re.sub(r"\s+", " ", help_text.replace("│", " "))
    assert "order of the norm" in cli("key_norm", "--help").out
    done = cli("key_norm", model, "--text", text, "--tokens", 16, "--set", "order=1", "--out", "out")
    assert (done.code, done.err) == (0, "")
    assert "norm of keys" in done.out
    assert "random" in done.out
    path = tmp_path / done.out.strip().splitlines()[-2]
    result = Result.load(path)
    assert result.config["options"] == {"order": 1}
    assert [summary.metric.name for summary in result.summary()] == ["key_norm"]
    assert len(result.plot().data[0].z) == 2
    assert cli("export", path, "scores.csv").code == 0
    assert "key_norm" in (tmp_path / "scores.csv").read_text()
    sweep = tmp_path / "sweep.json"
    entry = {"models": [str(model)], "texts": [str(text)], "measurements": ["key_norm"], "tokens": 16}
    sweep.write_text(json.dumps(entry))
    assert [cell.request.measurement for cell in expand(read_sweep_file(sweep))] == ["key_norm"]
    made = make_report(ModelRequest(model=model, device="cpu"), out=tmp_path / "out", files=[str(text)], tokens=16)
    (section,) = (other for other in made.data["models"][0]["others"] if other["name"] == "key_norm")
    assert section["name"] == "key_norm"
    assert section["rows"][0]["controls"]["random"]["mean"] > 0
    assert len(section["figure"]["data"][0]["z"]) == 2
    assert any(table["id"] == "key_norm" for table in made.data["models"][0]["metrics"])


@pytest.mark.usefixtures("key_norm")
def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="there is already a measurement 'key_norm'"):
        register(KeyNorm)


def test_entry_points_add_measurements(monkeypatch):
    monkeypatch.setattr(registry, "_known", {})
    monkeypatch.setattr(registry, "plugins", lambda group: {"key_norm": KeyNorm} if "measurements" in group else {})
    assert find_measurement("key_norm").summary == KeyNorm.summary
    assert next(iter(measurements())) == "axes"


def test_declarations_do_not_import_torch():
    import subprocess
    import sys

    code = "import sys, wherewhat.measures.measurement as r; r.measurements(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
