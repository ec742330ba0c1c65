"""End-to-end: the commands as a user types them, on a tiny model."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import LlamaForCausalLM, MambaConfig

import wherewhat
from conformance.tiny_models import build as build_tiny
from helpers.command_line import assert_one_line
from helpers.tolerance import rounding
from wherewhat.captures.proof import prove
from wherewhat.cli.tables import brief_count, control_note, proof_table
from wherewhat.measures.measurement import measurements


def test_help_and_version(cli):
    shown = cli("--help")
    assert shown.code == 0
    for measurement in measurements().values():
        assert measurement.name in shown.out
    assert "Usage" in cli().out
    assert cli("--version").out.startswith("wherewhat ")


def test_help_of_a_measurement_explains_metrics_and_options(cli, subtests):
    options = ("--text", "--tokens", "--out", "--weights", "--device", "--dtype", "--seed", "--offline", "--set")
    for measurement in measurements().values():
        with subtests.test(measurement=measurement.name):
            shown = cli(measurement.name, "--help")
            flat = " ".join(shown.out.split())
            assert shown.code == 0
            assert measurement.summary in flat
            assert [option for option in options if option not in flat] == []


def test_help_shows_examples_then_options_then_metrics_in_plain_words(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = {name: cli(*name.split(), "--help").out for name in ("heads", "report", "choices", "multihop train", "")}
    for name, text in shown.items():
        assert max(map(len, text.splitlines())) <= 80, name
        assert not re.search(r"<\w+|\*\w|`", text), name
    order = ["Usage", "\nExamples", "\nArguments", "\nOptions\n", "\nOptions for --set", "\nMetrics", "\nLimits"]
    places = [shown["heads"].index(title) for title in order]
    assert places == sorted(places)
    assert "--weights TEXT..." in shown["report"]
    assert "  --quick  " in shown["report"]
    assert re.search(r"--control / --no-control .*\n.*\[default: --control\]", shown["heads"])
    monkeypatch.setenv("COLUMNS", "160")
    assert max(map(len, cli("heads", "--help").out.splitlines())) <= 100


def test_examples_of_the_help_are_commands_with_options_that_exist(cli):
    listed = re.findall(r"^  ([a-z]+)  ", cli("--help").out, re.MULTILINE)
    for name in listed:
        text = cli(name, "--help").out
        for line in re.findall(r"^  \$ wherewhat (.*)$", text, re.MULTILINE):
            command, *words = line.partition("#")[0].split()
            assert command == name
            used = [word for word in words if word.startswith("--")]
            assert [word for word in used if f" {word}" not in text.partition("\nOptions\n")[2]] == [], line
            assert name in ("multihop", "encodings") or "\nExamples\n" in text


def test_counts_of_heads_are_short_in_tables():
    assert brief_count("14 of 270; 12 to 17 in single documents") == ("14 (12 to 17)", "270")
    assert brief_count("14 of 270") == ("14", "270")
    assert brief_count("0.84 ± 0.09") == ("0.84 ± 0.09", "")


def test_the_note_on_control_models_names_those_that_are_shown():
    over = "Intervals of control models are over documents:"
    assert control_note(["random", "shuffled"]) == f"{over} random is one untrained model, shuffled one draw."
    assert control_note(["random"]) == f"{over} random is one untrained model."
    assert control_note(["shuffled"]) == f"{over} shuffled is one draw."
    assert control_note(["trained"]) == ""


def rows(out):
    """Cells of a table's lines, the header's left out."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def test_check_prints_one_line_for_layers_that_are_alike_and_every_layer_if_asked(cli, model, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = shutil.copytree(model, tmp_path / "tiny[v2]")
    shown = cli("check", model)
    assert shown.code == 0, shown.err
    assert "model.layers.*.self_attn" in shown.out
    assert [row[:4] for row in rows(shown.out)] == [["0-1", "4 / 2 kv", "half, 2 planes", ""]]
    assert "tiny[v2]: proved. Capturing changes the model's output by 0." in " ".join(shown.out.split())
    lines = rows(cli("check", model, "--layers").out)
    assert [row[:3] for row in lines] == [[str(layer), "4 / 2 kv", "half, 2 planes"] for layer in range(2)]
    # Relative errors of float32 sums over 24 features: 16 times what rounding allows.
    assert all(float(error) < 16 * rounding(24) for row in lines for error in row[4:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "expected", "remarks"),
    [
        (
            "jamba",
            [["1, 3", "4 / 2 kv", "none", ""], ["0, 2", "", "not measured", ""]],
            ["Layers 0, 2: no softmax self-attention: mamba (JambaMambaMixer)."],
        ),
        (
            "gemma4_text",
            [
                ["0, 2", "4 / 2 kv", "half, 8 planes", "window 8, base 10,000"],
                ["1, 3", "4 / 2 kv", "half, 4 of 16 planes turn", "full, base 1,000,000"],
            ],
            [],
        ),
        (
            "hunyuan_v1_dense",
            [["0-3", "4 / 2 kv", "none", ""]],
            ["Layers 0-3: a norm with weights follows the rotation: there is no pre-rotation tensor."],
        ),
        (
            "gpt_oss",
            [
                ["0, 2", "4 / 2 kv", "half, 8 planes", "window 8, sinks"],
                ["1, 3", "4 / 2 kv", "half, 8 planes", "full, sinks"],
            ],
            [],
        ),
    ],
)
def test_a_proof_fits_into_80_columns(model_type, expected, remarks):
    proof = prove(build_tiny(model_type).model)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(proof_table(proof.table()))
    assert [row[:4] for row in rows(console.export_text())] == expected
    assert list(proof.table().remarks) == remarks


