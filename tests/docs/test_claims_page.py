"""Identity: the verdicts on the page of claims are those of the stored results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_stored_verdicts():
    spec = importlib.util.spec_from_file_location("summary", ROOT / "studies" / "claims" / "summary.py")
    summary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(summary)
    page = (ROOT / "docs" / "claims.md").read_text("utf-8")
    table = page.split("<!-- results -->\n")[1].split("\n<!-- end of results -->")[0]
    assert table.strip().splitlines() == list(summary.table(summary.results()))
    assert sum(file.stat().st_size for file in summary.FOLDER.iterdir() if file.is_file()) < 10e6
