"""Pages: one HTML file with style, script, plotly.js and data, which opens offline."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from wherewhat.boundary import output_file
from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.imports import package_version
from wherewhat.report.data import Number, script_json

_SCRIPTS = (
    "tools",
    "charts",
    "downloads",
    "model",
    "side_by_side",
    "map",
    "heads",
    "matrix",
    "panel",
    "plane",
    "curves",
    "learning",
    "claims",
    "others",
    "method",
    "terms",
    "state",
    "start",
)
"""The page's script, a file for each section; later ones use what earlier ones define."""


@dataclass(frozen=True)
class Profiled:
    """One model of a report.

    Attributes:
        name: Its name in the report.
        findings: Sentences that its numbers support, strongest first.
        numbers: Its headline numbers.
        left_out: One line for each measurement or control model that is missing, with the reason.
    """

    name: str
    findings: list[str]
    numbers: list[Number]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A report that can be written.

    Attributes:
        name: File name without extension.
        data: Everything the page shows, as plain JSON.
        models: The models with their headline numbers.
        body: File in ``assets`` with its HTML.
        scripts: Names of its scripts in ``assets``.
    """

    name: str
    data: dict[str, Any]
    models: list[Profiled] = field(default_factory=list)
    body: str = "page.html"
    scripts: tuple[str, ...] = _SCRIPTS

    def html(self) -> str:
        """Return the page. Text of models and documents is in the data only; the script inserts it as text."""
        scripts = [asset(f"{name}.js") for name in self.scripts]
        body = asset(self.body).replace("{{VERSION}}", package_version("wherewhat") or "unknown")
        style = asset("page.css")
        return whole_page(title="wherewhat report", body=body, style=style, scripts=scripts, data=self.data)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically and return its path."""
        path = output_file(path, name="the page")
        content = self.html().encode("utf-8")
        make_folder(path.parent)
        write_file(path, content)
        return path


def result_page(data: dict[str, Any]) -> Report:
    """Return the page of one measurement, from :func:`wherewhat.report.sections.result_data`."""
    scripts = ("tools", "charts", "downloads", "others", "method", "result")
    return Report("result", data, body="result.html", scripts=scripts)


def asset(name: str) -> str:
    """Return the content of a file in ``assets``."""
    return (files("wherewhat.report") / "assets" / name).read_text("utf-8")


def whole_page(*, title: str, body: str, style: str, scripts: Iterable[str], data: Any) -> str:
    """Return a page in the common frame: shared and own style and script, plotly.js and data.

    Args:
        title: Title of the window.
        body: Its HTML.
        style: Its own CSS.
        scripts: Its own JavaScript; all files are put into one function, so that their names are local.
        data: Content of the element ``data``, as plain JSON.
    """
    code = "\n".join([asset("elements.js"), *scripts])
    parts = {
        "TITLE": title,
        "STYLE": asset("base.css") + style,
        "BODY": body,
        "PLOTLY": _in_script(plotly_js()),
        "DATA": script_json(data),
        "SCRIPT": _in_script(f'"use strict";\n(() => {{\n{code}\n}})();'),
    }
    # In one pass, so that marks inside the parts are left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], asset("frame.html"))


def _in_script(code: str) -> str:
    """Return code that cannot end its script element; a backslash before a slash changes no string."""
    return re.sub(r"</(?=script)", r"<\\/", code, flags=re.IGNORECASE)


def plotly_js() -> str:
    """Return the code of plotly.js; raise if plotly is not installed."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise ConfigError("the report needs the package 'plotly', which is not installed: pip install plotly") from None
    return str(offline.get_plotlyjs())
