"""End-to-end: the page of attention on texts, in a real browser, offline, with hostile texts."""

from __future__ import annotations

import csv
import io
import json

import pytest

import wherewhat
from helpers.report import HOSTILE, downloaded, opening, until
from wherewhat.text.documents import Document

pytestmark = pytest.mark.browser

TEXTS = [Document("<b>first", HOSTILE), Document("second", "the cat sat on a mat and the dog ran")]


@pytest.fixture(scope="module")
def view(speller):
    result = wherewhat.measure("heads", str(speller), texts=[HOSTILE], queries=2, tokens=64)
    return wherewhat.show(str(speller), TEXTS, head="L1H2", heads=result)


@pytest.fixture(scope="module")
def path(view, tmp_path_factory):
    return view.save(tmp_path_factory.mktemp("attention") / "page.html")


@pytest.fixture
def opened(browser, path):
    with opening(browser, path) as page:
        yield page


def percent(x):
    return f"{100 * float(x):.0f} %"


def test_it_opens_with_the_head_its_portrait_and_the_text(opened, view, shots):
    assert opened.text_content("#h-panel") == "Layer 1, head 2"
    assert opened.text_content("#portrait") == view.portraits.sentences[1, 2]
    assert opened.text_content("#source") == view.portraits.source
    tokens = view.passages["<b>first"].tokens
    assert opened.eval_on_selector_all("#text span", "(spans) => spans.map((span) => span.textContent)") == tokens
    options = opened.eval_on_selector_all("#document option", "(options) => options.map((x) => x.textContent)")
    assert options == ["<b>first", "second"]
    assert "the first" in opened.text_content("#view-note")
    opened.screenshot(path=shots / "attention.png", full_page=True)
    opened.click("#theme")
    assert opened.evaluate("document.documentElement.classList.contains('dark')")
    opened.screenshot(path=shots / "attention-dark.png", full_page=True)


def test_every_head_can_be_chosen(opened, view):
    for layer, heads in view.heads.items():
        opened.select_option("#layer", str(layer))
        for head in range(heads):
            opened.select_option("#head", str(head))
            assert opened.text_content("#h-panel") == f"Layer {layer}, head {head}"
            assert opened.text_content("#portrait") == view.portraits.sentences[layer, head]
    side = opened.locator("#thumbnails").bounding_box()["width"] / len(view.heads)
    opened.locator("#thumbnails").click(position={"x": side * 0.5, "y": side * 3.5})
    assert opened.text_content("#h-panel") == "Layer 0, head 3"
    opened.locator("#thumbnails").hover(position={"x": side * 1.5, "y": side * 0.5})
    assert opened.text_content("#thumbnail-note") == f"L1H0. {view.portraits.sentences[1, 0]}"


def test_a_pointed_cell_and_token_show_their_attention(opened, view):
    opened.select_option("#document", "1")
    tokens, weights = view.passages["second"].tokens, view.pattern(1, 2, "second")
    box = opened.locator("#matrix").bounding_box()
    size = (box["width"] - 88) / len(tokens), (box["height"] - 88) / len(tokens)
    query, key = 20, 7
    opened.locator("#matrix").hover(position={"x": 84 + (key + 0.5) * size[0], "y": 4 + (query + 0.5) * size[1]})
    named = [json.dumps(tokens[i]) for i in (query, key)]
    assert opened.text_content("#cell") == (
        f"{named[0]} → {named[1]}, distance {query - key}: {float(weights[query, key]):.3f}"
    )
    opened.hover(f"#text span:nth-child({query + 1})")
    titles = opened.eval_on_selector_all("#text span", "(spans) => spans.map((span) => span.title)")
    expected = [weights[query, i] if i <= query else weights[i, query] for i in range(len(tokens))]
    # Stored logits have 65535 steps, so that a share may round to the next percent.
    for title, share in zip(titles, expected, strict=True):
        assert title in {percent(share - 1e-3), percent(share), percent(share + 1e-3)}
    opened.click(f"#text span:nth-child({query + 1})")
    opened.hover("#name")
    assert opened.text_content("#cell").startswith(f"{named[0]} gives ")


def test_keys_choose_heads_cells_and_tokens(opened):
    opened.focus("#thumbnails")
    for key, head in (
        ("ArrowLeft", "Layer 0, head 2"),
        ("ArrowUp", "Layer 0, head 1"),
        ("ArrowRight", "Layer 1, head 1"),
    ):
        opened.keyboard.press(key)
        assert opened.text_content("#h-panel") == head
    opened.focus("#matrix")
    opened.keyboard.press("ArrowRight")
    assert "→" in opened.text_content("#cell")
    opened.focus("#text")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("Enter")
    assert opened.locator("#text .query").count() == 1
    opened.keyboard.press("Escape")
    assert opened.text_content("#cell") == "Point at a cell or at a token of the text."


def test_numbers_can_be_downloaded(opened, view):
    name, content = downloaded(opened, ".downloads button")
    assert name.endswith("matrix-L1H2.csv")
    _, *rows = csv.reader(io.StringIO(content))
    weights = view.pattern(1, 2)
    assert len(rows) == len(weights) * (len(weights) + 1) // 2
    assert opened.locator(".downloads button").count() == 1  # pictures need plotly.js, which the page leaves out


def test_a_link_opens_its_view(browser, path):
    with opening(browser, path, "?head=L0H1&document=2&view=logits&theme=dark") as page:
        assert page.text_content("#h-panel") == "Layer 0, head 1"
        assert [page.input_value(f"#{name}") for name in ("document", "view")] == ["1", "logits"]
    for fragment in (
        "L0H3",
        "?head=L99H99&document=99&view=__proto__&label=<b>",
        "<img src=x onerror=alert(1)>?????&&&===",
    ):
        with opening(browser, path, fragment) as page:
            assert page.text_content("#h-panel") == ("Layer 0, head 3" if fragment == "L0H3" else "Layer 1, head 2")


def test_a_notebook_shows_it_in_a_frame_that_reaches_nothing_else(browser, view, tmp_path):
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><title>notebook</title><p id=name>{'mine'}</p>{view._repr_html_()}", "utf-8")
    page = browser.new_context(offline=True).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready=true]").wait_for(state="attached")
    frame.locator("#layer").select_option("0")
    assert frame.locator("#h-panel").text_content() == "Layer 0, head 2"
    frame.locator("#text span").nth(5).hover()
    assert "gives" in frame.locator("#cell").text_content()
    assert page.text_content("#name") == "mine"
    page.wait_for_timeout(300)  # the address is saved after a pause, which a frame may refuse
    page.context.close()
    assert said == []


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window(browser, path, width, shots):
    with opening(browser, path, width=width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=shots / f"attention-{width}.png", full_page=True)


def test_a_report_switches_to_repeated_random_tokens(browser, made):
    with opening(browser, made.path) as page:
        page.select_option("#document", label="repeated random tokens")
        assert page.text_content("#view-note").endswith("tokens of \u2068repeated random tokens\u2069.")
        views = page.eval_on_selector_all("#view option", "(options) => options.map((x) => x.value)")
        assert views == ["pattern", "logits"]  # the logits were fitted on the documents
        page.locator("#curve").scroll_into_view_if_needed()
        until(page, "document.querySelector('#curve svg.main-svg') !== null")
        assert "c = " not in (page.get_attribute("#text span", "title") or "")
        page.select_option("#document", "0")
        assert page.locator("#view option").count() == 6
