"""Parity and end-to-end: engines give the same bytes, and killed workers neither lose nor repeat anything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sweep import light, mortal
from sweep.watching import Told
from wherewhat.errors import StoreError
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import run
from wherewhat.runs.storage import Remote, open_place
from wherewhat.sweep import execution as working
from wherewhat.sweep import local_engine
from wherewhat.sweep.cells import expand, located, request_json
from wherewhat.sweep.engine import CellTask, EngineError
from wherewhat.sweep.execution import sweep
from wherewhat.sweep.local_engine import run_locally
from wherewhat.sweep.schedule import Job

# Every axis with two values, and a cell for every moment of ``mortal``: each death costs a process that imports torch.
SWEEP = {
    "models": ["tiny", {"model": "grown", "checkpoints": ["step-*"], "weights": ["random"]}],
    "texts": ["a.txt", "b.txt"],
    "measurements": ["attention"],
    "tokens": 24,
}


def results(store: Path) -> dict[str, bytes]:
    """Everything that must not depend on who measured, by path, sorted; each run is read and checked."""
    runs = sorted(path for path in store.iterdir() if path.name != "sweeps" and path.name[0] != ".")
    for path in runs:
        RunDirectory.load(path)
    names = ("config.json", "scores.parquet", "profiles.safetensors")
    return {f"{path.name}/{name}": (path / name).read_bytes() for path in runs for name in names}


@pytest.fixture(scope="module")
def undisturbed(sweep_home, tmp_path_factory, processes) -> Path:
    """The store of the sweep by one local worker that nobody disturbs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sweep_home)
        patch.setattr(local_engine, "multiprocessing", SimpleNamespace(get_context=lambda kind: processes))
        folder = tmp_path_factory.mktemp("undisturbed")
        path = folder / "sweep.json"
        path.write_text(json.dumps(SWEEP))
        from wherewhat.sweep.file import read_sweep_file

        outcome = sweep(read_sweep_file(path), watch=Told(), store=str(folder / "runs"), workers=1)
    assert {record.state for record in outcome.records.values()} == {"done"}
    assert len(outcome.cells) == 6
    return folder / "runs"


@pytest.fixture(scope="module")
def expected(undisturbed):
    return results(undisturbed)


@pytest.mark.usefixtures("forked")
def test_a_sweep_gives_the_bytes_of_single_runs_and_does_nothing_twice(sweep_file, tmp_path):
    file = sweep_file({**SWEEP, "models": ["tiny"], "weights": ["trained", "random"], "texts": ["a.txt"]})
    watch = Told()
    outcome = sweep(file, watch=watch, store=str(tmp_path / "runs"), workers=1)
    assert sorted(watch.ended) == sorted((cell, "done") for cell in outcome.cells)
    for cell in outcome.cells.values():
        run(cell.request, out=tmp_path / "single")
    assert len(outcome.cells) == 2
    assert results(tmp_path / "runs") == results(tmp_path / "single")
    again = Told()
    sweep(file, watch=again, store=str(tmp_path / "runs"), workers=1)
    assert again.plan is None


@pytest.mark.usefixtures("forked")
def test_a_sweep_is_measured_anew_and_resumed(sweep_file, tmp_path):
    file = sweep_file({**SWEEP, "models": ["tiny"], "texts": ["a.txt"]})
    more = sweep_file({**SWEEP, "models": ["tiny"], "texts": ["a.txt", "b.txt"]}, name="more.json")
    options = {"store": str(tmp_path / "runs"), "workers": 1}
    outcome = sweep(file, watch=Told(), **options)
    assert len(sweep(more, watch=Told(), **options).cells) == 2
    (record,) = outcome.records.values()
    path = tmp_path / "runs" / record.run / "provenance.json"
    before = json.loads(path.read_text())["finished"]
    anew = Told()
    sweep(file, watch=anew, again=True, **options)
    assert [state for _, state in anew.ended] == ["done"]
    after = json.loads(path.read_text())["finished"]
    assert after > before
    outcome.folder.forget(outcome.cells)  # as if it had been killed, also for the other sweep with this cell
    resumed = Told()
    sweep(more, watch=resumed, **options)
    assert resumed.plan == (1, 1, 0)
    assert json.loads(path.read_text())["finished"] == after


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "fixture"), [("local", "forked"), ("ray", "ray_cluster")], ids=["local", "ray"])
def test_killed_workers_lose_nothing_and_repeat_nothing(engine, fixture, expected, sweep_file, tmp_path, request):
    """Nor do they change a byte of what one local worker writes that nobody kills."""
    request.getfixturevalue(fixture)
    watch = Told()
    options = {"workers": 2} if engine == "local" else {}
    store = tmp_path / "runs"
    outcome = sweep(sweep_file(SWEEP), watch=watch, store=str(store), engine=engine, work=mortal.perform, **options)
    deaths = [path.name for path in (tmp_path / "deaths").iterdir()]
    assert len(deaths) >= 5
    moments = {mortal.moment_of(outcome.cells[cell].described) for cell in deaths}
    assert moments == {"before", "part written", "run finished", "record written"}
    assert results(store) == expected
    assert sorted(watch.ended) == sorted((cell, "done") for cell in outcome.cells)
    assert sorted(outcome.folder.records(outcome.cells)) == sorted(outcome.cells)
    computed = (tmp_path / "log").read_text().splitlines()
    assert len(computed) == len(set(computed)) == len(outcome.cells)
    assert watch.workers.startswith("Ray: 1 node, 2 CPUs" if engine == "ray" else "2 local processes")


