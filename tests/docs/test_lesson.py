"""Brute force and end-to-end: the live pictures of the lesson say what Python computes from their data."""

from __future__ import annotations

import cmath
import json
import re

import pytest

from helpers.pages import ROOT

LESSON = ROOT / "docs" / "lesson"
DATA = json.loads((LESSON / "lesson.json").read_text("utf-8"))


def contribution(head, query, key, plane, distance):
    q, k = complex(*head["q"][query][plane]), complex(*head["k"][key][plane])
    return (q * k.conjugate() * cmath.exp(1j * DATA["theta"][plane] * distance)).real


def logit(head, query, key):
    return sum(contribution(head, query, key, plane, query - key) for plane in range(len(DATA["theta"])))


def numbers(text):
    return [float(number.replace("−", "-")) for number in re.findall(r"[−-]?\d+\.\d\d", text)]


@pytest.fixture(scope="module")
def lesson_page(tmp_path_factory):
    """The page's pictures with their script, data and style, without the theme."""
    marks = re.findall(r'<div class="lesson".*?</div>', (ROOT / "docs" / "lesson.md").read_text("utf-8"))
    assert len(marks) == 3
    style = (ROOT / "docs" / "stylesheets" / "site.css").read_text("utf-8")
    data = (LESSON / "lesson.json").read_text("utf-8")
    script = (LESSON / "lesson.js").read_text("utf-8")
    path = tmp_path_factory.mktemp("lesson") / "lesson.html"
    path.write_text(
        f'<!doctype html><html lang="en"><title>Lesson</title><meta charset="utf-8"><style>{style}</style><main>'
        f'{"".join(marks)}</main><script type="application/json" id="lesson-data">{data}</script>'
        f"<script>{script}</script>",
        "utf-8",
    )
    return path


@pytest.fixture
def page(browser, lesson_page):
    opened = browser.new_page(viewport={"width": 390, "height": 800})
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(lesson_page.as_uri())
    yield opened
    assert errors == []
    opened.close()


def test_the_data_are_small():
    assert (LESSON / "lesson.json").stat().st_size <= 200_000
    assert all(len(head["a"]) == DATA["tokens"] for head in DATA["heads"])


@pytest.mark.browser
def test_sentences_have_the_numbers_of_the_data(page):
    for place, head in enumerate(DATA["heads"]):
        page.select_option(".lesson[data-picture=plane] select", str(place))
        one, total, parts = page.locator(".lesson > p").all_text_contents()
        assert numbers(one)[-1] == pytest.approx(contribution(head, 23, 15, 4, 6), abs=0.006)
        where, query, key = head["a"][8], head["b"][23], head["c"][15]
        whole = logit(head, 23, 15)
        expected = [where, query, key, whole - where - query - key, whole, head["r"], head["noise"]]
        assert numbers(parts) == pytest.approx(expected, abs=0.006)
        assert -1 <= numbers(total)[-1] <= 1


@pytest.mark.browser
def test_pictures_are_used_by_keyboard_and_fit_a_phone(page):
    slider = page.get_by_role("slider", name="Distance")
    slider.focus()
    before = page.locator(".lesson > p").first.text_content()
    page.keyboard.press("ArrowRight")
    assert "At distance 7 " in page.locator(".lesson > p").first.text_content() != before
    page.get_by_role("slider", name="Query").focus()
    page.keyboard.press("Home")
    assert "0 tokens back" in page.locator(".lesson > p").last.text_content()  # the key is never after the query
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("svg[role=img][aria-label]").count() == 3


@pytest.mark.browser
def test_a_click_on_a_logit_chooses_it(page):
    page.locator(".lesson[data-picture=logit] rect.lesson-less, .lesson[data-picture=logit] rect.lesson-more").nth(
        4
    ).click(force=True)
    assert "query “all”, key “nearly”" in page.locator(".lesson > p").last.text_content()


@pytest.mark.slow
def test_the_data_are_those_of_the_model(smollm2):
    """The script writes the same numbers again, to the rounding of sums in another order."""
    import lesson
    import wherewhat

    document = wherewhat.embedded_documents(1)[0]
    layers = wherewhat.attention(wherewhat.load("smollm2", device="cpu"), document, tokens=lesson.TOKENS)
    for stored, ((layer, head), note) in zip(DATA["heads"], lesson.HEADS.items(), strict=True):
        again = lesson.head_data(layers[layer], head, note)
        assert again["name"] == stored["name"]
        for name in ("a", "b", "c", "r"):
            assert again[name] == pytest.approx(stored[name], abs=2e-2), name
