"""Identity: entry points of a group are loaded by name; one that cannot be used is left out and named in a line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from wherewhat.errors import PluginWarning
from wherewhat.imports import plugins
from wherewhat.measures import measurement as registry

BROKEN = """
import typer
from dataclasses import dataclass
from wherewhat.measures.measurement import LayerMeasurement, Metric

app = typer.Typer()

@app.command()
def hello(numbers: list[list[int]]) -> None: ...

class Nameless(LayerMeasurement):
    def measure(self, layer, config): ...

class Axes(Nameless):
    name, summary, metrics, limits = "axes", "Again.", (Metric("x", "x", "x"),), ""
    config = dataclass(type("Config", (), {}))

class Plain(Axes):
    name, config = "plain", dict

class Abstract(LayerMeasurement):
    name, summary, config, metrics, limits = "abstract", "Abstract.", Axes.config, Axes.metrics, ""
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write entry points of a package named ``other``, with a module ``broken``, onto the import path."""

    def install(entries: str) -> Path:
        folder = tmp_path / "path" / "other-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entries)
        (folder.parent / "broken.py").write_text(BROKEN)
        (folder.parent / "exits.py").write_text("import sys\nsys.exit('no license found')\n")
        monkeypatch.syspath_prepend(folder.parent)
        return folder.parent

    return install


def left_out(caught) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, PluginWarning)]


def test_entry_points_are_loaded_by_name_and_others_left_out_with_a_warning(installed):
    assert plugins("wherewhat.tests") == {}
    installed("[wherewhat.tests]\ne = pathlib:Path\nb = absent:x\nc = sys:absent\nd = exits:x\na = sys:maxsize\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(plugins("wherewhat.tests").items()) == [("a", sys.maxsize), ("e", Path)]
    start = "the entry point '{}' in wherewhat.tests of the package other is left out: "
    assert left_out(caught) == [
        start.format("b") + "ModuleNotFoundError: No module named 'absent'",
        start.format("c") + "AttributeError: module 'sys' has no attribute 'absent'",
        start.format("d") + "SystemExit: no license found",
    ]


def test_measurements_that_cannot_be_used_are_left_out(installed, monkeypatch):
    before = set(registry.measurements())
    names = "Nameless Axes Plain Abstract app BROKEN"
    installed("[wherewhat.measurements]\n" + "".join(f"{name} = broken:{name}\n" for name in names.split()))
    monkeypatch.setattr(registry, "_known", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert set(registry.measurements()) == before
        assert set(registry.measurements()) == before
    reasons = {line.split("'")[1]: line.partition("left out: ")[2] for line in left_out(caught)}
    assert reasons["Nameless"] == "the measurement Nameless has no name: define name, summary, metrics"
    assert reasons["Axes"] == "there is already a measurement 'axes': choose another name"
    assert reasons["Plain"].startswith("the config of the measurement Plain is <class 'dict'>")
    assert reasons["Abstract"] == "the measurement Abstract has no measure: define measure"
    assert "is not a measurement" in reasons["app"]
    assert "AttributeError" in reasons["BROKEN"]
    assert len(left_out(caught)) == 6


def test_commands_that_cannot_be_used_are_named_in_one_line(cli, installed):
    names = "report = broken:app\nhello = broken:app\nvalue = sys:maxsize\ngone = absent:app\n"
    installed(f"[wherewhat.commands]\n{names}")
    shown = cli("--version")
    assert shown.code == 0
    assert shown.out.startswith("wherewhat ")
    lines = shown.err.splitlines()
    assert [line.split("'")[1] for line in lines] == ["gone", "hello", "report", "value"]
    assert all(line.startswith("wherewhat: the entry point '") for line in lines)
    assert "there is already a command 'report'" in shown.err


def test_a_broken_report_entry_point_does_not_end_the_report(installed, monkeypatch, tmp_path):
    from wherewhat.report.learning import learning_curves

    installed("[wherewhat.report]\nother = absent:curves\n")
    with pytest.warns(PluginWarning, match="'other' in wherewhat.report of the package other is left out"):
        assert learning_curves((), out=tmp_path) == []


def test_other_warnings_are_shown_as_before(capfd):
    from wherewhat.cli.main import _plugin_warnings_as_lines

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _plugin_warnings_as_lines():
            warnings.warn("one", UserWarning, stacklevel=1)
            warnings.warn("two", PluginWarning, stacklevel=1)
        warnings.warn("three", PluginWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["one", "three"]
    assert capfd.readouterr().err == "wherewhat: two\n"


def test_the_laboratory_is_declared():
    import tomllib

    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ]
    assert set(declared["wherewhat.commands"]) == {"encodings", "multihop"}
    for group in declared.values():
        for target in group.values():
            module, _, name = target.partition(":")
            assert hasattr(__import__(module, fromlist=[name]), name)
