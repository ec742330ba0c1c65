"""What ``mkdocs.yml`` needs beyond its extensions.

The reference of measurements, MathML, plain docstrings, data of live pictures, and ``llms.txt`` and ``llms-full.txt``.
"""

from __future__ import annotations

import dataclasses
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from wherewhat.measures.measurement import Measurement, all_metrics, measurements
from wherewhat.report.views import view_of

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
_LINKED = re.compile(r"\]\((?P<path>[^)#:]+\.md)\)")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_LESSON = "<!-- lesson: data -->"
_ROLE = re.compile(r":(?:mod|func|class|meth|attr|data|exc):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks ``<!-- measurements: list -->`` and ``<!-- measurements: reference -->``."""
    known = measurements().values()
    listed = "\n".join(["| command | measures |", "|---|---|", *map(_row, known)])
    markdown = markdown.replace("<!-- measurements: list -->", listed)
    if "<!-- measurements: reference -->" in markdown:
        markdown = markdown.replace("<!-- measurements: reference -->", "\n\n".join(map(reference, known)))
    return markdown


def on_page_content(page_html: str, **_: Any) -> str:
    """The page with its formulas as MathML, which browsers draw themselves, and the data of live pictures."""
    if _LESSON in page_html:
        # Inside the page: a page that is opened from a folder cannot read files.
        data = (_DOCS / "lesson" / "lesson.json").read_text("utf-8").replace("</", "<\\/")
        page_html = page_html.replace(_LESSON, f'<script type="application/json" id="lesson-data">{data}</script>')
    return _ROLE.sub("", _FORMULA.sub(_mathml, page_html))


def on_post_build(config: Any, **_: Any) -> None:
    """Write ``llms.txt``, with links to pages of the site, and ``llms-full.txt`` beside the pages."""
    site = Path(config["site_dir"])
    contents = (_ROOT / "llms.txt").read_text("utf-8")
    pages = re.sub(r"\]\(docs/([^)#:]+)\.md\)", r"](\1.html)", contents)
    (site / "llms.txt").write_text(pages, "utf-8")
    (site / "llms-full.txt").write_text(full_text(), "utf-8")


def full_text() -> str:
    """Return all pages that ``llms.txt`` lists, in its order, as one text in Markdown for language models."""
    contents = (_ROOT / "llms.txt").read_text("utf-8")
    paths = dict.fromkeys(found["path"] for found in _LINKED.finditer(contents))
    parts = [contents.split("\n## ")[0].strip()]
    for path in paths:
        page = on_page_markdown((_ROOT / path).read_text("utf-8"))
        parts.append(f"<!-- {path} -->\n\n{_COMMENT.sub('', page).strip()}")
    return "\n\n".join(parts) + "\n"


def reference(measurement: Measurement) -> str:
    """Return everything a measurement declares, as a section in Markdown."""
    page = f"{view_of(measurement).page or measurement.name}.md"
    more = f" See [its page]({page})." if (_DOCS / page).is_file() else ""
    controls = ", ".join(measurement.controls) or "none"
    lines = [
        f"## {measurement.name}",
        f"{measurement.summary}{more}",
        f"    wherewhat {measurement.name}",
        f"Control models: {controls}. Documents: at least {measurement.least_documents}.",
        _table(["metric", "unit", "control", "how to read it"], _metrics(measurement)),
        _table(["option", "default", "meaning"], _options(measurement)),
        f"**Limits.** {measurement.limits}",
    ]
    return "\n\n".join(lines)


def _row(measurement: Measurement) -> str:
    return f"| [`wherewhat {measurement.name}`](measurements.md#{measurement.name}) | {_cell(measurement.summary)} |"


def _metrics(measurement: Measurement) -> list[list[str]]:
    metrics = all_metrics(measurement, measurement.config())
    return [[f"`{m.name}` {m.title}", m.unit, m.control_title, m.reading] for m in metrics]


def _options(measurement: Measurement) -> list[list[str]]:
    fields = dataclasses.fields(measurement.config)
    return [[f"`{f.name}`", f"`{f.default}`", str(f.metadata.get("help", ""))] for f in fields]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["open"] == "[" else "inline"
    return convert(html.unescape(found["latex"]).strip(), display=display)
