"""End-to-end: hostile names, files and numbers end in one line and exit code 2 before a model is loaded."""

from __future__ import annotations

import os

import pytest

from helpers.command_line import assert_one_line
from helpers.runs import finished

LONG = "x" * 300
HUGE = "99999999999999999999"
SMALL = ("--tokens", 24, "--no-control")
RED = "\x1b[31mred"


@pytest.fixture
def unloaded(monkeypatch):
    """Fail if a model is loaded."""

    def fail(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("wherewhat.models.loader.load", fail)


@pytest.fixture
def props(tmp_path):
    """Files of unusual kinds in the working directory."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    (tmp_path / "file").write_text("content")
    return tmp_path


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("command", ["attention", "report", "plan"])
def test_folders_of_runs(cli, model, text, props, command, subtests):
    for name, words in {
        "": "is empty",
        "~nosuchuser/x": "unknown user",
        LONG: "File name too long",
        f"missing/{LONG}": "File name too long",
        "loop": "symbolic links",
        "file/x": "not a folder",
    }.items():
        with subtests.test(name=name):
            outcome = cli(command, model, "--text", text, "--tokens", 24, "--out", name)
            assert_one_line(outcome, "--out", words)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    "option", ["compare --csv", "compare --parquet", "compare --html", "plan --file", "plan --triattention", "export"]
)
def test_files_to_write(cli, model, text, props, option, subtests):
    run = finished(props / "store", {"a": 0.5}).path
    before = sorted(str(path) for path in props.rglob("*"))
    command, _, word = option.partition(" ")
    first = {"compare": [props / "store"], "plan": [model, "--text", text], "export": [run]}[command]
    for name in ("", "~nosuchuser/x", LONG, "loop", "file/x", "folder", "pipe", "zeros", "/dev/null"):
        with subtests.test(name=name):
            assert_one_line(cli(command, *first, *([word] if word else []), name), word or "FILE")
            assert sorted(str(path) for path in props.rglob("*")) == before
    for name in ("", LONG, "file", "pipe") if option == "plan --file" else ():
        with subtests.test(export=name):
            assert_one_line(cli(command, *first, "--export", f"kvpress={name}"), "--export kvpress")


@pytest.mark.usefixtures("unloaded", "props")
def test_files_to_read(cli, model, text, subtests):
    for name in ("", "~nosuchuser/x", LONG, "loop", "folder", "pipe", "zeros", "deep.toml", "file"):
        with subtests.test(name=name):
            assert_one_line(cli("attention", model, "--text", text, "--config", name), "--config")
            assert_one_line(cli("sweep", name))
            assert_one_line(cli("sweep", name, "--status"))
            assert_one_line(cli("multihop", "run", name))
            assert_one_line(cli("encodings", "run", "--recipe", name))
            if name not in ("file", "deep.toml"):
                if name:
                    assert_one_line(cli("extend", model, "--text", text, "--set", f"plan={name}"), "the plan")
                assert_one_line(cli("attention", model, "--text", name, *SMALL), "text")
                assert_one_line(cli("encodings", "run", "--text", name, "--out", "new"), "text")


@pytest.mark.usefixtures("props")
def test_runs_to_read(cli, subtests):
    for name in ("", "~nosuchuser/x", LONG, "loop", "folder", "pipe", "zeros", "file"):
        with subtests.test(name=name):
            assert_one_line(cli("compare", name))
            assert_one_line(cli("export", name, "x.csv"))
            assert_one_line(cli("multihop", "dynamics", name))
            assert_one_line(cli("encodings", "report", name))
            assert_one_line(cli("sweep", "--status", "--store", name or " "))


@pytest.mark.usefixtures("unloaded")
def test_huge_numbers(cli, model, subtests):
    for command, *options in (
        ("attention", "--tokens", HUGE),
        ("attention", "--tokens", 99999999999),
        ("attention", "--documents", HUGE),
        ("attention", "--chunk", 2**62),
        ("attention", "--set", f"sink_tokens={HUGE}"),
        ("attention", "--set", "block_mib=99999999999"),
        ("axes", "--set", "skip=99999999999"),
        ("distance", "--set", "beyond=99999999999"),
        ("distance", "--set", "queries=99999999999"),
        ("extend", "--set", "window=99999999999"),
        ("extend", "--set", "trained=99999999999"),
        ("extend", "--set", "top=99999999999"),
        ("extend", "--set", "run=99999999999"),
        ("frequencies", "--set", "bands=99999999"),
        ("heads", "--set", "max_lag=99999999999"),
        ("heads", "--set", "blocks=2,99999999999"),
        ("heads", "--set", f"positions={HUGE}"),
        ("perturb", "--set", "layers=99999999"),
        ("perturb", "--set", "reach=99999999999"),
        ("perturb", "--set", "gap=99999999999"),
        ("perturb", "--set", "seeds=99999999999"),
        ("perturb", "--set", "rates=" + "0.5," * 20_000 + "0.5"),
        ("prompts", "--set", "count=99999999999"),
        ("prompts", "--set", "sizes=2,99999999999"),
        ("report", "--tokens", 99999999999),
        ("report", "--documents", HUGE),
        ("plan", "--tokens", 99999999999),
        ("plan", "--window", HUGE),
        ("plan", "--choose", 99999999999),
        ("plan", "--max-rise", "inf"),
    ):
        with subtests.test(command=command, options=options):
            assert_one_line(cli(command, model, *options))


def test_huge_laboratories(cli, tmp_path, subtests):
    for option in (
        "layers=99999999",
        "width=99999998",
        "sequences=99999999999",
        "steps=99999999999",
        "batch=9999999999",
        "target=9999999999",
        "target=9999999",
        "symbols=9999999",
        f"hops={HUGE}",
        "positions=99999999999",
    ):
        with subtests.test(option=option):
            assert_one_line(cli("multihop", "train", "number", "--device", "cpu", "--set", option))
            assert not (tmp_path / "runs").exists()


def test_huge_sweeps(cli, model, tmp_path):
    path = tmp_path / "sweep.toml"
    models = f"models = ['{model}']\n"
    for content, words in {
        f"{models}measurements = ['axes']\nresources = {{cpus = 9999999}}": "cpus is 9999999",
        f"{models}measurements = ['axes']\nresources = {{memory_gib = 1e308}}": "memory_gib is 1e+308",
        f"{models}measurements = ['axes']\nseeds = [{'1, ' * 20_000}2]": "20,001 values",
        f"{models}measurements = ['axes']\ntokens = 99999999999": "--tokens is 99999999999",
        f"{models}measurements = ['axes']\nseeds = [{HUGE}]": "2^63",
        f"{models}measurements = ['axes']\ntexts = ['~nosuchuser/x']": "unknown user",
        "models = ['~nosuchuser/x']\nmeasurements = ['axes']": "unknown user",
        f"models = ['{LONG}']\nmeasurements = ['axes']": "too long",
    }.items():
        path.write_text(content)
        assert_one_line(cli("sweep", path), words)
    assert_one_line(cli("sweep", path, "--workers", 99999999), "--workers is 99999999")


def test_control_characters_are_shown_by_their_code(cli, model, tmp_path):
    red = tmp_path / RED
    red.with_suffix(".txt").write_text("the cat sat on a mat and the dog ran " * 3)
    finished(red, {"a\x1b[2J": 0.5}, model=f"{RED}[b]", extra={"checkpoint": "\x1b]0;x\x07"})
    outcomes = [
        cli("attention", model, "--text", f"{RED}.txt", *SMALL, "--out", RED),
        cli("attention", model, "--text", f"{RED}.txt", *SMALL, "--out", RED),
        cli("compare", RED, "--by", "model,checkpoint,run", "--csv", f"{RED}.csv"),
        cli("compare", RED, "--by", RED),
        cli("compare", RED, "--metric", RED),
        cli("compare", RED, "--where", f"{RED}=1"),
        cli("attention", model, "--set", f"{RED}=1"),
        cli("attention", model, "--set", f"sink_tokens={RED}"),
        cli("attention", model, "--config", RED),
        cli("attention", model, "--text", f"{RED}-missing"),
        cli("attention", model, f"--{RED}"),
        cli("attention", model, "--tokens", RED),
        cli("export", RED, f"{RED}.csv"),
        cli("sweep", RED),
        cli("sweep", RED, "--engine", RED),
        cli("sweep", "--status", "--store", RED),
        cli(RED),
        cli(f"{RED}\r\nx\u202e"),
    ]
    for outcome in outcomes:
        assert outcome.code in (0, 2), outcome
        for text in (outcome.out, outcome.err):
            assert all(line.isprintable() for line in text.split("\n")), outcome
    assert [outcome.code for outcome in outcomes[:3]] == [0, 0, 0], outcomes[:3]
    assert r"\x1b[31mred" in outcomes[2].out


def test_long_values_are_cut(cli):
    outcome = cli("attention", "--nonsense" + "x" * 100_000)
    assert_one_line(outcome)
    assert len(outcome.err) < 2100


def test_errors_of_the_operating_system_are_one_line(cli, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", f"/{RED}")

    monkeypatch.setattr("wherewhat.runs.comparison.compare", fail)
    assert_one_line(cli("compare", "x"), r"'/\x1b[31mred': Permission denied")