@pytest.mark.usefixtures("forked")
def test_a_cell_that_kills_every_worker_is_recorded_and_the_rest_goes_on(tmp_path):
    tasks = [CellTask(cell=f"c{i}", described=f"cell {i}", store=str(tmp_path), sweep="s") for i in range(2)]
    watch = Told()
    run_locally(tasks, slots=[{}], work=light.always_dies, watch=watch, retries=1)
    assert watch.ended == [("c0", "failed"), ("c1", "failed")]
    record = json.loads((tmp_path / "sweeps/s/cells/c0.json").read_text())
    assert record["reason"].startswith("its worker process died 2 times (killed by SIGKILL)")
    assert record["attempts"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_any_address_of_fsspec_gets_the_same_runs(expected, sweep_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))
    outcome = sweep(sweep_file(SWEEP), watch=Told(), store=f"file://{tmp_path}/remote", workers=1)
    assert not outcome.failed
    assert results(tmp_path / "remote") == expected
    assert not list((tmp_path / "cache/sweeps").glob("*/*/*"))  # what was uploaded is not kept twice
    again = Told()
    sweep(sweep_file(SWEEP), watch=again, store=f"file://{tmp_path}/remote", workers=1)
    assert again.plan is None


def test_an_upload_that_never_arrives_fails_and_keeps_the_run(sweep_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (cell,) = expand(sweep_file({**SWEEP, "models": ["tiny"], "texts": ["a.txt"]}))
    task = CellTask(
        cell=cell.id,
        described=cell.described,
        request=request_json(located(cell.request)),
        store=f"file://{tmp_path}/remote",
        sweep="s",
        threads=torch.get_num_threads(),
    )
    job = Job(tasks=(task,))
    real = Remote.write

    def write(self, name, content):
        real(self, name, b"damaged" if name.endswith("scores.parquet") else content)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "write", write)
        (record,) = working.perform(job)
    assert record.state == "failed"
    assert "differs from what was uploaded: start again" in record.reason
    (kept,) = (tmp_path / "cache/sweeps").glob("*/*/complete.json")
    (again,) = working.perform(job)
    assert again.done
    assert not kept.exists()
    RunDirectory.load(tmp_path / "remote" / again.run)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_sweep_finds_what_another_one_did(undisturbed, sweep_file, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs")
    watch = Told()
    both = {**SWEEP, "models": ["tiny"], "texts": ["a.txt"], "measurements": ["attention", "axes"]}
    outcome = sweep(sweep_file(both), watch=watch, store=str(tmp_path / "runs"), workers=1)
    assert watch.plan == (1, 1, 0)
    assert [cell.rsplit("-", 3)[0] for cell, _ in watch.ended] == ["axes"]
    assert len(outcome.records) == 2


@pytest.mark.parametrize(
    ("engine", "fixture"), [("local", "forked"), pytest.param("ray", "ray_cluster", marks=pytest.mark.slow)]
)
def test_a_store_that_cannot_be_written_ends_the_sweep(engine, fixture, sweep_file, tmp_path, request):
    request.getfixturevalue(fixture)
    with pytest.raises(StoreError, match="No space left"):
        sweep(sweep_file(SWEEP), watch=Told(), store=str(tmp_path / "runs"), engine=engine, work=light.full)


def test_a_cluster_whose_head_does_not_answer_is_gone(monkeypatch):
    from wherewhat.sweep import ray_engine as on_ray

    monkeypatch.setattr(on_ray, "_SILENCE", 0.0)
    head = on_ray._Head("127.0.0.1:9")
    with pytest.raises(EngineError, match=r"the Ray cluster is lost .* finished cells are kept"):
        head.check()


def test_places_with_the_same_content_read_alike(tmp_path):
    for address in (str(tmp_path / "plain"), f"file://{tmp_path}/remote", "memory://sweep-places"):
        place = open_place(address)
        place.check()
        assert place.names("sweeps/x") == []
        assert place.read("sweeps/x/nothing") is None
        place.write("sweeps/x/one", b"1")
        place.write("sweeps/x/two", b"2")
        place.write("sweeps/x/two", b"22")
        assert place.names("sweeps/x") == ["one", "two"]
        assert place.names("sweeps") == ["x"]
        assert place.read("sweeps/x/two") == b"22"
        named = ["sweeps/x/one", "sweeps/x/two", "sweeps/x/three"]
        assert place.read_many(named) == {"sweeps/x/one": b"1", "sweeps/x/two": b"22"}
