"""End-to-end: a comparison's page in a real browser, offline. Skips where there is no playwright or no Chromium."""

from __future__ import annotations

import pytest

from helpers.report import opening
from helpers.runs import finished

pytest.importorskip("polars")

from wherewhat.report.comparison import page as page_of
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
    path.write_text(page_of(compare([tmp_path / "store"], metrics=["<b>r"])))
    with opening(browser, path) as page:
        page.wait_for_selector("#plot-0 svg.main-svg")
        assert LINK in page.text_content("#plot-0")
        assert "<b>r" in page.text_content("#plot-0 .ytitle")
        assert page.locator("main a, main b, svg a").count() == 0
        assert LINK in page.text_content("#sections table")
        page.screenshot(path=shots / f"compare-{len(steps)}-light.png", full_page=True)
        page.click("#theme")
        assert page.get_attribute("#theme", "aria-pressed") == "true"
        page.set_viewport_size({"width": 390, "height": 740})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=shots / f"compare-{len(steps)}-dark.png", full_page=True)
