"""End-to-end: a comparison's page in a real browser, offline. Skips where there is no playwright or no Chromium."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.report import LINK, drawn, opening, photograph, until
from helpers.runs import finished

pytest.importorskip("polars")

from wherewhat.report.page import comparison_page
from wherewhat.runs.comparison import compare

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def test_names_of_runs_without_steps_are_text_in_charts_and_tables(browser, shots, tmp_path):
    for model in (LINK, "other"):
        finished(tmp_path / "store", {"a": 0.5, "b": 0.6}, model=model, metric="<b>r", extra={"checkpoint": "step1"})
    path = tmp_path / "page.html"
    path.write_text(comparison_page(compare([tmp_path / "store"], metrics=["<b>r"])))
    with opening(browser, path) as page:
        drawn(page, "plot-0")
        assert LINK in page.text_content("#plot-0")
        assert "<b>r" in page.text_content("#plot-0 .ytitle")
        assert page.locator("main a, main b, svg a").count() == 0
        assert LINK in page.text_content("#sections table")
        page.screenshot(path=shots / "compare-light.png")
        page.click("#theme")
        assert page.get_attribute("#theme", "aria-pressed") == "true"
        page.set_viewport_size({"width": 390, "height": 740})
        until(page, "document.documentElement.scrollWidth <= 390")
        page.screenshot(path=shots / "compare-dark.png")


def test_a_model_and_the_one_trained_from_it(browser, shots, tuned):
    """Nothing is said on the console and nothing requested, see ``opening``."""
    with opening(browser, tuned[1]) as page:
        assert "one random control" in page.text_content("#side-by-side thead")
        drawn(page, "map-0", "map-1", "ranks", "pair-0")
        dashes = page.evaluate("document.getElementById('ranks').data.map((trace) => trace.line.dash)")
        assert dashes == ["solid", "dash", "solid", "dash"]
        ends = page.evaluate("document.getElementById('ranks').data.map((trace) => [trace.x[0], trace.x.at(-1)])")
        assert ends == [[12.5, 100]] * 4  # of eight heads
        assert page.evaluate("document.getElementById('pair-0').data[0].x.length") == 8
        assert page.locator("#pairs table").count() == 2
        photograph(page, "#comparison", shots / "pair-light.png")
        page.set_viewport_size({"width": 390, "height": 740})
        page.click("#theme")
        until(page, "document.documentElement.scrollWidth <= 390")
        photograph(page, "#comparison", shots / "pair-dark.png")


def test_heads_of_unrelated_models_are_not_matched(browser, beside):
    with opening(browser, beside[1]) as page:
        drawn(page, "ranks")
        notes = page.locator("#pairs p").all_text_contents()
        assert [note.startswith("Heads are not matched one by one: ") for note in notes] == [True, True]
        assert page.locator("#pairs .chart").count() == 0
        # The random control model has no random control of its own.
        assert page.evaluate("document.getElementById('ranks').data.length") == 5


def test_other_measurements_have_their_place(browser, shots, made, tmp_path):
    """Each is in the contents, with what it was measured on and its command."""
    (model,) = made.report.data["models"]
    rows = [
        {
            "title": "<b>score",
            "unit": "",
            "reading": "a score",
            "value": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 4, "words": "0.50 ± 0.10"},
            "control": 0.1,
            "control_title": "chance",
            "controls": {"random": {"mean": 0.2, "low": 0.1, "high": 0.3, "n": 4}},
        }
    ]
    other = {
        "name": "<b>residual",
        "summary": "A summary.",
        "about": "Measured in float32 on 4 documents of 28 tokens; intervals are 95 % over documents.",
        "rows": rows,
        "figure": None,
        "more": 2,
        "command": "wherewhat residual '<b>tiny'",
    }
    data = {**made.report.data, "models": [{**model, "others": [other, {**other, "name": "split", "more": 0}]}]}
    path = replace(made.report, data=data).write(tmp_path / "page.html")
    with opening(browser, path) as page:
        links = page.locator("#contents li:has(a[href='#others']) a").all_text_contents()
        assert links == ["Other measurements", "<b>residual", "split"]
        page.click("#contents a:text-is('split')")
        assert page.locator("#measured-split").is_visible()
        text = page.text_content("#others")
        assert "2 other finished runs of this measurement in the same folder are not shown." in text
        assert "The random control is one untrained model." in text
        assert "0.50 ± 0.10" in text
        assert "one random control" in text
        assert page.locator("#others pre").first.text_content() == "wherewhat residual '<b>tiny'"
        photograph(page, "#others", shots / "others.png")
