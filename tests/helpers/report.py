"""A text that tries to break out of the page, its report, and a browser's view of it."""

from __future__ import annotations

import base64
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@contextmanager
def opening(browser, path):
    """A page, ready, with everything it said or asked for; nothing may be left of it at the end."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light", offline=True)
    page = context.new_page()
    page.set_default_timeout(20_000)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    yield page
    context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
