"""End-to-end: heads, frequencies and prompts as a user types them, on tiny models."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import GPT2Config

from helpers.command_line import assert_one_line
from helpers.models import save_model
from wherewhat.runs.directory import RunDirectory


def metrics(shown):
    table = pq.read_table(Path(shown.out.splitlines()[-1]) / "scores.parquet").to_pydict()
    return set(table["metric"])


@pytest.mark.parametrize(
    "kind", ["binding", *(pytest.param(x, marks=pytest.mark.slow) for x in ("numbers", "letters", "random"))]
)
def test_heads_on_prompts(cli, speller, kind):
    shown = cli(
        "heads", speller, "--prompts", kind, "--tokens", 400, "--documents", 2, "--set", "queries=1", "--no-control"
    )
    assert shown.code == 0, shown.err
    assert {"s_pos", "s_sym", "s_pos_together", "mean_frequency", "induction"} <= metrics(shown)
    assert "positional score" in shown.out


def test_frequencies_on_text(cli, model, text):
    shown = cli("frequencies", model, "--text", text, "--tokens", 24, "--no-control", "--set", "bands=2")
    assert shown.code == 0, shown.err
    assert {"loss_without_band_2", "loss_without_random", "mean_frequency"} <= metrics(shown)
    assert "random planes" in shown.out


def test_prompts_by_size_and_place(cli, speller):
    shown = cli("prompts", speller, "--set", "sizes=2,4", "--set", "count=3", "--set", "kinds=binding,letters")
    assert shown.code == 0, shown.err
    assert {"accuracy_binding_2", "accuracy_letters_4", "chance", "accuracy_together"} <= metrics(shown)
    assert "binding, 4 pairs" in shown.out
    assert "chance" in shown.out
    again = cli("prompts", speller, "--set", "sizes=2,4", "--set", "count=3", "--set", "kinds=binding,letters")
    assert again.out == shown.out


def test_a_number_of_prompts(cli, speller, tmp_path):
    """``--documents`` takes prompts of all kinds and sizes evenly, and no more than there are."""
    options = ("--set", "sizes=2,4", "--set", "count=3", "--set", "kinds=binding,letters", "--no-control")
    assert cli("prompts", speller, *options, "--documents", 2, "--out", tmp_path).code == 0
    (run,) = tmp_path.glob("prompts-*")
    names = [document["name"] for document in RunDirectory.load(run).config["documents"]]
    assert names == ["binding-2-1", "letters-2-1"]
    assert_one_line(cli("prompts", speller, *options, "--documents", 13), "makes 12 prompts", "--set count=N")


def test_wrong_input_is_one_line(cli, model, text, tmp_path, subtests):
    for (name, *options), words in (
        (("heads", "--set", "positions=0"), ["position 0"]),
        (("heads", "--set", "positions=1"), ["position 1"]),
        (("heads", "--set", "tau=0"), ["tau=0"]),
        (("heads", "--set", "block=40"), ["block=40"]),
        (("heads", "--tokens", "2"), ["at least 3"]),
        (("frequencies", "--set", "tau=-1"), ["tau is -1"]),
        (("frequencies", "--set", "bands=99"), ["bands=99"]),
        (("heads", "--prompts", "bindng"), ["did you mean 'binding'"]),
        (("prompts", "--set", "kinds=songs"), ["songs"]),
    ):
        with subtests.test(name=name, options=options):
            given = () if "--prompts" in options or name == "prompts" else ("--text", text)
            tokens = () if "--tokens" in options else ("--tokens", 24)
            assert_one_line(cli(name, model, *given, *tokens, *options, "--no-control"), *words)
    assert_one_line(cli("prompts", model, "--text", text), "makes its own texts")
    assert_one_line(cli("heads", model, "--text", text, "--prompts", "binding"), "--text and --prompts")
    folder = save_model(tmp_path / "gpt2", GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=64))
    assert_one_line(cli("frequencies", folder, "--text", text, "--tokens", 24), "rotates")
