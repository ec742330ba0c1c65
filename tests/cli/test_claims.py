"""End to end: ``wherewhat claims`` prints lines, writes a file that a report shows, and a page, and refuses errors."""

from __future__ import annotations

import json

import pytest

from helpers.pages import ROOT
from wherewhat.cli.claims import claim_lines, detail_lines
from wherewhat.rules.claims.claim import LONGEST_TITLE
from wherewhat.rules.claims.registry import CLAIMS, title_of

STORED = sorted((ROOT / "studies" / "claims").glob("*.json"))


@pytest.mark.slow
def test_claims_are_judged_and_shown_in_a_report(cli, model, text, tmp_path):
    options = (model, "--text", text, "--tokens", 28, "--device", "cpu", "--out", tmp_path / "runs")
    outcome = cli("claims", *options)
    assert outcome.code == 0, outcome.err
    assert "not judged" in outcome.out
    path = tmp_path / "runs" / "claims-tiny.json"
    assert outcome.out.rstrip().splitlines()[-2:] == [str(path), str(path.with_suffix(".html"))]
    assert "RoPE could express non-additive logits." in path.with_suffix(".html").read_text("utf-8")
    found = json.loads(path.read_text("utf-8"))
    assert [claim["number"] for claim in found["claims"]] == list(range(1, 26))
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
    assert "What would change it:" in outcome.out  # the chosen claims are printed in full
    runs = [run for claim in (measured, unmeasured) for run in claim["runs"]]
    assert outcome.out.rstrip().endswith(str(tmp_path / "mine.html"))
    page = (tmp_path / "mine.html").read_text("utf-8")
    assert runs
    assert all(f"runs/{run}/" in page for run in runs)


def claims_of(path):
    return json.loads(path.read_text("utf-8"))["claims"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_one_line_per_claim_at_any_width(width):
    for path in STORED:
        claims = claims_of(path)
        lines = list(claim_lines(claims, title=path.stem, width=width))
        assert max(map(len, lines)) <= width
        assert len(lines) <= 38  # two more are the paths
        numbered = [line for line in lines if line.lstrip()[:1].isdigit()]
        assert [int(line.split()[0]) for line in numbered] == [claim["number"] for claim in claims]
        for claim, line in zip(claims, numbered, strict=True):
            assert title_of(claim) in line
            assert claim["verdict"] in line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_details_keep_words_and_numbers_whole(width):
    for claim in (claim for path in STORED for claim in claims_of(path)):
        lines = list(detail_lines(claim, width=width))
        words = " ".join(" ".join(lines).split())
        assert all(len(line) <= width for line in lines)
        for text in (claim["statement"], *claim["notes"], *(part["statement"] for part in claim["parts"])):
            assert " ".join(text.split()) in words
        assert not [line for line in lines if line.rstrip().endswith(("±", "≥", "≤"))]
        assert not [line for line in lines if line.lstrip().startswith(("±", "%"))]


def test_a_terminal_narrower_than_a_line():
    lines = list(claim_lines(claims_of(STORED[0]), title="a model", width=34))
    assert max(map(len, lines)) <= 34


def test_titles_are_short_and_differ():
    titles = [claim.title for claim in CLAIMS]
    assert len(set(titles)) == 25
    assert max(map(len, titles)) <= LONGEST_TITLE


def test_stored_results_side_by_side(cli, tmp_path):
    first, second = (path for path in STORED if path.stem in ("smollm2", "tinyllama-1.1b"))
    outcome = cli("claims", first, second, "--claim", 9, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    page = tmp_path / outcome.out.rstrip().splitlines()[-1].rsplit("/", 1)[-1]
    assert page.suffix == ".html"
    assert page.exists()
    outcome = cli("claims", first, "--claim", 30)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "claim 30 is not in the result of" in outcome.err
    outcome = cli("claims", first, second, "--file", tmp_path / "x.json")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    outcome = cli("claims", first, "--file", tmp_path / "x.html")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_no_name_in_a_stored_result_leaves_its_folder(cli, tmp_path):
    stored = json.loads(STORED[0].read_text("utf-8"))
    (tmp_path / "in.json").write_text(json.dumps(stored | {"model": "<b>/../../other"}), "utf-8")
    outcome = cli("claims", tmp_path / "in.json", "--out", tmp_path / "out" / "deep")
    assert outcome.code == 0, outcome.err
    pages = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")]
    assert pages == ["out/deep/claims-b-.-.-other.html"]


def test_wrong_input_is_one_line(cli, model):
    for arguments, message in (
        (("--claim", 30), "there is no claim 30: choose from 1 to 25"),
        (("--prompts", 0), "--prompts is 0: at least 1 is needed"),
        (("--controls", 0), "--controls is 0: at least 1 is needed"),
        (("--tokens", 1), "--tokens is 1: attention needs at least 2 tokens"),
    ):
        outcome = cli("claims", model, *arguments)
        assert outcome.code == 2
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
