"""End-to-end: every part of a page in a real browser, offline. Skips where there is no playwright or no Chromium.

What a reader does first is tested by ``test_browser.py``.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest

from helpers.capture import tiny, tokens
from helpers.report import CHARTS, PANEL, downloaded, drawn, opening, photograph, until
from wherewhat.report.learning import training_curves
from wherewhat.runs.training import TrainingRecorder
from wherewhat_lab.multihop.learning import curves

pytestmark = [pytest.mark.slow, pytest.mark.browser]

BELOW_CONTENTS = (
    "document.getElementById('{}').getBoundingClientRect().top - "
    "document.querySelector('main > nav').getBoundingClientRect().bottom"
)
"""Pixels between the contents, which stay in sight, and an element."""


@pytest.fixture
def opened(browser, made):
    """The page of one model."""
    with opening(browser, made.path) as page:
        yield page


def test_keyboard_alone(opened):
    opened.select_option("#layer", "0")
    opened.select_option("#head", "0")
    opened.focus("#layer")
    opened.keyboard.press("ArrowDown")
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 0')")
    opened.focus("#map")
    opened.keyboard.press("ArrowRight")
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 1')")
    opened.focus("#search")
    opened.keyboard.type("l0")
    opened.focus("#table-of-heads tbody tr")
    for key in ("Home", "ArrowDown", "ArrowDown", "Enter"):
        opened.keyboard.press(key)
    opened.wait_for_selector("#h-panel:text-is('Layer 0, head 2')")
    opened.focus("#theme")
    opened.keyboard.press("Enter")
    assert opened.get_attribute("#theme", "aria-pressed") == "true"


def test_dark_and_narrow(opened, shots):
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.evaluate(colour)
    opened.click("#theme")
    assert opened.evaluate(colour) != light
    drawn(opened, *CHARTS)
    opened.set_viewport_size({"width": 360, "height": 740})
    until(opened, "document.documentElement.scrollWidth <= 360")
    assert opened.locator("#map").bounding_box()["width"] <= 360
    opened.screenshot(path=shots / "phone-dark.png")


def test_a_link_opens_the_same_view(opened, browser, made):
    opened.select_option("#metric", label="symbolic score")
    opened.select_option("#weights", "random")
    opened.select_option("#layer", "1")
    opened.select_option("#head", "2")
    opened.select_option("#view", "residual")
    opened.select_option("#document", "1")
    opened.fill("#search", "L1")
    opened.click("#chips button:has-text('mixed')")
    opened.click("#theme")
    until(opened, "location.hash.includes('theme=dark')")
    with opening(browser, made.path, opened.url.split("#", 1)[1]) as same:
        for control in ("#metric", "#weights", "#layer", "#head", "#view", "#document", "#search"):
            assert same.input_value(control) == opened.input_value(control), control
        for place in ("#h-panel", "#shown", "#view-note"):
            assert same.text_content(place) == opened.text_content(place), place
        assert same.get_attribute("#theme", "aria-pressed") == "true"
        assert same.get_attribute("#chips button:has-text('mixed')", "aria-pressed") == "true"


def test_a_link_names_the_model_too(browser, beside):
    report, path = beside
    name = report.data["models"][2]["model"]["name"]
    link = f"heads?{urlencode({'model': name, 'head': 'L2H1', 'metric': 'r'})}"
    with opening(browser, path, link) as page:
        assert page.input_value("#model") == "2"
        assert page.text_content("#h-panel") == "Layer 2, head 1"
        assert "is a gpt2 model" in page.text_content("#about")
        page.select_option("#model", "0")
        until(page, "decodeURIComponent(location.hash).includes('model=<b')")


def test_findings_link_by_the_fragment_and_back_undoes_it(opened):
    before = opened.input_value("#metric"), opened.text_content("#shown")
    until(opened, "location.hash.includes('head=')")
    opened.evaluate("location.hash = '#heads?metric=unique_c&label=mixed'")
    until(opened, "document.querySelector('#metric').selectedOptions[0].text.includes('key')")
    assert opened.get_attribute("#chips button:has-text('mixed')", "aria-pressed") == "true"
    assert opened.evaluate(f"Math.abs({BELOW_CONTENTS.format('heads')})") < 10
    until(opened, "location.hash.includes('head=')")
    opened.go_back()
    until(opened, "document.querySelector('#chips [aria-pressed=true]') === null")
    assert (opened.input_value("#metric"), opened.text_content("#shown")) == before
    opened.evaluate("location.hash = '#length'")
    until(opened, "location.hash.startsWith('#length?')")
    assert opened.evaluate("scrollY") > 1000


def test_heads_are_found_by_search_label_and_order(opened):
    rows = "[...document.querySelectorAll('#table-of-heads tbody tr:not([hidden])')]"
    shown = f"{rows}.map((row) => row.cells[0].textContent)"
    heads = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    assert opened.evaluate(shown) == heads
    for text, found in {"L1H3": ["L1H3"], "1.3": ["L1H3"], "l0": heads[:4], "1": heads[4:], "9": [], "<b>": []}.items():
        opened.fill("#search", text)
        assert opened.evaluate(shown) == found, text
    covered = "document.getElementById('map').data[1].z.flat().filter((x) => x === 1).length"
    opened.fill("#search", "L1H3")
    opened.locator("#map").scroll_into_view_if_needed()
    until(opened, f"{covered} === 7")
    opened.fill("#search", "")
    label = opened.text_content("#table-of-heads tbody td")
    opened.click(f"#chips button:has-text('{label}')")
    assert set(opened.evaluate(f"{rows}.map((row) => row.cells[1].textContent)")) == {label}
    opened.click(f"#chips button:has-text('{label}')")
    values = f"{rows}.map((row) => row.cells[2].textContent)"
    header = opened.locator("#table-of-heads thead th").nth(2)
    for order, sign in (("descending", -1), ("ascending", 1)):
        header.locator("button").click()
        assert header.get_attribute("aria-sort") == order
        found = [float(value) for value in opened.evaluate(values)]
        assert found == sorted(found, key=lambda value: sign * value)
    opened.locator("#table-of-heads tbody tr", has_text="L1H1").click()
    assert opened.text_content("#h-panel") == "Layer 1, head 1"
    assert opened.text_content("#table-of-heads [aria-selected=true] th") == "L1H1"


def test_panel_is_beside_the_map_or_scrolled_to(opened):
    map_, panel = (opened.locator(place).bounding_box() for place in ("#map", "#panel"))
    assert panel["x"] > map_["x"] + map_["width"]
    opened.set_viewport_size({"width": 390, "height": 740})
    opened.locator("#table-of-heads tbody tr", has_text="L1H1").click()
    until(opened, f"Math.abs({BELOW_CONTENTS.format('panel')}) < 5")


def point_at(page, query, key):
    """Point at a cell of the matrix of 28 tokens, again if a chart that was drawn meanwhile moved the matrix."""
    for _ in range(200):
        spot = page.locator("#matrix").bounding_box()
        width, height = ((spot[name] - 88) / 28 for name in ("width", "height"))
        page.mouse.move(spot["x"] + 84 + width * (key + 0.5), spot["y"] + 4 + height * (query + 0.5))
        page.wait_for_timeout(50)
        if page.locator("#matrix").bounding_box() == spot and "→" in page.text_content("#cell"):
            return
    raise AssertionError("the matrix moves, or does not say what is pointed at")


def test_views_share_a_scale_and_text_in_downloads_is_text(opened, made):
    opened.locator("#matrix").scroll_into_view_if_needed()
    _, text = downloaded(opened, ".charted:has(> #matrix) button:text-is('CSV')")
    tokens = made.report.data["models"][0]["texts"][0]["tokens"]
    for line in csv.DictReader(io.StringIO(text, newline="")):
        for which in ("query", "key"):
            token = tokens[int(line[which])]
            assert json.loads(line[f"{which} token (JSON)"]) == token
            assert line[f"{which} token (JSON)"].startswith('"')  # no formula of a spreadsheet
    assert (opened.text_content("#scale-low"), opened.text_content("#scale-high")) == ("0", "1 (attention)")
    spans = set()
    for view in ("logits", "fit", "residual", "where", "what"):
        opened.select_option("#view", view)
        low, high = (opened.text_content(f"#scale-{end}") for end in ("low", "high"))
        assert low == f"-{high.removesuffix(' (logit)')}"
        spans.add(low)
    assert len(spans) == 1


def test_matrix_and_text_are_linked(opened):
    opened.locator("#matrix").scroll_into_view_if_needed()
    point_at(opened, 9, 3)
    at = "(name) => [...document.getElementById('text').children].findIndex((x) => x.classList.contains(name))"
    assert (opened.evaluate(at, "query"), opened.evaluate(at, "key")) == (9, 3)
    assert opened.locator("#marked-query").is_visible()
    assert "distance 6: " in opened.text_content("#cell")
    opened.focus("#matrix")
    opened.keyboard.press("ArrowRight")
    assert "distance 5: " in opened.text_content("#cell")
    opened.locator("#text span").nth(5).hover()
    assert (opened.evaluate(at, "query"), opened.evaluate(at, "key")) == (5, 5)  # its attention in both directions
    assert opened.locator("#marked-query").is_visible()
    assert opened.locator("#marked-key").is_visible()


def test_every_chart_can_be_downloaded(opened):
    drawn(opened, *CHARTS)
    for chart in (*CHARTS, "matrix"):
        opened.wait_for_timeout(300)  # Chromium refuses more than ten downloads in a row
        name, text = downloaded(opened, f".charted:has(> #{chart}) button:text-is('CSV')")
        head = r"-L\dH\d" if chart in (*PANEL, "matrix") else ""
        assert re.fullmatch(rf"b-onclick-alert-3-tiny-{chart}{head}\.csv", name)
        header, *lines = csv.reader(io.StringIO(text))
        assert lines, chart
        assert {len(line) for line in lines} == {len(header)}, chart
    name, text = downloaded(opened, ".charted:has(> #map) button:text-is('SVG')")
    assert name == "b-onclick-alert-3-tiny-map.svg"
    assert text.startswith("<svg")
    for chart in ("map", "curve", "matrix"):
        with opened.expect_download() as found:
            opened.locator(f".charted:has(> #{chart}) button:text-is('PNG')").click()
        assert re.fullmatch(rf"b-onclick-alert-3-tiny-{chart}(-L\dH\d)?\.png", found.value.suggested_filename)
        assert Path(found.value.path()).read_bytes().startswith(b"\x89PNG")
    name, text = downloaded(opened, "#download-heads")
    header, *lines = csv.reader(io.StringIO(text))
    assert len(lines) == 8
    assert {"layer", "head", "label", "s_pos", "unique_c", "sink_mass"} <= set(header)


def test_documents_of_the_panel(opened):
    """The chosen document changes matrix, text and its own curve; the mean curve stays."""
    opened.locator("#matrix").scroll_into_view_if_needed()
    assert "the first 28 tokens of \u2068<i>0\u2069." in opened.text_content("#view-note")
    drawn(opened, "curve")
    lines = "document.getElementById('curve').data.filter((line) => line.line.width !== 0).map((line) => line.name)"
    assert opened.evaluate(lines) == ["&lt;i&gt;0", "mean of 2 documents"]
    assert "Mean over 2 documents of 28 tokens with its 95 % interval" in opened.text_content("#curve-note")
    before = opened.text_content("#text")
    opened.select_option("#document", label="<i>1")
    assert "the first 24 tokens of \u2068<i>1\u2069." in opened.text_content("#view-note")
    assert before.startswith(opened.text_content("#text"))
    assert opened.locator("#text span").count() == 24
    until(opened, f"{lines}[0] === '&lt;i&gt;1'")
    assert opened.text_content("#curve-note").endswith("thin: <i>1 alone.")
    for view in ("pattern", "logits", "fit", "residual", "where", "what"):
        opened.select_option("#view", view)
        opened.wait_for_timeout(300)
        _, text = downloaded(opened, ".charted:has(> #matrix) button:text-is('CSV')")
        found = list(csv.DictReader(io.StringIO(text, newline="")))
        assert len(found) == 24 * 25 / 2
        assert all(line[view] for line in found)
    assert opened.locator("main i").count() == 0


def test_one_document_has_one_curve(browser, made, tmp_path):
    (model,) = made.report.data["models"]
    records = [
        [
            {name: x[:1] if name == "documents" else x for name, x in record.items() if name != "half"}
            for record in layer
        ]
        for layer in model["records"]
    ]
    sizes = {name: {**size, "documents": 1} for name, size in model["sizes"].items()}
    one = {**model, "records": records, "texts": model["texts"][:1], "sizes": sizes}
    data = {**made.report.data, "models": [one]}
    with opening(browser, replace(made.report, data=data).write(tmp_path / "page.html")) as page:
        drawn(page, "curve")
        assert page.evaluate("document.getElementById('curve').data.length") == 1
        assert page.text_content("#curve-note") == "Of one document of 28 tokens, <i>0."
        assert "one document of 28 tokens, 8 queries in each" in page.text_content("#place-note")
        assert page.is_disabled("#document")


def test_heads_like_this_one_are_nearest_and_open(opened, made):
    """Brute force over the same metrics."""
    opened.select_option("#layer", "1")
    opened.select_option("#head", "2")
    (model,) = made.report.data["models"]
    compared = ("s_pos_no_sink", "s_sym_no_sink", "r", "unique_a", "unique_c", "sink_mass", "entropy")
    grid = np.array([m["values"]["trained"] for m in model["metrics"] if m["id"] in compared], float).reshape(-1, 8)
    spread = grid.std(1)
    points = ((grid - grid.mean(1, keepdims=True))[spread > 0] / spread[spread > 0, None]).T
    away = np.sqrt(((points - points[6]) ** 2).mean(1))
    expected = [f"L{at // 4}H{at % 4}" for at in np.argsort(away, kind="stable") if at != 6][:5]
    links = opened.locator("#like a")
    assert links.all_text_contents() == expected
    assert f"head={expected[0]}" in links.first.get_attribute("href")
    links.first.click()
    layer, head = expected[0][1:].split("H")
    assert opened.text_content("#h-panel") == f"Layer {layer}, head {head}"
    assert "standard deviations over heads" in opened.text_content("#like-note")


def test_ten_metrics_come_first_and_all_heads_are_in_the_distribution(opened, made):
    (model,) = made.report.data["models"]
    groups = "[...document.querySelectorAll('#metric optgroup')].map((group) => group.label)"
    assert opened.evaluate(groups) == ["main metrics"]
    first = opened.locator("#metric option").all_text_contents()
    assert len(first) == 10
    assert first[0] == "r"
    opened.focus("#more-metrics")
    opened.keyboard.press("Enter")
    measured = list(dict.fromkeys(metric["group"] for metric in model["metrics"]))
    assert opened.evaluate(groups) == ["main metrics", *measured, "diagnostics"]
    titles = opened.locator("#metric option").all_text_contents()
    assert titles[:10] == first
    assert sorted(titles) == sorted(metric["title"] for metric in model["metrics"])
    assert "swaps computed" in titles[-11:]
    opened.click("#more-metrics")
    assert opened.locator("#metric option").count() == 10
    drawn(opened, "range")
    bars = "document.getElementById('range').data.map((bars) => [bars.name, bars.y.reduce((x, y) => x + y)])"
    assert opened.evaluate(bars) == [[name, 8] for name in model["metrics"][0]["values"]]


def test_terms_lead_to_their_definitions(opened, made):
    (model,) = made.report.data["models"]
    opened.click("#all-numbers summary")
    links = opened.eval_on_selector_all("a.term[href]", "(links) => links.map((link) => link.getAttribute('href'))")
    assert {"#term-r", "#term-r_behaviour", "#term-s_pos_no_sink", "#term-key-term", "#method-distance"} <= set(links)
    for link in set(links):
        assert opened.locator(link).count() == 1, link
    for term in model["terms"]:
        assert opened.text_content(f"[id='term-{term['id']}'] + dd") == term["reading"]
    opened.select_option("#head", "1")
    opened.click("#numbers a.term >> nth=0")
    until(opened, "Math.abs(document.getElementById('term-r_behaviour').getBoundingClientRect().top) < innerHeight")
    until(opened, "location.hash.startsWith('#term-r_behaviour?head=')")
    assert opened.input_value("#head") == "1"


def test_terms_that_were_not_measured_are_no_links(browser, beside):
    with opening(browser, beside[1]) as page:
        page.select_option("#model", "2")
        assert page.get_attribute("a[data-to=method-distance]", "href") is None
        page.select_option("#model", "0")
        assert page.get_attribute("a[data-to=method-distance]", "href") == "#method-distance"


def test_sizes_are_beside_the_numbers(opened):
    for card in opened.locator("#numbers > li").all_text_contents():
        assert "On 2 documents of 28 tokens" in card
    assert "2 documents of 28 tokens, 8 queries in each" in opened.text_content("#place-note")
    assert "2 documents of 28 tokens, 8 queries in each" in opened.text_content("#plane-note")
    assert "one document of 28 tokens" in opened.text_content("#planes-note")
    assert "one document of 28 tokens" in opened.text_content("#distance-note")
    assert "Mean over 2 documents of 28 tokens." in opened.text_content("#reading")
    assert "the text is longer" in opened.text_content("#length-note")
    assert "arXiv:2511.11579" in opened.text_content("#cite")


def test_long_tables_lay_out_what_is_near(browser, made, tmp_path):
    """1,024 heads: the table shows the chosen one, the end is reached by keys and by scrolling."""
    (model,) = made.report.data["models"]

    def grown(grid):
        return [[grid[layer % 2][head % 4] for head in range(32)] for layer in range(32)]

    metrics = [
        {**metric, "values": {weights: grown(grid) for weights, grid in metric["values"].items()}}
        for metric in model["metrics"]
    ]
    swaps = {k: grown(v) if isinstance(v, list) and isinstance(v[0], list) else v for k, v in model["swaps"].items()}
    big = {
        **model,
        "model": {**model["model"], "layers": list(range(32)), "heads": [32] * 32},
        "records": grown(model["records"]),
        "turns": [model["turns"][0]] * 32,
        "metrics": metrics,
        "swaps": swaps,
    }
    path = replace(made.report, data={**made.report.data, "models": [big]}).write(tmp_path / "page.html")
    lines = "[...document.querySelectorAll('#table-of-heads tbody tr:not([hidden])')]"
    laid = f"{lines}.map((row) => row.cells[0].textContent)"
    with opening(browser, path) as page:
        page.select_option("#layer", "20")
        page.select_option("#head", "5")
        assert "L20H5" in page.evaluate(laid)
        assert len(page.evaluate(laid)) <= 200
        page.focus("#table-of-heads [aria-selected=true]")
        page.keyboard.press("End")
        assert page.evaluate("document.activeElement.cells[0].textContent") == "L31H31"
        page.fill("#search", "")
        page.evaluate(
            "(() => { const t = document.getElementById('table-of-heads'); t.scrollTop = t.scrollHeight; })()"
        )
        until(page, f"{lines}.length > 50")
        page.fill("#search", "31")
        assert page.evaluate(laid) == [f"L31H{head}" for head in range(32)]
        assert page.text_content("#shown") == "32 of 1024 heads"


def test_hostile_tokens_are_quoted(opened):
    opened.locator("#matrix").scroll_into_view_if_needed()
    # The last query on an early key: the line above the matrix quotes both tokens.
    point_at(opened, 27, 2)
    assert '→ " <"' in opened.text_content("#cell")


def test_side_by_side_with_learning(browser, beside, multihop_study, shots, tmp_path):
    report, _ = beside
    watch = TrainingRecorder(tiny("llama"), tokens(16, batch=2), every=1, out=tmp_path, name="<b>recorded")
    watch(1)
    watch.finish()
    learned = [curves(multihop_study), *training_curves(tmp_path).values()]
    path = replace(report, data={**report.data, "learning": learned}).write(tmp_path / "beside.html")
    with opening(browser, path) as page:
        drawn(page, "map-0", "map-1", "map-2", "plane-0", "plane-1", "plane-2", "dynamics")
        panels = "Object.keys(document.getElementById('dynamics').layout).filter((key) => key.startsWith('yaxis'))"
        assert len(page.evaluate(panels)) == 3
        page.select_option("#study", "1")
        page.locator("#dynamics").scroll_into_view_if_needed()
        until(page, f"{panels}.length === 2")
        assert page.text_content("#learning-note") == learned[1]["note"]
        assert page.text_content("#learning-table tbody tr:last-child th") == "1"
        photograph(page, "#learning", shots / "learning.png")
        spans = page.evaluate("[0, 1, 2].map((i) => document.getElementById(`map-${i}`)._fullData[0].zmax)")
        assert len(set(spans)) == 1
        page.select_option("#model", "2")
        assert "is a gpt2 model" in page.text_content("#about")
        assert page.locator("#distance-part").is_hidden()  # the heading too
        assert page.locator("#bands-part").is_hidden()
        page.select_option("#model", "0")
        assert page.locator("#band-scores").is_visible()
        drawn(page, *CHARTS)
        page.screenshot(path=shots / "side-by-side.png")


def test_scatter_comes_back_with_the_model_that_has_it(browser, beside, tmp_path):
    """Hidden charts are never near the reader, so hiding must not wait for drawing."""
    first, *others = beside[0].data["models"]
    data = {**beside[0].data, "models": [{**first, "swaps": None}, *others]}
    with opening(browser, replace(beside[0], data=data).write(tmp_path / "page.html")) as page:
        drawn(page, "map", "length-cost")
        assert page.locator("#scatter").is_hidden()
        assert page.text_content("#plane-note") == "Not measured for this model."
        page.select_option("#model", "1")
        drawn(page, "scatter")
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
        drawn(page, "scatter", "length-cost")
        page.select_option("#layer", "1")
        assert page.text_content("#h-panel").startswith("Layer 1, head ")
        page.select_option("#model", "1")
        drawn(page, "map")
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
