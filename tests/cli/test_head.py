"""End to end: ``wherewhat head`` prints portrait, pattern and attended tokens, writes a page and refuses errors."""

from __future__ import annotations

import pytest
import torch

from helpers.command_line import assert_one_line
from helpers.report import HOSTILE
from wherewhat.cli.head import attended_table, pattern_lines, token_label

PROMPT = "the cat sat on a mat and the dog ran and the cat"


def test_a_head_on_a_prompt(cli, model, tmp_path):
    outcome = cli("head", model, "L1H2", "--prompt", PROMPT, "--out", tmp_path / "runs")
    assert outcome.code == 0, outcome.err
    first, *lines = outcome.out.splitlines()
    assert first == "tiny, layer 1, head 2"
    assert "Measured now on 1 document of 13 tokens: prompt." in lines
    assert "prompt: queries from top to bottom, keys from left to right" in lines
    assert "each line: 2 queries, with the name of the first" in lines
    page = tmp_path / "runs" / lines[-1].rsplit("/", 1)[1]
    assert page.name.startswith("head-tiny-L1H2-")
    assert "<!doctype html>" in page.read_text("utf-8")
    assert list((tmp_path / "runs").iterdir()) == [page]  # what was measured on a prompt is no run for others
    assert cli("head", model, "L1H2", "--prompt", "a dog", "--file", tmp_path / "mine.html").code == 0
    assert (tmp_path / "mine.html").is_file()


def test_without_a_prompt_prose_and_repeated_tokens(cli, model, tmp_path):
    outcome = cli("head", model, "l0h1", "--out", tmp_path / "runs")
    assert outcome.code == 0, outcome.err
    assert "Measured now on 1 document of 32 tokens: moby-dick-01." in outcome.out
    assert "moby-dick-01: queries from top to bottom" in outcome.out
    assert "repeated random tokens: queries from top to bottom" in outcome.out
    again = cli("head", model, "L1H0", "--out", tmp_path / "runs")
    (run,) = (tmp_path / "runs").glob("heads-*")
    assert "Measured earlier on 1 document of 32 tokens: moby-dick-01." in again.out
    assert str(run) in again.out.splitlines()


def test_numbers_are_those_of_a_finished_run(cli, model, text, tmp_path):
    options = ("--out", tmp_path / "runs")
    measured = cli("heads", model, "--text", text, "--tokens", 28, "--set", "queries=2", "--no-control", *options)
    assert measured.code == 0, measured.err
    outcome = cli("head", model, "L0H0", "--prompt", PROMPT, *options)
    assert "Measured earlier on 1 document of 28 tokens: text." in outcome.out
    assert measured.out.splitlines()[-1] in outcome.out.splitlines()


def test_hostile_text_is_printed_by_its_codes(cli, speller, tmp_path):
    outcome = cli("head", speller, "L0H0", "--prompt", HOSTILE + "[bold]x[/bold]\x1b[31m", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    assert "\u202e" not in outcome.out
    (page,) = tmp_path.glob("head-*.html")
    content = page.read_text("utf-8")
    assert "<script>alert(1)" not in content
    assert "<img src=x" not in content


def test_long_prompts_are_cut(cli, speller, tmp_path, monkeypatch):
    outcome = cli("head", speller, "L1H0", "--prompt", "ab" * 300, "--out", tmp_path)
    assert "prompt has 600 tokens; the first 512 are shown." in outcome.out
    assert "each line: 16 queries, with the name of the first" in outcome.out
    assert max(map(len, outcome.out.splitlines()[1:-1])) <= 100
    monkeypatch.setattr("wherewhat.report.attention_view.MOST_LOGITS", 4 * 20 * 21 // 2)
    outcome = cli("head", speller, "L1H0", "--prompt", "abcdefghijklmnopqrst", "--out", tmp_path)
    assert "The page has layer 1 only" in outcome.out
    assert "are shown" not in outcome.out


def test_wrong_input_is_one_line(cli, model, tmp_path):
    for arguments, message in (
        ((model, "L9H0"), "no head L9H0: it has the layers 0 to 1, each with the heads 0 to 3"),
        ((model, "L1H7"), "no head L1H7: layer 1 has the heads L1H0 to L1H3"),
        ((model, "seventeen"), "'seventeen' is not the name of a head: write layer and head as in L17H3"),
        ((model, "L0H0", "--prompt", " "), "--prompt is empty"),
        ((model,), "HEAD"),
        ((tmp_path / "none", "L0H0"), "none"),
    ):
        assert_one_line(cli("head", *arguments, "--out", tmp_path / "runs"), message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("n", [1, 2, 7, 48, 68, 69, 300, 512])
@pytest.mark.parametrize("width", [40, 80])
def test_a_pattern_fits_the_width_and_keeps_every_weight(n, width):
    """Brute force: a character shows the largest weight of its cells."""
    weights = torch.rand(n, n, generator=torch.Generator().manual_seed(n)).tril() ** 4
    lines = pattern_lines(weights, ["x"] * n, width=width)
    assert max(map(len, lines)) <= width
    step = next(k for k in range(1, n + 1) if -(-n // k) <= width - 12)
    assert len(lines) == -(-n // (2 * step))
    for row, line in enumerate(lines):
        for column, character in enumerate(line[12:]):
            block = weights[2 * step * row : 2 * step * (row + 1), step * column : step * (column + 1)]
            assert character == " ░▒▓█"[round(float(block.max()) ** 0.5 * 4)]


def test_a_stripe_is_seen():
    weights = torch.eye(48, dtype=torch.float64).roll(-24, 1).tril()
    weights[:24, 0] = 1
    lines = pattern_lines(weights, ["x"] * 48, width=80)
    assert [line[12:] for line in lines[12:14]] == ["██", "  ██"]
    assert all(line[12] == "█" for line in lines[:12])
    assert pattern_lines(weights, ["x"] * 48, width=80, plain=True)[0][12:] == "#"


def test_tokens_on_one_line():
    assert token_label(" a\nb") == "·a⏎b"
    assert token_label("\x1b[1m") == "\\x1b[1m"
    assert token_label("abcdefghijklmnop") == "abcdefghij…"
    assert token_label("漢字漢字漢字漢字") == "漢字漢字漢…"


def test_attended_tokens_stand_out():
    weights = torch.zeros(6, 6, dtype=torch.float64)
    weights[:, 0] = 1
    weights[4, 0], weights[4, 2] = 0.3, 0.7
    table = attended_table(weights, list("abcdef"))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][-2:] == ["e", "f"]
    assert cells[1][-2] == "c (2) 70%   a (4) 30%"
    assert cells[1][-1] == "a (5) 100%"
