"""End-to-end: the study's page in a real browser, offline. Skips where there is no playwright or no Chromium."""

from __future__ import annotations

import pytest

from helpers.report import opening
from wherewhat_lab.encoding_study.page import write_page
from wherewhat_lab.encoding_study.study import open_runs
from wherewhat_lab.encoding_study.summary import summarise_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def written(encoding_study, tmp_path_factory):
    runs = open_runs(encoding_study[0])
    return write_page(tmp_path_factory.mktemp("page"), runs, [summarise_run(run) for run in runs])


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_drawn_and_can_be_chosen(browser, written, width):
    with opening(browser, written, width=width) as opened:
        assert opened.locator("#time .main-svg").count() > 0
        assert "3 encodings" in opened.text_content("#about")
        assert opened.locator("#when-table tbody tr").count() == 3
        lines = opened.locator("#time .scatterlayer .trace").count()
        opened.locator("#legend input").first.uncheck()
        assert opened.locator("#time .scatterlayer .trace").count() < lines
        opened.click("#theme")
        assert opened.get_attribute("#theme", "aria-pressed") == "true"
        assert opened.input_value("#method") == "none"
        opened.select_option("#method", "yarn")
        assert "does not apply to alibi, learned" in opened.text_content("#length-note")
        opened.select_option("#kind", "position_jitter")
        opened.select_option("#y", "rise_length")
        assert "Too few" in opened.text_content("#relation-note")
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
