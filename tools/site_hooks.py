"""What ``mkdocs.yml`` needs beyond its extensions: formulas as MathML, and docstrings without Sphinx's marks."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_ROLE = re.compile(r":(?:mod|func|class|meth|attr|data|exc):(?=<code>)")


def on_page_content(page_html: str, **_: Any) -> str:
    """The page with its formulas as MathML, which browsers draw themselves: no script, no font."""
    return _ROLE.sub("", _FORMULA.sub(_mathml, page_html))


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["open"] == "[" else "inline"
    return convert(html.unescape(found["latex"]).strip(), display=display)
