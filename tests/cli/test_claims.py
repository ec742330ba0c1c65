"""End to end: ``wherewhat claims`` prints a table, writes one file that a report shows, and refuses wrong input."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_claims_are_judged_and_shown_in_a_report(cli, model, text, tmp_path):
    options = (model, "--text", text, "--tokens", 28, "--device", "cpu", "--out", tmp_path / "runs")
    outcome = cli("claims", *options)
    assert outcome.code == 0, outcome.err
    assert "not judged" in outcome.out
    path = tmp_path / "runs" / "claims-tiny.json"
    assert outcome.out.rstrip().endswith(str(path))
    found = json.loads(path.read_text("utf-8"))
    assert [claim["number"] for claim in found["claims"]] == list(range(1, 25))
    reported = cli("report", *options)
    assert reported.code == 0, reported.err
    page = next((tmp_path / "runs").glob("report-*.html")).read_text("utf-8")
    assert "RoPE could express non-additive logits." in page
    before = path.read_bytes()
    again = cli("claims", *options)
    assert again.code == 0, again.err
    assert path.read_bytes() == before


def test_two_claims_into_a_file(cli, model, text, tmp_path):
    options = ("--text", text, "--tokens", 28, "--device", "cpu", "--weights", "random")
    outcome = cli("claims", model, "--claim", 1, "--claim", 5, *options, "--file", tmp_path / "mine.json")
    assert outcome.code == 0, outcome.err
    measured, unmeasured = json.loads((tmp_path / "mine.json").read_text("utf-8"))["claims"]
    assert (measured["number"], measured["verdict"]) == (1, "cannot be told")  # one document has no interval
    assert [number["n"] for number in measured["numbers"]]
    assert (unmeasured["number"], unmeasured["condition"]) == (5, "This model is itself untrained.")
    assert "cannot be told" in outcome.out
    assert "not judged" in outcome.out


def test_wrong_input_is_one_line(cli, model):
    for arguments, message in (
        (("--claim", 30), "there is no claim 30: choose from 1 to 24"),
        (("--prompts", 0), "--prompts is 0: at least 1 is needed"),
        (("--tokens", 1), "--tokens is 1: attention needs at least 2 tokens"),
    ):
        outcome = cli("claims", model, *arguments)
        assert outcome.code == 2
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
