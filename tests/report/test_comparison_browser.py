"""End-to-end: a comparison's page in a real browser, offline. Skips where there is no playwright or no Chromium."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.report import opening, photograph
from helpers.runs import finished

pytest.importorskip("polars")

from wherewhat.report.page import comparison_page
from wherewhat.runs.comparison import compare

pytestmark = pytest.mark.browser

LINK = '<a href="https://example.org">tiny</a> & co'


@pytest.mark.parametrize("steps", [("step1",), ("step1", "step10")])
def test_names_are_text_in_charts_and_tables(browser, shots, tmp_path, steps):
    for step in steps:
        for model in (LINK, "other"):
            values = {"a": 0.5, "b": 0.6}
            finished(tmp_path / "store", values, model=model, metric="<b>r", extra={"checkpoint": step})
    path = tmp_path / "page.html"
    path.write_text(comparison_page(compare([tmp_path / "store"], metrics=["<b>r"])))
    with opening(browser, path) as page:
        page.wait_for_selector("#plot-0 svg.main-svg")
        assert LINK in page.text_content("#plot-0")
        assert "<b>r" in page.text_content("#plot-0 .ytitle")
        assert page.locator("main a, main b, svg a").count() == 0
        assert LINK in page.text_content("#sections table")
        page.screenshot(path=shots / f"compare-{len(steps)}-light.png")
        page.click("#theme")
        assert page.get_attribute("#theme", "aria-pressed") == "true"
        page.set_viewport_size({"width": 390, "height": 740})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=shots / f"compare-{len(steps)}-dark.png")


def scroll_through(page):
    """Charts are drawn when the reader comes near them."""
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.getElementById('which').offsetTop; y += 500) {
                scrollTo(0, y);
                await new Promise((go) => setTimeout(go, 60));
            }
        }"""
    )


def test_a_model_and_the_one_trained_from_it(browser, shots, tuned):
    """Nothing is said on the console and nothing requested, see ``opening``."""
    report, path = tuned
    with opening(browser, path) as page:
        rows = page.locator("#side-by-side tbody tr")
        assert rows.count() == len(report.data["comparison"]["numbers"])
        assert "paired, 2 documents" in page.text_content("#side-by-side")
        assert "one random control" in page.text_content("#side-by-side thead")
        scroll_through(page)
        for chart in ("map-0", "map-1", "ranks", "pair-0"):
            page.locator(f"#{chart}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#{chart} svg.main-svg")
        dashes = page.evaluate("document.getElementById('ranks').data.map((trace) => trace.line.dash)")
        assert dashes == ["solid", "dash", "solid", "dash"]
        ends = page.evaluate("document.getElementById('ranks').data.map((trace) => [trace.x[0], trace.x.at(-1)])")
        assert ends == [[12.5, 100]] * 4  # of eight heads
        for metric in ("r", "unique_c"):
            page.select_option("#shared-metric", metric)
            found = report.data["comparison"]["pairs"][0]["metrics"][metric]
            assert f"Correlation over 8 heads: {found['correlation']:.3f}" in page.text_content("#pair-note-0")
            most = found["changed"][0]
            assert page.text_content("#pair-table-0 tbody th") == f"L{most['layer']}H{most['head']}"
        assert page.evaluate("document.getElementById('pair-0').data[0].x.length") == 8
        assert page.locator("#pairs table").count() == 2
        assert page.locator("main b, main i, svg a").count() == 0
        photograph(page, "#comparison", shots / "pair-light.png")
        page.set_viewport_size({"width": 390, "height": 740})
        page.click("#theme")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        photograph(page, "#comparison", shots / "pair-dark.png")


def test_heads_of_unrelated_models_are_not_matched(browser, beside):
    with opening(browser, beside[1]) as page:
        scroll_through(page)
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
            "value": {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 4},
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
        assert "0.500 (0.400 to 0.600)" in text
        assert "one random control" in text
        assert page.locator("#others pre").first.text_content() == "wherewhat residual '<b>tiny'"
        photograph(page, "#others", shots / "others.png")
