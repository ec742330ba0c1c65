"""End to end: the ledger of costs measures every declared measurement on tiny models, without judging the times."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from helpers.models import save_speller
from wherewhat.captures.proof import PROMPT_TOKENS
from wherewhat.measures.measurement import measurements

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def ledger(monkeypatch):
    """The script as a function of its arguments."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import llama

    monkeypatch.setitem(llama.SHAPES, "1.1B", TINY)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ledger.py", *map(str, arguments)])
        return runpy.run_path(str(ROOT / "benchmarks" / "ledger.py"))["main"]()

    return run


def test_every_measurement_is_measured_or_named(ledger, tmp_path, capsys):
    out = tmp_path / "ledger.json"
    sizes = ("--tokens", 400, "--documents", 3, "--limit", 0)
    assert ledger("--model", save_speller(tmp_path / "speller"), *sizes, "--json", out) == 0
    found = json.loads(out.read_text())
    rows = found["measurements"]
    assert sorted([*rows, *found["skipped"]]) == sorted(measurements())
    assert found["skipped"] == {"frequencies": "bands=4 cannot be made of 2 planes: choose at most 2"}
    floors = {name: row["floor"] for name, row in rows.items()}
    assert floors["axes"] == floors["planes"] == floors["attention"] == floors["distance"] == 1
    assert floors["split"] == 2
    # Single layers are changed in passes that start at them, after a whole one and a check from the middle layer.
    layers = found["layers"]
    alone = (sum(range(1, layers + 1)) + layers - layers // 2) / layers
    assert floors["residual"] == 1 + 5 + 2 + 1 + 1 + alone
    # Every head three times, in passes that start at its layer, after a capture, a pass, a check and direct logits; how
    # these sum up is found on two short prompts.
    heads, prompts = 3 * TINY["num_attention_heads"], 2 * PROMPT_TOKENS / 400
    alone = (heads * sum(range(1, layers + 1)) + layers - layers // 2) / layers
    assert floors["removal"] == pytest.approx(3 + alone + prompts)
    assert all(row["passes"] > 0 and row["timed"] == (3 if name == "split" else 1) for name, row in rows.items())
    printed = capsys.readouterr()
    assert f"1 of {len(measurements()) + 2}: axes" in printed.err.splitlines()  # and two rows of several
    assert sorted(found["several"]) == ["report", "together"]
    assert "frequencies  skipped: bands=4" in printed.out


def test_shapes_and_more_measurements_in_the_same_file(ledger, tmp_path):
    out = tmp_path / "shape.json"
    fixed = ("--shape", "1.1B", "--device", "cpu", "--dtype", "float32", "--tokens", 32, "--documents", 2)
    assert ledger(*fixed, "--measurement", "attention", "--json", out, "--profile", tmp_path / "profile") == 0
    profile = (tmp_path / "profile" / "attention.txt").read_text("utf-8")
    assert "measure_texts" in profile
    assert "aten::" in profile
    first = json.loads(out.read_text())
    assert ledger(*fixed, "--measurement", "frequencies", "prompts", "choices", "--json", out) == 0
    second = json.loads(out.read_text())
    assert second["measurements"]["attention"] == first["measurements"]["attention"]
    assert [*second["measurements"]] == ["attention", "frequencies"]
    assert second["measurements"]["frequencies"]["timed"] == 2
    assert second["skipped"]["prompts"].startswith("the model has no tokenizer")
    assert second["skipped"]["choices"].startswith("the tokenizer does not report where words are")
    with pytest.raises(SystemExit, match="other settings"):
        ledger(*fixed, "--documents", 1, "--json", out)
