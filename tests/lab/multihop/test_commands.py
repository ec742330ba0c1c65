"""End-to-end: the multi-hop laboratory as a user types it, on models too small to learn anything."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from helpers.command_line import assert_one_line
from wherewhat_lab.constructions.checks import check_randomly
from wherewhat_lab.multihop import tables

SMALL = ("--set", "layers=2", "--set", "width=16", "--set", "steps=10", "--set", "record_every=5")
SMALL += ("--set", "sequences=1000", "--set", "save_every=5", "--device", "cpu")


def test_training_leaves_directories_that_other_commands_read(cli):
    shown = cli("multihop", "train", "number", "--seeds", "0,1", *SMALL)
    assert shown.code == 0, shown.err
    runs = [Path(line) for line in shown.out.splitlines()[-2:]]
    assert "test accuracy" in shown.out
    assert "2 seeds" in shown.out
    for run in runs:
        assert {"config.json", "model.safetensors", "profiles.safetensors", "complete.json"} <= {
            f.name for f in run.iterdir()
        }
    again = cli("multihop", "train", "number", "--seeds", "0,1", *SMALL)
    assert again.out == shown.out
    seen = cli("multihop", "dynamics", *runs)
    assert seen.code == 0, seen.err
    assert "1-hop" in seen.out
    assert "effective swaps" in seen.out
    longer = cli("multihop", "lengths", *runs, "--extra", "0,23", "--count", 20, "--device", "cpu")
    assert longer.code == 0, longer.err
    assert "longer inputs" in longer.out
    assert "number 1 best" in longer.out
    only = cli("multihop", "lengths", *runs, "--extra", "0", "--count", 20, "--checkpoint", "last", "--device", "cpu")
    assert "number 1 best" not in only.out
    assert_one_line(cli("multihop", "lengths", *runs, "--checkpoint", "first"), "--checkpoint is 'first'")
    roles = cli("multihop", "roles", runs[0], "--count", 40)
    assert roles.code in (0, 2)  # a model that solves nothing has no roles: one line then
    assert "Traceback" not in roles.err


def test_recipe(cli, tmp_path):
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'tasks = ["letter"]\nseeds = [0]\nextra = [0, 3]\nextra_count = 12\n[options]\nlayers = 1\nwidth = 16\n'
        "steps = 4\nrecord_every = 2\nsequences = 1000\n"
    )
    shown = cli("multihop", "run", recipe, "--device", "cpu")
    assert shown.code == 0, shown.err
    assert "letter 0" in shown.out
    assert "extra tokens" in shown.out
    assert "symbolic ever" in shown.out


def test_constructions_are_right(cli, monkeypatch):
    monkeypatch.setattr(tables, "check_randomly", partial(check_randomly, count=900))  # instead of 100,000
    for kind in ("index", "retrieval"):
        shown = cli("multihop", "construct", kind, "--longest", 8)
        assert shown.code == 0, shown.err
        assert "900" in shown.out
        assert "its bound" in shown.out
    shown = cli("multihop", "construct", "fourier", "--longest", 48)
    assert shown.code == 0, shown.err
    rows = [line.split("│")[1:-1] for line in shown.out.splitlines() if "│" in line]
    r = {(row[0].strip(), row[1].strip()): (float(row[2]), float(row[3])) for row in rows}
    assert all(found == 1 for (name, _), (found, _) in r.items() if name == "additive")
    assert all(abs(found - noise) < 0.1 for (name, _), (found, noise) in r.items() if name == "random")


def test_wrong_input_is_one_line(cli, subtests, tmp_path):
    for arguments, words in (
        (("train", "numbr"), ["did you mean 'number'"]),
        (("train", "number", "--set", "layer=2"), ["did you mean 'layers'"]),
        (("train", "number", "--set", "steps=0"), ["steps is 0"]),
        (("train", "number", "--seeds", "a"), ["--seeds"]),
        (("train", "number", "--seeds", f"0,{2**63}"), [f"seeds is {2**63}"]),
        (("lengths", "nowhere"), ["nowhere"]),
        (("dynamics", "nowhere"), ["nowhere"]),
        (("run", "missing.toml"), ["missing.toml"]),
        (("construct", "both"), ["both"]),
        (("construct", "index", "--longest", "2"), ["--longest is 2"]),
        (("construct", "index", "--longest", "1000000000"), ["--longest is 1000000000", "at most 4096"]),
        (("construct", "retrieval", "--longest", "100000"), ["--longest is 100000", "at most 4096"]),
    ):
        with subtests.test(arguments=arguments):
            assert_one_line(cli("multihop", *arguments), *words)
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    for command in (("multihop", "run"), ("encodings", "run", "--recipe")):
        with subtests.test(command=command):
            assert_one_line(cli(*command, recipe), "empty.toml is empty")
