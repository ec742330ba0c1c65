"""End-to-end: the study's page in a real browser, offline. Skips where there is no playwright or no Chromium."""

from __future__ import annotations

import pytest

from helpers.report import opening
from wherewhat.lab.encoding_study.page import write_page
from wherewhat.lab.encoding_study.study import open_runs
from wherewhat.lab.encoding_study.summary import summarise_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def written(encoding_study, tmp_path_factory):
    runs = open_runs(encoding_study[0])
    return write_page(tmp_path_factory.mktemp("page"), runs, [summarise_run(run) for run in runs])


@pytest.fixture(params=[1280, 390])
def opened(request, browser, written):
    """The page, ready; nothing may have gone wrong in the end, and it must fit the window."""
    with opening(browser, written, width=request.param) as page:
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= request.param


def test_everything_is_drawn(opened):
    assert opened.locator("#time .main-svg").count() > 0
    assert "3 encodings" in opened.text_content("#about")
    assert opened.locator("#when-table tbody tr").count() == 3
    lines = opened.locator("#time .scatterlayer .trace").count()
    opened.locator("#legend input").first.uncheck()
    assert opened.locator("#time .scatterlayer .trace").count() < lines
    opened.click("#theme")
    assert opened.get_attribute("#theme", "aria-pressed") == "true"


def test_curves_can_be_chosen(opened):
    assert opened.input_value("#method") == "none"
    opened.select_option("#method", "yarn")
    assert "does not apply to alibi, learned" in opened.text_content("#length-note")
    opened.select_option("#kind", "position_jitter")
    opened.select_option("#y", "rise_length")
    assert "Too few" in opened.text_content("#relation-note")
