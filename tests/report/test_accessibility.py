"""End-to-end: pages in Chromium, checked by axe-core, which runs inside the page without a network."""

from __future__ import annotations

import pytest

from helpers.report import opening, until

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def axe():
    sync = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    return sync.Axe()


def draw(page, *, width: int) -> None:
    """Open everything on the page, and draw all of its figures, as before printing."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    is_drawn = "(one) => !one.checkVisibility() || one.querySelector('svg')"
    until(page, f"[...document.querySelectorAll('main .chart')].every({is_drawn})")


def violations(axe, page) -> list[str]:
    """Rules that the page breaks as it is shown."""
    found = axe.run(page, options={"resultTypes": ["violations"]}).response
    assert len(found["passes"]) > 30, "axe-core checked too little to be trusted"
    return [f"{one['impact']}: {one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]


@pytest.mark.parametrize(("width", "schemes"), [(1280, ("light", "dark")), (390, ("light",))])
@pytest.mark.parametrize("name", ["made", "told", "beside", "tuned"])
def test_pages_break_no_rule(axe, browser, request, name, width, schemes):
    made = request.getfixturevalue(name)
    with opening(browser, made.path if name == "made" else made[1]) as page:
        draw(page, width=width)
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            assert violations(axe, page) == [], scheme


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
        draw(page, width=1280)
        found = violations(axe, page)
    assert {line.split(": ")[1] for line in found} == {"image-alt", "color-contrast"}
