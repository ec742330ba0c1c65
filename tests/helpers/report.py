"""A text that tries to break out of the page, its report, and a browser's view of it."""

from __future__ import annotations

import base64
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from wherewhat.measures.swaps import LABELS
from wherewhat.report.excerpt import ExcerptFile
from wherewhat.report.page import Report

HOSTILE = (
    "the cat <script>alert(1)</script> sat </script><img src=x onerror=alert(2)> on a {{DATA}} mat & dog "
    "🐈‍⬛ שלום \u202eran\u202c \u200bthe\u200d \u2028 cat \u2029 &lt;b&gt; <!-- a \\ ' \" `${1}` ]]> "
)
TOKENS = 28
LINK = '<a href="https://example.org">tiny</a> & co'

PANEL = ("curve", "planes", "place")
CURVES = ("distance", "drift", "band-scores", "band-losses", "perturb-all", "perturb-untouched")
CHARTS = ("map", "range", *PANEL, "scatter", *CURVES, "length-loss", "length-cost")


@dataclass(frozen=True)
class Made:
    report: Report
    path: Path
    out: Path
    text: Path


def unpacked(given):
    codes = np.frombuffer(base64.b64decode(given["data"]), "u1" if given["bits"] == 8 else "<u2").astype(float)
    top = 2 ** given["bits"] - 2
    return np.where(codes > top, np.nan, given["lo"] + (given["hi"] - given["lo"]) * codes / top)


def scores(*heads):
    """Scores of two layers of as many heads, from pairs of scores with a label."""
    half = len(heads) // 2
    grid = [heads[:half], heads[half:]]
    parts = {name: [[head[i] for head in layer] for layer in grid] for i, name in enumerate(("s_pos", "s_sym"))}
    labels = [[None if label is None else LABELS.index(label) for *_, label in layer] for layer in grid]
    return {**parts, "label": labels, "codes": list(LABELS)}


def excerpt_of_report(made):
    """The stored excerpt of the model of a report."""
    (folder,) = (path for path in made.out.glob("excerpt-*tiny-trained-*"))
    return ExcerptFile(folder, model="tiny").read()


_idle: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Empty tabs by browser: one that has compiled the scripts of a page opens the next page in a quarter of the time."""


@contextmanager
def opening(browser, path, fragment="", *, width=1280):
    """A page, ready, without a network; it may say nothing on the console, open no dialog and ask for no other file."""
    page = _idle.pop(browser, None)
    if page is None:
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(60_000)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="light")
    page.mouse.move(0, 0)
    said: list[str] = []
    asked: list[str] = []
    listeners = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "dialog": lambda dialog: (said.append(dialog.message), dialog.dismiss()),
        "request": lambda request: asked.append(request.url),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(f"{path.as_uri()}#{fragment}" if fragment else path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    yield page
    if browser in _idle:
        page.context.close()
    else:
        page.goto("about:blank")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        _idle[browser] = page
    assert said == []
    assert {url.partition("#")[0] for url in asked if not url.startswith("data:")} == {path.as_uri()}


def until(page, condition):
    """Wait for a condition; the page's policy forbids the browser driver's own way."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(condition)


def drawn(page, *charts):
    """Scroll to charts, which are drawn when the reader comes near them, and wait until they are."""
    for chart in charts:
        page.locator(f"#{chart}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{chart} svg.main-svg")


def downloaded(page, button):
    """Click and return the name and the text of the file that is saved."""
    with page.expect_download() as found:
        page.locator(button).click()
    return found.value.suggested_filename, Path(found.value.path()).read_text("utf-8")


def photograph(page, selector, path):
    """Write a picture of an element; of its visible part only, which is much faster, unless screenshots are kept."""
    element = page.locator(selector)
    if os.environ.get("WHEREWHAT_SCREENSHOTS"):
        element.screenshot(path=path)
    else:
        element.scroll_into_view_if_needed()
        page.screenshot(path=path)
