"""Identity: the tables of costs on the page about scaling are those of the stored results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from wherewhat.measures.registry import BUILT_IN, measurements

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def summary():
    """The script that writes the tables."""
    spec = importlib.util.spec_from_file_location("ledger_summary", ROOT / "studies" / "ledger" / "summary.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_has_the_stored_costs(summary):
    page = summary.PAGE.read_text("utf-8")
    assert summary.filled(page, summary.results()) == page, "run python studies/ledger/summary.py --write"


def test_costs_of_every_measurement_are_stored_and_large_ones_explained(summary):
    found = summary.results()
    (smollm2,) = (one for one in found if one["model"] == "SmolLM2-135M-Instruct" and one["tokens"] == 512)
    names = [name for name, one in measurements().items() if type(one).__module__.startswith("wherewhat.")]
    assert len(names) == len(BUILT_IN)
    assert sorted(smollm2["measurements"]) == sorted(names)
    reasons = summary.PAGE.read_text("utf-8").split("**Above 60 passes.**")[1].split("\n\n")[0]
    large = {name for one in found for name, row in one["measurements"].items() if row["passes"] > 60}
    assert [name for name in large if f"`{name}`" not in reasons] == []


def test_computed_cells_are_marked(summary):
    row = {"seconds": 8.0, "documents": 4, "peak_mib": 100.0}
    one = {"tokens": 512, "parameters": 1000, "hidden": 1, "layers": 1, "measurements": {"axes": row, "prompts": row}}
    assert summary.cell([one], "axes", 512) == "2.0 s, 100 MiB"
    growth = (2 * 1000 * 1024 + 2 * 1024**2) / (2 * 1000 * 512 + 2 * 512**2)
    assert summary.cell([one], "axes", 1024) == f"*{2 * growth:.1f} s, 200 MiB*"
    assert summary.cell([one], "planes", 512) == summary.cell([one], "prompts", 1024) == ""
