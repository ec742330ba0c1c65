"""End-to-end: the documentation site builds without a warning, asks for nothing from elsewhere, and is complete."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from wherewhat.measures.registry import measurements

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NEEDED = ("mkdocs", "material", "mkdocstrings", "latex2mathml")


def page_of(measurement) -> Path:
    return DOCS / f"{measurement.page or measurement.name}.md"


PAGED = [measurement for measurement in measurements().values() if page_of(measurement).is_file()]
"""Measurements with a page of their own; the reference has all of them."""
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def listed(nav) -> list[str]:
    """All pages below an entry of the nav."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in listed(entry)]


@pytest.fixture(scope="module")
def nav() -> list:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]


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


def test_every_page_of_the_nav_exists_once(nav):
    pages = listed(nav)
    assert [page for page in pages if not (DOCS / page).is_file()] == []
    assert len(pages) == len(set(pages))


@pytest.mark.parametrize("measurement", PAGED, ids=lambda measurement: measurement.name)
def test_pages_of_measurements_are_listed(nav, measurement):
    pages = next(listed(entry["Measurements"]) for entry in nav if "Measurements" in entry)
    assert page_of(measurement).name in pages
    assert f"wherewhat {measurement.name}" in page_of(measurement).read_text("utf-8")


@pytest.mark.parametrize("measurement", PAGED, ids=lambda measurement: measurement.name)
def test_pages_name_every_metric_and_option(measurement):
    page = page_of(measurement).read_text("utf-8")
    names = [metric.name for metric in measurement.metrics] + [option.name for option in fields(measurement.config)]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_reference_lists_every_measurement(site):
    text = (site / "measurements.html").read_text("utf-8")
    for measurement in measurements().values():
        assert f'<h2 id="{measurement.name}">' in text
        assert all(f"<code>{metric.name}</code>" in text for metric in measurement.metrics)


def test_the_home_page_lists_measurements_with_a_page(site):
    home = (site / "index.html").read_text("utf-8")
    assert [m.name for m in PAGED if f"wherewhat {m.name}</code>" not in home] == []


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


def test_formulas_are_mathml(site):
    page = (site / "planes.html").read_text("utf-8")
    assert page.count('display="block"') == 3
    assert not re.search(r"\\(?:frac|sum|overline|mathrm)\b", re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL))
    assert "arithmatex" not in page


def test_docstrings_are_rendered(site):
    for page in (site / "api").glob("*.html"):
        text = page.read_text("utf-8")
        assert 'class="doc doc-heading"' in text, page.name
        assert not re.search(r":(?:func|class|mod|meth):", text), page.name
        assert "<blockquote>" not in text, page.name  # an example that was taken for a quotation


def test_pictures_stay_small():
    assert sum(file.stat().st_size for file in (DOCS / "pictures").iterdir()) < 2_000_000
