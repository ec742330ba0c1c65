"""End-to-end: the page in a real browser, offline. Skips where there is no playwright or no Chromium.

Screenshots go to the folder named by WHEREWHAT_SCREENSHOTS, else to pytest's temporary folder.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.report import opening
from wherewhat.lab.multihop.learning import curves

pytestmark = pytest.mark.browser

PANEL = ("true", "fitted", "residual", "curve", "planes", "place")
CURVES = ("distance", "drift", "band-scores", "band-losses", "perturb-all", "perturb-untouched")
CHARTS = ("map", *PANEL, "scatter", *CURVES, "length-loss", "length-cost")


@pytest.fixture
def opened(browser, made):
    """The page of one model."""
    with opening(browser, made.path) as page:
        yield page


def scroll_through(page):
    """Charts are drawn when the reader comes near them."""
    page.evaluate(
        """async () => {
            for (let y = 0; y < document.body.scrollHeight; y += 500) {
                scrollTo(0, y);
                await new Promise((go) => setTimeout(go, 60));
            }
            scrollTo(0, 0);
        }"""
    )


def test_first_paint_and_head_click_take_less_than_a_second(browser, made):
    click = """() => new Promise((done) => {
        const began = performance.now();
        const head = document.getElementById('head');
        head.value = '2';
        head.dispatchEvent(new Event('change'));
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0));
    })"""
    paints, clicks = [], []
    for _ in range(3):
        with opening(browser, made.path) as page:
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            page.wait_for_selector("#map svg.main-svg")
            clicks.append(page.evaluate(click))
    # The best of a few: whatever else the machine does meanwhile only makes them slower.
    assert min(paints) < 1000
    assert min(clicks) < 1000


def test_charts_wait_until_the_reader_comes_near(opened):
    assert opened.locator("#length-cost svg.main-svg").count() == 0
    opened.locator("#length-cost").scroll_into_view_if_needed()
    opened.wait_for_selector("#length-cost svg.main-svg")
    assert "a quarter of the text" in opened.text_content("#length-note")


def test_reader_finds_a_head(opened, shots):
    opened.select_option("#metric", label="symbolic score (heads)")
    assert "follows the tokens" in opened.text_content("#reading")
    opened.select_option("#weights", "random")
    opened.select_option("#layer", "1")
    opened.select_option("#head", "2")
    assert opened.text_content("#h-panel") == "Layer 1, head 2"
    assert opened.text_content("#label").startswith("Label: ")
    scroll_through(opened)
    for chart in CHARTS:
        assert opened.locator(f"#{chart} svg.main-svg").count() > 0, chart
    opened.screenshot(path=shots / "desktop.png", full_page=True)


def test_click_on_the_map_opens_the_head(opened):
    opened.locator("#map").scroll_into_view_if_needed()
    opened.wait_for_selector("#map .nsewdrag")
    box = opened.locator("#map .nsewdrag").bounding_box()
    opened.mouse.click(box["x"] + box["width"] * 7 / 8, box["y"] + box["height"] / 4)
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 3')")
    assert opened.input_value("#head") == "3"


def test_keyboard_alone(opened):
    opened.focus("#layer")
    opened.keyboard.press("ArrowDown")
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 0')")
    opened.focus("#map")
    opened.keyboard.press("ArrowRight")
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 1')")
    opened.focus("#theme")
    opened.keyboard.press("Enter")
    assert opened.get_attribute("#theme", "aria-pressed") == "true"


def test_dark_and_narrow(opened, shots):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(colour)
    opened.click("#theme")
    assert opened.evaluate(colour) != light
    scroll_through(opened)
    opened.set_viewport_size({"width": 360, "height": 740})
    opened.wait_for_timeout(500)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    assert opened.locator("#map").bounding_box()["width"] <= 360
    opened.screenshot(path=shots / "phone-dark.png", full_page=True)


def test_hostile_text_is_shown_as_text(opened):
    assert opened.text_content("#name") == "<b onclick=alert(3)>tiny"
    assert "<script>alert(1)</script>" in opened.text_content("#text")
    assert opened.locator("#text script, #text img, main b").count() == 0
    opened.locator("#true").scroll_into_view_if_needed()
    opened.wait_for_selector("#true .nsewdrag")
    spot = opened.locator("#true .nsewdrag").bounding_box()
    # The last query on an early key: the label beside the mouse quotes both tokens.
    opened.mouse.move(spot["x"] + spot["width"] * 2.5 / 28, spot["y"] + spot["height"] * 27.5 / 28)
    opened.wait_for_selector("#true .hovertext")
    assert '→ " <"' in opened.text_content("#true .hoverlayer")
    assert opened.locator("script").count() == 3


def test_side_by_side_with_learning(browser, beside, multihop_study, shots, tmp_path):
    report, _ = beside
    learned = [curves(multihop_study)]
    path = replace(report, data={**report.data, "learning": learned}).write(tmp_path / "beside.html")
    with opening(browser, path) as page:
        scroll_through(page)
        for chart in ("map-0", "map-1", "map-2", "plane-0", "plane-1", "plane-2", "dynamics"):
            assert page.locator(f"#{chart} svg.main-svg").count() > 0, chart
        spans = page.evaluate("[0, 1, 2].map((i) => document.getElementById(`map-${i}`)._fullData[0].zmax)")
        assert len(set(spans)) == 1
        page.select_option("#model", "2")
        assert "is a gpt2 model" in page.text_content("#about")
        assert page.text_content("#distance-note") == "Not measured for this model."
        assert page.locator("#band-scores").is_hidden()
        page.select_option("#model", "0")
        assert page.locator("#band-scores").is_visible()
        scroll_through(page)
        page.screenshot(path=shots / "side-by-side.png", full_page=True)


def test_scatter_comes_back_with_the_model_that_has_it(browser, beside, tmp_path):
    """Hidden charts are never near the reader, so hiding must not wait for drawing."""
    first, *others = beside[0].data["models"]
    data = {**beside[0].data, "models": [{**first, "swaps": None}, *others]}
    with opening(browser, replace(beside[0], data=data).write(tmp_path / "page.html")) as page:
        scroll_through(page)
        assert page.locator("#scatter").is_hidden()
        assert page.text_content("#plane-note") == "Not measured for this model."
        page.select_option("#model", "1")
        page.locator("#scatter").scroll_into_view_if_needed()
        page.wait_for_selector("#scatter svg.main-svg")
        assert page.text_content("#plane-note").startswith("Bottom right")
        page.select_option("#model", "0")
        assert page.locator("#scatter").is_hidden()


def test_no_numbers_of_heads_are_a_sentence(browser, beside, tmp_path):
    first, second, *_ = beside[0].data["models"]
    data = {**beside[0].data, "models": [{**first, "metrics": []}, second]}
    with opening(browser, replace(beside[0], data=data).write(tmp_path / "page.html")) as page:
        assert "for all of these models" in page.text_content("#unshared")
        assert page.locator("#shared").is_hidden()
        assert page.text_content("#reading").startswith("No number of single heads")
        scroll_through(page)
        page.select_option("#layer", "1")
        assert page.text_content("#h-panel") == "Layer 1, head 0"
        page.select_option("#model", "1")
        page.locator("#map").scroll_into_view_if_needed()
        page.wait_for_selector("#map svg.main-svg")
        assert "Control" in page.text_content("#reading")
        page.select_option("#model", "0")
        page.select_option("#layer", "0")
        assert page.locator("#map").is_hidden()


def test_one_is_no_plural_and_no_moment_comes_twice(browser, made, multihop_study, tmp_path):
    learned, (model,) = curves(multihop_study), made.report.data["models"]
    few = {**learned, "table": {**learned["table"], "rows": learned["table"]["rows"][:2]}}
    one = {**model, "model": {**model["model"], "layers": [0], "heads": [1], "kv_heads": [1]}}
    data = {**made.report.data, "models": [one], "learning": [few], "command": None}
    with opening(browser, replace(made.report, data=data).write(tmp_path / "page.html")) as page:
        assert "1 layer of 1 attention head (1 key head)" in page.text_content("#about")
        assert page.text_content("#learning-note") == learned["note"]
        assert page.locator("#learning-table tbody tr").count() == 2
        assert page.locator("#no-command").is_visible()
        assert page.locator("#command").is_hidden()
