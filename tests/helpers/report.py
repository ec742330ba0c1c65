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

from wherewhat.report.page import Report

HOSTILE = (
    "the cat <script>alert(1)</script> sat </script><img src=x onerror=alert(2)> on a {{DATA}} mat & dog "
    "🐈‍⬛ שלום \u202eran\u202c \u200bthe\u200d \u2028 cat \u2029 &lt;b&gt; <!-- a \\ ' \" `${1}` ]]> "
)
TOKENS = 28


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


_idle: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Empty tabs by browser: one that has compiled the scripts of a page opens the next page in a quarter of the time."""


@contextmanager
def opening(browser, path, fragment="", *, width=1280, new_tab=False):
    """A page, ready, with everything it said or asked for; nothing may be left of it at the end."""
    page = None if new_tab else _idle.pop(browser, None)
    if page is None:
        page = browser.new_context(offline=True).new_page()
        page.set_default_timeout(20_000)
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
    if new_tab or browser in _idle:
        page.context.close()
    else:
        page.goto("about:blank")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        _idle[browser] = page
    assert said == []
    assert [url.partition("#")[0] for url in asked if not url.startswith("data:")] == [path.as_uri()]


def photograph(page, selector, path):
    """Write a picture of an element; of its visible part only, which is much faster, unless screenshots are kept."""
    element = page.locator(selector)
    if os.environ.get("WHEREWHAT_SCREENSHOTS"):
        element.screenshot(path=path)
    else:
        element.scroll_into_view_if_needed()
        page.screenshot(path=path)
