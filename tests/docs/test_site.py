"""End-to-end: the documentation site builds without a warning, asks for nothing from elsewhere, and is complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages import ROOT
from wherewhat.measures.measurement import measurements
from wherewhat.report.views import view_of

pytestmark = pytest.mark.slow

NEEDED = ("mkdocs", "material", "mkdocstrings", "latex2mathml")
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: the site cannot be built")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it hides warnings from --strict as well.
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_measurements_are_listed(site):
    reference, home = ((site / name).read_text("utf-8") for name in ("measurements.html", "index.html"))
    for measurement in measurements().values():
        assert f'<h2 id="{measurement.name}">' in reference
        assert all(f"<code>{metric.name}</code>" in reference for metric in measurement.metrics)
        if (ROOT / "docs" / f"{view_of(measurement).page or measurement.name}.md").is_file():
            assert f"wherewhat {measurement.name}</code>" in home


def test_pages_ask_for_nothing_from_elsewhere(site):
    # The canonical address is no request; everything else in these elements would be one.
    fetched = {
        (page.name, tag)
        for page in site.rglob("*.html")
        for tag in FETCHED.findall(page.read_text("utf-8"))
        if 'rel="canonical"' not in tag
    }
    assert fetched == set()
    styles = [file.read_text("utf-8") for file in site.rglob("*.css")]
    assert [url for text in styles for url in re.findall(r"""url\(["']?(?:https?:)?//[^)]*|@import[^;]*""", text)] == []


def test_the_site_has_its_text_for_language_models(site):
    listed = (site / "llms.txt").read_text("utf-8")
    pages = re.findall(r"\]\(([\w/-]+\.html)\)", listed)
    assert len(pages) > 40
    assert [page for page in pages if not (site / page).is_file()] == []
    assert len((site / "llms-full.txt").read_text("utf-8")) > 300_000
    lesson = (site / "lesson.html").read_text("utf-8")
    assert 'id="lesson-data">{' in lesson
    assert (site / "lesson" / "lesson.js").is_file()


def test_formulas_and_docstrings_are_rendered(site):
    page = (site / "planes.html").read_text("utf-8")
    assert page.count('display="block"') == 3
    assert not re.search(r"\\(?:frac|sum|overline|mathrm)\b", re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL))
    assert "arithmatex" not in page
    for page in (site / "api").glob("*.html"):
        text = page.read_text("utf-8")
        assert 'class="doc doc-heading"' in text, page.name
        assert not re.search(r":(?:func|class|mod|meth):", text), page.name
        assert "<blockquote>" not in text, page.name  # an example that was taken for a quotation
