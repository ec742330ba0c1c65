"""End-to-end: a run directory from nothing to finished, resumed, damaged and healed."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from helpers.runs import CONFIG, KEYS, complete_run, compute, leftovers, open_run, provenance, result_bytes
from wherewhat.errors import StoreError, WherewhatError
from wherewhat.files import config_hash, read_sealed, write_sealed
from wherewhat.runs.directory import RunDirectory
from wherewhat.scores import Column, Scores


def test_a_run_from_nothing_to_finished(tmp_path):
    run, computed = complete_run(tmp_path / "new" / "runs")
    assert computed == KEYS
    assert run.is_complete
    assert run.path.name == f"entropy-tiny-{config_hash(CONFIG)[:12]}"
    assert json.loads((run.path / "config.json").read_text()) == CONFIG
    files = sorted(path.name for path in run.path.iterdir())
    results = ["profiles.safetensors", "provenance.json", "scores.parquet"]
    assert files == [".lock", "complete.json", "config.json", "parts", *results]

    loaded = RunDirectory.load(run.path)
    assert loaded.config == CONFIG
    table = loaded.scores()
    assert table.num_rows == len(KEYS) * 8
    for key in KEYS:
        result = compute(key)
        for layer in result.layers:
            name = f"{key}/{layer.layer}/decay"
            assert torch.equal(loaded.profiles()[name], layer.curves["decay"].values)
            assert loaded.profiles().axes(name) == ("head", "distance")
        stored = [row["value"] for row in table.to_pylist() if row["document"] == key and row["head"] is not None]
        assert stored == [value for layer in result.layers for value in layer.heads["mean"].tolist()]
    content = run.provenance()
    assert content["seconds"] == 0.5 * len(KEYS)
    assert set(content["parts"]) == set(KEYS)
    assert content["created"] <= content["finished"]
    assert content["config_hash"] == config_hash(CONFIG)
    assert content["dtype"] == "float32"
    other = RunDirectory.open(run.path.parent, name="entropy tiny", config={**CONFIG, "tokens": 129})
    assert other.path != run.path
    assert not other.is_complete
    assert not other.has(KEYS[0])


def test_a_finished_run_is_never_computed_or_written_again(tmp_path):
    run, _ = complete_run(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    again, computed = complete_run(tmp_path)
    assert computed == []
    assert again.is_complete
    del before[run.path / ".lock"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shutil.rmtree(run.path / "parts")
    again, computed = complete_run(tmp_path)
    assert computed == []
    assert again.is_complete
    moved = run.path.rename(tmp_path / "kept for the paper")
    assert RunDirectory.load(moved).scores().num_rows == len(KEYS) * 8


def test_an_unfinished_run_resumes_with_the_missing_parts_only(tmp_path, reference):
    run = open_run(tmp_path)
    with run.lock():
        run.save(KEYS[2], compute(KEYS[2]), document=KEYS[2], seconds=0.5)
    assert run.has(KEYS[2])
    assert not run.is_complete
    run, computed = complete_run(tmp_path)
    assert computed == [KEYS[0], KEYS[1], KEYS[3]]
    assert result_bytes(run) == reference


def all_files(run):
    return sorted(path for path in run.path.rglob("*") if path.is_file() and path.name != ".lock")


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "flipped": flip,
    "longer": lambda data: data + b"\0",
    "removed": None,
}


@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(x, marks=pytest.mark.slow) for x in DAMAGES if x != "flipped")]
)
def test_any_damage_to_any_file_is_noticed_and_redone(damage, tmp_path, reference):
    run, _ = complete_run(tmp_path / "runs")
    for finished in (True, False):
        if not finished:
            for name in ("complete.json", "scores.parquet", "profiles.safetensors", "provenance.json"):
                (run.path / name).unlink()
        sound = tmp_path / f"sound {finished}"
        shutil.copytree(tmp_path / "runs", sound)
        for path in all_files(run):
            shutil.rmtree(tmp_path / "runs")
            shutil.copytree(sound, tmp_path / "runs")
            data = path.read_bytes()
            if DAMAGES[damage] is None:
                path.unlink()
            else:
                path.write_bytes(DAMAGES[damage](data))
            healed, computed = complete_run(tmp_path / "runs")
            # A byte more at the end of a JSON file can only be noticed as what it is, so all cases are alike.
            in_part = "parts" in path.parts
            assert len(computed) == (1 if in_part and not finished else 0), path
            assert healed.is_complete
            assert RunDirectory.load(healed.path).is_complete
            assert result_bytes(healed) == reference, path


@pytest.mark.slow
def test_every_single_flipped_bit_of_the_seal_and_the_part_is_noticed(tmp_path):
    run, _ = complete_run(tmp_path)
    for path in (run.path / "complete.json", next((run.path / "parts").glob("B-*")) / "part.json"):
        data = path.read_bytes()
        content = read_sealed(path)
        assert content is not None
        for position in range(0, len(data), 3):
            path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
            assert read_sealed(path) in (None, content), position
        path.write_bytes(data)


def test_damaged_parts_of_a_damaged_run_are_computed_again(tmp_path, reference):
    run, _ = complete_run(tmp_path)
    (run.path / "scores.parquet").write_bytes(b"")
    with pytest.raises(StoreError, match=r"scores\.parquet is missing or damaged; run its command again"):
        RunDirectory.load(run.path)
    part = next((run.path / "parts").glob("a-*"))
    (part / "scores.parquet").write_bytes(b"")
    shutil.rmtree(next((run.path / "parts").glob("B-*")))
    run, computed = complete_run(tmp_path)
    assert computed == ["a", "B"]
    assert result_bytes(run) == reference


def test_parts_of_another_run_or_key_are_not_taken(tmp_path):
    run, _ = complete_run(tmp_path)
    other = RunDirectory.open(tmp_path, name="other", config={**CONFIG, "tokens": 1})
    shutil.copytree(run.path / "parts", other.path / "parts")
    assert not any(other.has(key) for key in KEYS)
    parts = run.path / "parts"
    (run.path / "complete.json").unlink()
    (a, b) = (next(parts.glob("a-*")), next(parts.glob("B-*")))
    shutil.rmtree(a)
    shutil.copytree(b, a)
    _, computed = complete_run(tmp_path)
    assert computed == ["a"]


def test_asking_without_the_lock_changes_nothing(tmp_path):
    run, _ = complete_run(tmp_path)
    (run.path / "complete.json").unlink()
    part = next((run.path / "parts").glob("a-*"))
    (part / "scores.parquet").write_bytes(b"")
    before = all_files(run)
    looker = open_run(tmp_path)
    assert not looker.has("a")
    assert looker.has("B")
    assert all_files(run) == before
    with pytest.raises(RuntimeError, match="needs the lock"):
        looker.save("a", compute("a"), seconds=0)
    with pytest.raises(RuntimeError, match="needs the lock"):
        looker.finish(KEYS, provenance=provenance())


def test_leftovers_of_dead_processes_are_removed(tmp_path, reference):
    run = open_run(tmp_path)
    with run.lock():
        run.save("a", compute("a"), document="a", seconds=0.5)
    (run.path / ".tmp-0123").write_bytes(b"half a file")
    (run.path / "parts" / ".tmp-4567").mkdir()
    (run.path / "parts" / ".tmp-4567" / "scores.parquet").write_bytes(b"half a file")
    run, _ = complete_run(tmp_path)
    assert not leftovers(tmp_path)
    assert result_bytes(run) == reference


def test_misuse_is_told(tmp_path):
    run = open_run(tmp_path)
    with pytest.raises(StoreError, match="the run is not finished"):
        run.scores()
    with run.lock():
        with pytest.raises(RuntimeError, match="locked by this object"), run.lock():
            pass
        run.save("a", compute("a"), document="a", seconds=0)
        with pytest.raises(ValueError, match="finished already"):
            run.save("a", compute("a"), document="a", seconds=0)
        with pytest.raises(StoreError, match="the part 'b' is missing or damaged; run the command again"):
            run.finish(["a", "b"], provenance=provenance())
        with pytest.raises(StoreError, match="at least one part"):
            run.finish([], provenance=provenance())
        without = replace(compute("a"), layers=[replace(one, curves={}) for one in compute("a").layers])
        run.save("c", without, document="a", seconds=0)
        with pytest.raises(StoreError, match="share one key"):
            run.finish(["a", "c"], provenance=provenance())


def test_a_run_that_finished_nothing_leaves_nothing(tmp_path):
    run = open_run(tmp_path / "a" / "b")

    def fail(error):
        with run.lock():
            assert (run.path / "config.json").exists()
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            fail(error)
        assert list(tmp_path.iterdir()) == []
    scores = Scores(curves={"a/b": Column(torch.ones(1), ("x",))})
    with run.lock(), pytest.raises(StoreError, match="holds a slash"):
        run.save("a", scores, seconds=0)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder_is_left_alone(tmp_path):
    path = open_run(tmp_path).path
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"is not a run directory, it holds 'thesis\.tex': choose another folder"):
        open_run(tmp_path)
    with pytest.raises(StoreError, match=r"is not a run directory: it has no readable config\.json"):
        RunDirectory.load(path)
    with pytest.raises(StoreError, match="is not a run directory"):
        RunDirectory.load(tmp_path / "missing")
    with pytest.raises(StoreError, match="is not a run directory"):
        RunDirectory.load(path / "thesis.tex")
    assert [entry.name for entry in path.iterdir()] == ["thesis.tex"]


def test_a_changed_configuration_is_told_by_load_and_restored(tmp_path):
    run, _ = complete_run(tmp_path)
    before = (run.path / "config.json").read_bytes()
    (run.path / "config.json").write_text(json.dumps({**CONFIG, "tokens": 4096}))
    with pytest.raises(StoreError, match=r"complete\.json belongs to the configuration [0-9a-f]{64}, not "):
        RunDirectory.load(run.path)
    (run.path / "config.json").write_text(json.dumps(json.loads(before)))
    again = open_run(tmp_path)
    assert not again.is_complete
    with again.lock():
        assert (run.path / "config.json").read_bytes() == before


def test_two_configurations_with_one_folder_name_are_kept_apart(tmp_path, monkeypatch):
    # The first 12 digits of two hashes cannot be made to meet by trying, so the name is made to hold fewer.
    monkeypatch.setattr("wherewhat.files.HASH_DIGITS", 0)
    monkeypatch.setattr("wherewhat.runs.directory.HASH_DIGITS", 0)
    complete_run(tmp_path)
    with pytest.raises(StoreError, match=r"belongs to the configuration [0-9a-f]{64}, not .*: choose another"):
        RunDirectory.open(tmp_path, name="entropy tiny", config={"other": 1})


def test_a_newer_schema_is_refused_and_kept(tmp_path):
    for which in ("complete.json", "part.json"):
        run, _ = complete_run(tmp_path / which)
        path = run.path / which
        if which == "part.json":
            (run.path / "complete.json").unlink()
            path = next((run.path / "parts").glob("a-*")) / which
        content = read_sealed(path)
        write_sealed(path, {**content, "schema": 999})
        with pytest.raises(StoreError, match="has schema version 999, newer than 3 known here: upgrade wherewhat"):
            complete_run(tmp_path / which)
        assert read_sealed(path) == {**content, "schema": 999}


def test_a_run_of_an_older_schema_is_computed_again(tmp_path):
    run, _ = complete_run(tmp_path)
    for path in [run.path / "complete.json", *(run.path / "parts").glob("*/part.json")]:
        write_sealed(path, {**read_sealed(path), "schema": 1})
    with pytest.raises(StoreError, match="schema version 1, older than 3; run its command again"):
        RunDirectory.load(run.path)
    assert complete_run(tmp_path)[1] == KEYS


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_files_that_are_no_files_are_written_again(tmp_path, subtests):
    run, _ = complete_run(tmp_path)
    before = result_bytes(run)
    kinds = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "loop": lambda path: path.symlink_to(path.name),
        "sparse": lambda path: (path.touch(), os.truncate(path, 1 << 42)),
        "deep": lambda path: path.write_text('{"a":' * 100_000),
    }
    for name in ("config.json", "complete.json", "scores.parquet", "profiles.safetensors"):
        for kind, make in kinds.items():
            with subtests.test(name=name, kind=kind):
                (run.path / name).unlink()
                make(run.path / name)
                with pytest.raises(StoreError) as refused:
                    RunDirectory.load(run.path)
                assert "\n" not in str(refused.value)
                complete_run(tmp_path)
                assert result_bytes(run) == before


def test_names_of_run_directories_that_no_system_accepts():
    for name in ("", "a\0b", "x" * 300, "~nosuchuser/x"):
        for function in (RunDirectory.load, lambda path: RunDirectory.open(path, name="x", config=CONFIG)):
            with pytest.raises(WherewhatError):
                function(name)
