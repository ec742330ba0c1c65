"""Data → one HTML file that opens offline."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.files import make_folder, write_file
from wherewhat.report.data import Number, script_json

_SCRIPTS = (
    "tools",
    "charts",
    "model",
    "comparing",
    "map",
    "panel",
    "plane",
    "curves",
    "learning",
    "others",
    "method",
    "start",
)
"""The page's script, a file for each section; later ones use what earlier ones define."""


@dataclass(frozen=True)
class Profiled:
    """One model of a report.

    Attributes:
        name: What it is called in it.
        numbers: The numbers its section begins with.
        left_out: One line for each measurement or control that it does not have.
    """

    name: str
    numbers: list[Number]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """A report that can be written.

    Attributes:
        name: File name without its ending.
        data: Everything the page shows, as plain JSON.
        models: The models with their first numbers.
    """

    name: str
    data: dict[str, Any]
    models: list[Profiled] = field(default_factory=list)

    def html(self) -> str:
        """The page: template, style, script, plotly.js and data in one text.

        Text from models and documents is in the data alone, and the script puts it on the page as text.
        """
        scripts = [_asset(f"{name}.js") for name in _SCRIPTS]
        body, style = _asset("page.html"), _asset("page.css")
        return whole_page(title="wherewhat report", body=body, style=style, scripts=scripts, data=self.data)

    def write(self, path: Path) -> Path:
        """Write the page, whole or not at all, and return its path."""
        content = self.html().encode("utf-8")
        make_folder(path.parent)
        write_file(path, content)
        return path


def _asset(name: str) -> str:
    return (files("wherewhat.report") / "assets" / name).read_text("utf-8")


def whole_page(*, title: str, body: str, style: str, scripts: Iterable[str], data: Any) -> str:
    """One page in the frame of all: with the style and the script that all share before its own, plotly.js and data.

    Args:
        title: What the window is called.
        body: Its HTML.
        style: Its own CSS.
        scripts: Its own JavaScript; all files are in one function, so that none of their names is seen outside.
        data: What the script finds in the element ``data``, as plain JSON.
    """
    code = "\n".join([_asset("elements.js"), *scripts])
    parts = {
        "TITLE": title,
        "STYLE": _asset("base.css") + style,
        "BODY": body,
        "PLOTLY": in_script(plotly_js()),
        "DATA": script_json(data),
        "SCRIPT": in_script(f'"use strict";\n(() => {{\n{code}\n}})();'),
    }
    return filled(_asset("frame.html"), parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """A template with its parts where ``{{NAME}}`` stands, in one pass: they are never searched for further marks."""
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def in_script(code: str) -> str:
    """Code that cannot end the script element it stands in; a backslash before a slash changes no string."""
    return re.sub(r"</(?=script)", r"<\\/", code, flags=re.IGNORECASE)


def check_plotly() -> None:
    """Refuse early what would fail after minutes of measuring."""
    plotly_js()


def plotly_js() -> str:
    """The charting library, as code to stand in a page."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError:
        raise ConfigError("the report needs the package 'plotly', which is not installed: pip install plotly") from None
    return str(offline.get_plotlyjs())
