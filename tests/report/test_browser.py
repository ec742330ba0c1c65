"""End-to-end: what a reader of a page does first, in a real browser, offline.

Skips where there is no playwright or no Chromium. Everything else on the page is tested by ``test_page.py`` and
``test_comparison_browser.py``. Screenshots go to the folder named by WHEREWHAT_SCREENSHOTS, else to pytest's temporary
folder.
"""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from helpers.report import CHARTS, LINK, PANEL, TOKENS, downloaded, drawn, opening, unpacked, until
from helpers.runs import finished
from wherewhat.report.page import comparison_page
from wherewhat.runs.comparison import compare

pytestmark = pytest.mark.browser

FRAGMENTS = (
    "heads?document=99&head=L99H99&metric=__proto__&weights=constructor&label=<b>,toString&view=__proto__&theme=<b>&model=x",
    "<img src=x onerror=alert(1)>?search=<img src=x onerror=alert(1)>&head=%E0%A4%A",
    "heads?document=<b>&head=L0H-1&metric=%&label=%00&search=" + "A" * 9999,
    "?????&&&===",
)

GO_TO = """(to) => new Promise((done) => {
    addEventListener("hashchange", () => requestAnimationFrame(() => setTimeout(done, 0)), { once: true });
    location.hash = to;
})"""


@pytest.fixture
def opened(browser, made):
    """The page of one model; it is opened offline, and an error on its console fails the test."""
    with opening(browser, made.path) as page:
        yield page


def three_digits(value):
    """A number as the page writes it."""
    return f"{value:.3f}" if round(value, 3) else "0.000"


def test_it_opens_offline_with_numbers_map_and_charts(opened, made, shots):
    (model,) = made.report.data["models"]
    cards = opened.locator("#numbers > li").all_text_contents()
    assert len(cards) == len(model["numbers"]) == 5
    for number, card in zip(model["numbers"], cards, strict=True):
        assert card.startswith(number["title"])
        assert "On 2 documents of 28 tokens" in card
        assert number["price"] in card
        for value in number["values"]:
            count, *share = value["words"].split("; ")  # a number of heads comes before those of single documents
            assert "; ".join([f"{count} {value['name']}", *share]) in card
    assert opened.locator("#length-cost svg.main-svg").count() == 0  # charts wait until the reader comes near
    drawn(opened, *CHARTS)
    assert opened.evaluate("document.getElementById('map').data[0].z.flat().length") == 8
    links = opened.eval_on_selector_all("#contents a", "(links) => links.map((link) => link.getAttribute('href'))")
    others = [link for link in links if link.startswith("#measured-")]
    assert others == [f"#measured-{other['name']}" for other in model["others"]]
    assert len(links) - len(others) == opened.locator("main > section:visible").count() >= 6
    assert [opened.locator(link).count() for link in links] == [1] * len(links)
    opened.screenshot(path=shots / "desktop.png")


def test_a_chosen_head_has_a_panel_with_its_own_numbers(opened, made):
    (model,) = made.report.data["models"]
    opened.select_option("#layer", "1")
    opened.select_option("#head", "2")
    assert opened.text_content("#h-panel") == "Layer 1, head 2"
    assert opened.text_content("#table-of-heads [aria-selected=true] th") == "L1H2"
    swaps, record = model["swaps"], model["records"][1][2]
    label = opened.text_content("#label")
    assert label.startswith(f"Label over all documents: {swaps['codes'][int(swaps['label'][1][2])]}, because ")
    assert "2 of 2 documents alone give the same label." in label
    assert f"Positional {three_digits(swaps['s_pos'][1][2])} " in label
    opened.click("#all-numbers summary")
    opened.wait_for_selector("#numbers-of-head tbody tr")
    cells = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows = opened.eval_on_selector_all("#numbers-of-head tbody tr", cells)
    for (title, *shown), metric in zip(rows, model["metrics"], strict=True):
        assert title == metric["title"]
        for weights, text in zip(("trained", "random", "shuffled"), shown, strict=True):
            value = metric["values"][weights][1][2] if weights in metric["values"] else ""
            assert text in ("", "undefined") if value in ("", None) else float(text) == value, (title, weights)
    _, text = downloaded(opened, ".charted:has(> #matrix) button:text-is('CSV')")
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    queries, keys = np.tril_indices(TOKENS)
    assert [(int(line["query"]), int(line["key"])) for line in lines] == list(zip(queries, keys, strict=True))
    matrix = np.array([float(line["pattern"]) for line in lines])
    logits = unpacked(record["documents"][0]["map"])
    np.testing.assert_allclose(np.bincount(queries, matrix), 1, rtol=1e-12)
    expected = np.exp(logits) / np.bincount(queries, np.exp(logits))[queries]
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    drawn(opened, *PANEL)
    middle = "document.getElementById('curve').data.find((line) => line.name?.startsWith('mean')).y"
    np.testing.assert_allclose(opened.evaluate(middle), unpacked(record["mean"]), rtol=1e-12, atol=1e-12)
    drawn(opened, "map")
    box = opened.locator("#map .nsewdrag").bounding_box()
    opened.mouse.click(box["x"] + box["width"] * 7 / 8, box["y"] + box["height"] / 4)
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 3')")
    assert opened.input_value("#head") == "3"