def test_check_prints_json_and_nothing_else(cli, model):
    shown = cli("check", model, "--json", "--layers")
    assert (shown.code, shown.err) == (0, "")
    values = json.loads(shown.out)
    assert (values["proved"], values["name"], values["model_type"]) == (True, "tiny", "llama")
    python = prove(wherewhat.load(model, device="cpu").model).as_dict()
    assert values == python | {"name": "tiny"}
    assert [layer["layer"] for layer in values["layers"]] == [0, 1]


def test_json_is_not_mixed_with_what_a_model_prints(cli, model, monkeypatch):
    forward = LlamaForCausalLM.forward

    def talkative(self, *args, **kwargs):
        sys.stdout.write("running\n")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", functools.wraps(forward)(talkative))
    shown = cli("check", model, "--json")
    assert json.loads(shown.out)["proved"] is True
    assert "running" in shown.err


def test_check_prints_json_for_a_refused_model(cli, build, tmp_path):
    config = MambaConfig(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=2)
    build.model(tmp_path / "mamba", config)
    for name in ("mamba", "nowhere"):
        shown = cli("check", f"./{name}", "--json")
        assert shown.code == 2
        assert shown.err.count("\n") == 1
        values = json.loads(shown.out)
        assert values == {"proved": False, "reason": shown.err.removeprefix("wherewhat: ").strip()}
        assert_one_line(cli("check", f"./{name}"), values["reason"])


def test_measurement_stores_and_shows_model_and_twin(cli, model, text):
    shown = cli("attention", model, "--text", text, "--tokens", 24, "--out", "results")
    assert shown.code == 0, shown.err
    assert shown.err == ""  # no progress where there is no terminal
    assert "trained" in shown.out
    assert "random" in shown.out
    trained, random = (Path(line) for line in shown.out.splitlines()[-2:])
    for folder, weights in ((trained, "trained"), (random, "random")):
        table = pq.read_table(folder / "scores.parquet").to_pydict()
        assert set(table["weights"]) == {weights}
        assert {
            (layer, head) for layer, head in zip(table["layer"], table["head"], strict=True) if head is not None
        } == {(layer, head) for layer in range(2) for head in range(4)}
        assert json.loads((folder / "config.json").read_text())["tokens"] == 24
        assert json.loads((folder / "provenance.json").read_text())["device"] == "cpu"


def test_second_run_computes_nothing_and_changes_nothing(cli, model, text, monkeypatch):
    arguments = ("attention", model, "--text", text, "--tokens", 24, "--no-control")
    folder = Path(cli(*arguments).out.splitlines()[-1])
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def fail(*_):
        raise AssertionError("measured twice")

    monkeypatch.setattr("wherewhat.runs.execution.ModelSubject", fail)
    again = cli(*arguments)
    assert again.code == 0, again.err
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_options_of_the_measurement_by_set_and_by_file(cli, model, text, tmp_path):
    by_set = cli("attention", model, "--text", text, "--tokens", 24, "--set", "sink_tokens=2", "--no-control")
    config = tmp_path / "run.toml"
    config.write_text(f'text = "{text}"\ntokens = 24\ncontrol = false\n[set]\nsink_tokens = 2\n')
    by_file = cli("attention", model, "--config", config)
    assert by_set.code == by_file.code == 0, by_file.err
    assert by_set.out.splitlines()[-1] == by_file.out.splitlines()[-1]
    overruled = cli("attention", model, "--config", config, "--tokens", 20)
    assert json.loads((Path(overruled.out.splitlines()[-1]) / "config.json").read_text())["tokens"] == 20


def test_several_documents_give_intervals(cli, model, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a dog and a cat ran on the mat . " * 4)
    shown = cli("attention", model, "--text", text, "--text", other, "--tokens", 24, "--no-control")
    assert shown.code == 0, shown.err
    assert "±" in shown.out


def test_text_from_standard_input(cli, model, monkeypatch, tmp_path):
    piped = tmp_path / "piped"
    piped.write_text("the cat sat on a mat . " * 5)
    with piped.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        shown = cli("attention", model, "--text", "-", "--tokens", 24, "--no-control")
    assert shown.code == 0, shown.err


def test_narrow_terminals_do_not_cut_numbers(cli, model, text, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = [cli("attention", model, "--text", text, "--tokens", 24), cli("check", model), cli("compare", "runs")]
    assert [one.code for one in shown] == [0, 0, 0], shown
    for one in shown:
        assert "…" not in one.out, one.out
        assert max(map(len, one.out.splitlines()[:-2])) <= 40, one.out
