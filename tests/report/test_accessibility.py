"""End-to-end: pages in Chromium, checked by axe-core, which runs inside the page without a network."""

from __future__ import annotations

import pytest

from helpers.report import opening

pytestmark = pytest.mark.browser

_LOOKS = [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]


@pytest.fixture(scope="module")
def axe():
    sync = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    return sync.Axe()


def violations(axe, page, *, scheme: str, width: int) -> list[str]:
    """Rules that the page breaks once everything on it is open and drawn."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for top in range(0, page.evaluate("document.body.scrollHeight"), 600):
        page.evaluate("(top) => scrollTo(0, top)", top)
        page.wait_for_timeout(30)
    found = axe.run(page).response
    assert len(found["passes"]) > 30, "axe-core checked too little to be trusted"
    return [f"{one['impact']}: {one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]


@pytest.mark.parametrize(("scheme", "width"), _LOOKS, ids=str)
@pytest.mark.parametrize("name", ["made", "beside", "tuned"])
def test_pages_break_no_rule(axe, browser, request, name, scheme, width):
    made = request.getfixturevalue(name)
    with opening(browser, made.path if name == "made" else made[1]) as page:
        assert violations(axe, page, scheme=scheme, width=width) == []


def test_a_rule_that_is_broken_is_found(axe, browser, made):
    """Positive control: a picture without a description, and text that can hardly be read."""
    with opening(browser, made.path) as page:
        page.evaluate(
            """() => {
                const image = document.createElement("img");
                image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
                const text = document.createElement("p");
                text.textContent = "hardly readable";
                text.style.color = "#eeeeee";
                document.querySelector("main section:not([hidden])").append(image, text);
            }"""
        )
        found = violations(axe, page, scheme="light", width=1280)
    assert {line.split(": ")[1] for line in found} == {"image-alt", "color-contrast"}