def test_another_metric_or_other_weights_change_the_map(opened, made):
    (model,) = made.report.data["models"]
    metrics = {metric["id"]: metric for metric in model["metrics"]}
    drawn(opened, "map", "range")
    opened.click("#more-metrics")
    shown = "document.getElementById('map').data[0].z"
    span = "[document.getElementById('map').data[0].zmin, document.getElementById('map').data[0].zmax]"
    for name in ("r", "s_sym"):
        values = metrics[name]["values"]
        own = sorted(x for layer in values["trained"] for x in layer)
        opened.select_option("#metric", label=metrics[name]["title"])
        assert metrics[name]["reading"] in opened.text_content("#reading")
        for weights in ("random", "trained"):
            opened.select_option("#weights", weights)
            until(opened, f"JSON.stringify({shown}) === JSON.stringify({json.dumps(values[weights])})")
            assert opened.evaluate(span) == [own[0], own[-1]]  # the model's own range, whatever is shown
        notes = opened.evaluate("document.getElementById('range').layout.annotations.map((note) => note.text)")
        assert notes[0].startswith(f"<b>trained</b>: {three_digits(own[0])} to {three_digits(own[-1])}, median ")


def test_labels_of_both_versions(opened, made):
    """Without the sink first; the labels of the papers, over all keys, on request, and in the address."""
    (model,) = made.report.data["models"]
    chips = "[...document.querySelectorAll('#chips button')].map((chip) => chip.textContent)"
    codes = model["swaps"]["codes"]

    def counts(swaps):
        found = [codes[int(code)] for layer in swaps["label"] for code in layer]
        roles = [role for layer in model["roles"]["heads"]["trained"] for head in layer for role in head["roles"]]
        patterns = [f"{name} {roles.count(name)}" for name in model["roles"]["patterns"]]
        return [*patterns, *(f"{name} {found.count(name)}" for name in swaps["labels"])]

    assert opened.evaluate(chips) == counts(model["swaps"])
    assert "over the keys after the first token." in opened.text_content("#label")
    opened.select_option("#keys", "all")
    assert opened.evaluate(chips) == counts(model["swaps"]["all_keys"])
    assert "over all keys." in opened.text_content("#label")
    assert "Scores are over all keys" in opened.text_content("#plane-note")
    until(opened, "location.hash.includes('keys=all')")
    opened.evaluate("location.hash = '#heads?label=sink'")
    until(opened, "document.querySelector('#keys').value === ''")
    assert opened.get_attribute("#chips button:has-text('sink')", "aria-pressed") == "true"


def test_hostile_text_and_hostile_links_are_not_executed(opened, browser, made):
    """A dialog or an error on the console fails the test, see ``opening``."""
    assert opened.text_content("#name") == "<b onclick=alert(3)>tiny"
    assert "<script>alert(1)</script>" in opened.text_content("#text")
    heading = opened.text_content("#h-panel")
    for fragment in FRAGMENTS:
        opened.evaluate(GO_TO, fragment)
        assert opened.text_content("#h-panel") == heading, fragment
        assert len(opened.input_value("#search")) <= 100
        with opening(browser, made.path, fragment) as page:
            assert page.text_content("#h-panel") == heading, fragment
    assert opened.locator("main img, main b, main i, main script").count() == 0
    assert opened.locator("script").count() == 4


def test_models_side_by_side_and_a_page_of_many_runs(browser, tuned, tmp_path):
    report, path = tuned
    with opening(browser, path) as page:
        assert page.locator("#side-by-side tbody tr").count() == len(report.data["comparison"]["numbers"])
        assert "paired, 2 documents" in page.text_content("#side-by-side")
        drawn(page, "map-0", "map-1", "ranks", "pair-0")
        for metric in ("r", "unique_c"):
            page.select_option("#shared-metric", metric)
            found = report.data["comparison"]["pairs"][0]["metrics"][metric]
            correlation = three_digits(found["correlation"])
            assert f"Correlation over 8 heads: {correlation}" in page.text_content("#pair-note-0")
            most = found["changed"][0]
            assert page.text_content("#pair-table-0 tbody th") == f"L{most['layer']}H{most['head']}"
        page.select_option("#model", "1")
        assert "\u2068<i>tuned\u2069 is a llama model" in page.text_content("#about")
        assert page.locator("main b, main i, svg a").count() == 0
    pytest.importorskip("polars")
    for step in ("step1", "step10"):
        for model in (LINK, "other"):
            finished(tmp_path / "store", {"a": 0.5, "b": 0.6}, model=model, metric="<b>r", extra={"checkpoint": step})
    path = tmp_path / "page.html"
    path.write_text(comparison_page(compare([tmp_path / "store"], metrics=["<b>r"])))
    with opening(browser, path) as page:
        drawn(page, "plot-0")
        assert LINK in page.text_content("#plot-0")
        assert "<b>r" in page.text_content("#plot-0 .ytitle")
        assert LINK in page.text_content("#sections table")
        assert page.locator("main a, main b, svg a").count() == 0
