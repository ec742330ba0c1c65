"""Identity: every chart of a page is the figure of the same name of the run that it shows."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from plotly.graph_objects import Figure

from helpers.report import CHARTS, drawn, opening
from wherewhat.report import charts
from wherewhat.report.figures import FIGURES, figure
from wherewhat.report.result import Result

FIGURE_OF = {
    "map": ("axes", "map"),
    "range": ("axes", "range"),
    "curve": ("axes", "curve"),
    "planes": ("planes", "planes"),
    "place": ("heads", "place"),
    "scatter": ("heads", "plane"),
    "distance": ("distance", "order"),
    "drift": ("distance", "drift"),
    "band-scores": ("frequencies", "band_scores"),
    "band-losses": ("frequencies", "band_losses"),
    "perturb-all": ("perturb", "increase"),
    "perturb-untouched": ("perturb", "increase_untouched"),
    "length-loss": ("extend", "positions"),
    "length-cost": ("extend", "cost"),
}
"""Measurement and name of the figure by chart of the page."""

FRAME = ("template", "title", "font", "margin", "legend")
"""What a figure has around the chart, and the page has in its own size and colours."""


@pytest.fixture(scope="module")
def runs(made):
    """The model's runs by measurement."""
    (model,) = made.report.data["models"]
    stored = [Result.load(made.out / run["name"]).stored for run in model["runs"]]
    return {run.measurement.name: run for run in stored if run.directory.config["weights"] == "trained"}


@pytest.fixture(scope="module")
def page(made):
    """The charts in the file, with their arrays."""
    html = made.path.read_text("utf-8")
    data, figures = (json.loads(re.search(rf'id="{name}">(.*?)</script>', html)[1]) for name in ("data", "figures"))

    def resolved(part):
        if isinstance(part, dict) and "$" in part:
            value = data
            for key in part["$"]:
                value = value[key]
            return value
        if isinstance(part, dict):
            return {name: resolved(value) for name, value in part.items()}
        return list(map(resolved, part)) if isinstance(part, list) else part

    (model,) = resolved(figures["charts"])["models"]
    return model


def emptied(part):
    """A chart without the arrays of its traces, which the page's script fills in."""
    if "data" in part:
        return {**part, "data": [emptied(trace) for trace in part["data"]]}
    kept = {name: value for name, value in part.items() if not isinstance(value, list)}
    return {name: emptied(value) if isinstance(value, dict) else value for name, value in kept.items()}


def without_frame(shown):
    """A chart as Plotly writes it, without what depends on its place: title, size, legend and exponents."""
    drawn = json.loads(Figure(shown).to_json())
    layout = {name: value for name, value in drawn["layout"].items() if name not in FRAME}
    for name, part in layout.items():
        if re.fullmatch(r"[xy]axis\d*", name):
            layout[name] = {key: value for key, value in part.items() if key not in ("exponentformat", "dtick")}
    return {"data": drawn["data"], "layout": layout}


def in_python(runs, name, **options):
    measurement, of = FIGURE_OF[name]
    return without_frame(figure(runs[measurement], of, **options))


def test_every_chart_has_a_figure():
    assert set(FIGURE_OF) == set(CHARTS)
    assert {name for _, name in FIGURE_OF.values()} == set(FIGURES) - {"distance", "rates"}


@pytest.mark.parametrize("name", sorted(charts.SECTIONS))
def test_curves_are_the_figures_of_their_runs(runs, page, name):
    assert without_frame(page[name]) == in_python(runs, name)


def test_charts_of_a_choice_have_the_style_of_their_figures(runs, page):
    for version, all_keys in enumerate((False, True)):
        assert without_frame(page["scatter"][version]) == in_python(runs, "scatter", all_keys=all_keys)
    for name in ("curve", "place"):
        shown, expected = without_frame(page[name]), in_python(runs, name, layer=1, head=2)
        assert emptied(shown) == emptied(expected)
    shown, expected = (emptied(one) for one in (without_frame(page["map"]), in_python(runs, "map")))
    for part in (shown["data"][0]["colorbar"], *shown["layout"].values()):
        for size in ("thickness", "len", "showgrid"):
            part.pop(size, None)
    assert shown == expected
    for layer in range(2):
        expected = in_python(runs, "planes", layer=layer, head=1)
        shown = without_frame(page["planes"][0])  # both layers have the same planes
        assert len(expected["data"][0].pop("y")) == len(shown["data"][0]["x"])
        assert shown["data"][0].pop("y") == []
        assert shown == expected


def test_distributions_of_all_metrics(runs, page, made):
    """The page has control models beside the run's own weights, which are first."""
    (model,) = made.report.data["models"]
    for number, metric in enumerate(model["metrics"]):
        shown = without_frame(page["range"][number])
        (own,) = without_frame(figure(runs[metric["measurement"]], "range", metric=metric["id"]))["data"]
        bars = next(trace for trace in shown["data"] if trace["name"] == own["name"])
        assert sum(bars["y"]) == sum(own["y"])
        assert {**bars, "yaxis": ""}.keys() == {**own, "yaxis": ""}.keys()
        if len(shown["data"]) == 1:
            assert bars == own


@pytest.mark.slow
@pytest.mark.browser
def test_what_a_reader_sees_are_the_numbers_of_the_figures(browser, made, runs):
    """The script fills in the arrays of the chosen head and metric."""
    with opening(browser, made.path) as opened:
        opened.select_option("#layer", "1")
        opened.select_option("#head", "2")
        for name in CHARTS:
            drawn(opened, name)
            options = {"layer": 1, "head": 2} if name in ("curve", "planes", "place") else {}
            shown = opened.evaluate(f"document.getElementById('{name}').data")
            for ours, theirs in zip(in_python(runs, name, **options)["data"], shown, strict=False):
                for key in ("x", "y", "z"):
                    if key in ours and not (isinstance(ours[key][0], str) or name == "range"):
                        # Curves of single heads are stored in 8 and 16 bits, other numbers with four digits.
                        tolerance = 0.02 if name == "curve" else 1e-3
                        np.testing.assert_allclose(
                            np.array(theirs[key], float), np.array(ours[key], float), rtol=1e-3, atol=tolerance
                        )
                for key in ("line", "mode", "type", "hovertemplate"):
                    if key in ours and isinstance(ours[key], str | dict):
                        assert theirs[key] == ours[key], (name, key)
