"""Parity and identity: workers keep their model and share documents, and the bytes are those of one worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.command_line import assert_one_line
from sweep import meeting
from sweep.test_engines import results
from sweep.watching import Told
from wherewhat.runs.execution import LastModel
from wherewhat.runs.storage import Folder
from wherewhat.runs.subject import ModelSubject
from wherewhat.sweep import execution, local_engine, ray_engine
from wherewhat.sweep.cells import expand
from wherewhat.sweep.engine import CellTask, EngineError, Resources
from wherewhat.sweep.execution import sweep
from wherewhat.sweep.file import read_sweep_file
from wherewhat.sweep.records import statuses
from wherewhat.sweep.schedule import Job, Schedule

PROSE = "the cat sat on a mat and the dog ran . a dog and a cat ran on the mat . "
ENGINES = [("local", "forked"), pytest.param("ray", "ray_cluster", marks=pytest.mark.slow)]


def task(name, model="m", texts="t", **options):
    return CellTask(cell=name, described=name, model=model, texts=texts, store="nowhere", sweep="s", **options)


def names(job):
    return [task.cell for task in job.tasks]


def test_a_worker_stays_with_its_model_and_others_take_models_that_nobody_has():
    tasks = [task(f"{model}{text}{i}", model, text) for model in "mn" for text in "ab" for i in range(2)]
    schedule = Schedule(tasks, retries=0)
    first = schedule.next("", [], workers=2)
    assert names(first) == ["ma0", "ma1"]  # the measurements of one text set together
    second = schedule.next("", ["m"], workers=2)
    assert names(second) == ["na0", "na1"]
    schedule.ended(first)
    third = schedule.next("m", ["n"], workers=2)
    assert third.model == "m"
    for job in (second, third, schedule.next("n", ["m"], workers=1)):
        schedule.ended(job)
    assert not schedule


def test_a_job_is_split_where_workers_would_be_idle():
    tasks = [task("a", documents=9), task("b", documents=9), task("all", documents=1)]
    schedule = Schedule(tasks, retries=0)
    assert schedule.useful(100) == 5
    assert schedule.useful(3) == 3
    jobs = [schedule.next("m", ["m"], workers=3) for _ in range(4)]
    assert [(names(job), job.share) for job in jobs] == [
        (["a", "b"], (0, 3)),
        (["a", "b"], (1, 3)),
        (["a", "b"], (2, 3)),
        (["all"], None),
    ]
    assert schedule.next("m", [], workers=3) is None  # the cells are finished once all shares have ended
    for job in jobs:
        assert schedule
        schedule.ended(job)
    last = schedule.next("m", [], workers=3)
    assert (names(last), last.share) == (["a", "b"], None)
    schedule.ended(last)
    assert not schedule


def test_cells_without_shares_are_spread_as_they_are():
    schedule = Schedule([task(name) for name in "abcd"], retries=0)
    jobs = [schedule.next("m", [], workers=3) for _ in range(3)]
    assert [names(job) for job in jobs] == [["a", "d"], ["b"], ["c"]]


def test_enough_jobs_are_not_split():
    schedule = Schedule([task(f"{i}", texts=f"{i}", documents=8) for i in range(4)], retries=0)
    assert [schedule.next("m", [], workers=2).share for _ in range(3)] == [None] * 3
    assert schedule.next("m", [], workers=2).share == (0, 2)


def test_a_worker_gets_what_its_memory_suffices_for():
    schedule = Schedule([task("large", "large", memory=9), task("small", "small", memory=3)], retries=0)
    assert schedule.model("", []) == "large"
    assert schedule.next("", [], workers=1, memory=2) is None
    assert names(schedule.next("large", [], workers=1, memory=4)) == ["small"]


def test_cells_that_died_together_are_tried_alone(tmp_path):
    schedule = Schedule([task("a"), task("b")], retries=0)
    together = schedule.next("", [], workers=1)
    assert schedule.died(together, "SIGKILL") == []
    a, b = (schedule.next("", [], workers=1) for _ in range(2))
    assert (names(a), names(b)) == (["a"], ["b"])
    schedule.ended(b)
    alone = Schedule([CellTask(cell="c", described="c", store=str(tmp_path), sweep="s")], retries=1)
    assert alone.died(alone.next("", [], workers=1), "SIGKILL") == []
    ((given_up, record),) = alone.died(alone.next("", [], workers=1), "SIGKILL")
    assert given_up.cell == "c"
    assert record.attempts == 2
    assert not alone


def test_a_share_that_dies_too_often_is_left_to_the_job_that_finishes():
    schedule = Schedule([task("a", documents=4)], retries=1)
    first, second = (schedule.next("", [], workers=2) for _ in range(2))
    schedule.ended(first)
    assert schedule.died(second, "SIGKILL") == []
    again = schedule.next("", [], workers=2)
    assert again.share == second.share
    assert schedule.died(again, "SIGKILL") == []
    assert schedule.next("", [], workers=2).share is None


def test_documents_are_counted_where_they_are_measured_separately(sweep_file, tmp_path):
    write_documents(tmp_path / "many.jsonl", 8)
    values = {"models": ["tiny"], "texts": [str(tmp_path / "many.jsonl"), {"prompts": "random", "documents": 5}]}
    cells = expand(sweep_file({**values, "measurements": ["attention", "split", "prompts"], "tokens": 16}))
    counts = {(cell.request.measurement, cell.text): cell.documents for cell in cells}
    assert counts["attention", "many"] == 8
    assert counts["attention", "random prompts"] == 5
    assert counts["split", "many"] == 1
    assert counts["prompts", None] > 1


def write_documents(path: Path, count: int, start: int = 0) -> None:
    texts = [PROSE[i:] + 3 * PROSE for i in range(start, start + count)]
    lines = [{"name": f"document {i}", "text": text} for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "fixture"), ENGINES)
def test_two_workers_load_a_model_at_most_twice(engine, fixture, sweep_file, tmp_path, request):
    request.getfixturevalue(fixture)
    for i in range(8):
        write_documents(tmp_path / f"{i}.jsonl", 1 + i % 2, start=i)
    texts = {f"set {i}": str(tmp_path / f"{i}.jsonl") for i in range(8)}
    measurements = ["attention", "axes", "planes", {"measurement": "attention", "set": {"sink_tokens": 2}}]
    file = sweep_file({"models": ["tiny"], "texts": texts, "measurements": measurements, "tokens": 12})
    options = {"workers": 2} if engine == "local" else {}
    outcome = sweep(file, watch=Told(), store=str(tmp_path / "runs"), engine=engine, **options)
    assert len(outcome.records) == 32
    assert not outcome.failed
    (status,) = statuses(Folder(tmp_path / "runs"))
    assert 1 <= status.loads == outcome.folder.loads() <= 2


# Texts of this length go through the model two at a time, which are four batches.
MANY = {"models": ["tiny"], "measurements": ["attention", "axes", "split"], "tokens": 64, "beyond": True}


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A text set of eight documents."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    write_documents(path, 8)
    return path


@pytest.fixture(scope="module")
def whole(many, sweep_home, tmp_path_factory, processes) -> dict[str, bytes]:
    """The results of one local worker, which measures every cell as a whole."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "sweep.json"
    path.write_text(json.dumps({**MANY, "texts": {"many": str(many)}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sweep_home)
        patch.setattr(local_engine, "multiprocessing", SimpleNamespace(get_context=lambda kind: processes))
        outcome = sweep(read_sweep_file(path), watch=Told(), store=str(folder / "runs"), workers=1)
    assert not outcome.failed
    return results(folder / "runs")


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """The numbers of texts of the passes of workers in this process, which has one after another."""

    def run_here(tasks, *, work, retries, **_):
        schedule = Schedule(tasks, retries=retries)
        while job := schedule.next("", [], workers=1):
            work(job)
            schedule.ended(job)

    texts, plain = [], ModelSubject.run
    monkeypatch.setattr(execution, "run_locally", run_here)
    monkeypatch.setattr(execution, "_MODELS", LastModel())
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(
        ModelSubject, "run", lambda self, ids, *a, **k: texts.append(len(ids)) or plain(self, ids, *a, **k)
    )
    return texts


TWO = {**MANY, "measurements": ["attention", "axes"]}


def test_cells_of_one_model_and_text_set_share_their_passes(many, passes, sweep_file, tmp_path, whole):
    outcome = sweep(sweep_file({**TWO, "texts": {"many": str(many)}}), watch=Told(), store=str(tmp_path / "runs"))
    assert [record.state for record in outcome.records.values()] == ["done", "done"]
    assert passes == [2, 2, 2, 2]
    assert results(tmp_path / "runs").items() <= whole.items()


def test_shares_are_whole_batches_and_share_their_passes(many, passes, sweep_file, tmp_path, whole):
    def by_shares(job):
        for number, batches in enumerate((1, 1, 2)):
            assert execution.perform(replace(job, share=(number, 3))) == []
            assert passes == [2] * batches
            assert execution.perform(replace(job, share=(number, 3))) == []  # what is there is not measured again
            assert passes == [2] * batches
            passes.clear()
        assert len(list((tmp_path / "runs").glob("*/parts/*"))) == 2 * 8
        assert not list((tmp_path / "runs").glob("*/complete.json"))
        return execution.perform(job)

    file = sweep_file({**TWO, "texts": {"many": str(many)}})
    outcome = sweep(file, watch=Told(), store=str(tmp_path / "runs"), work=by_shares)
    assert [record.state for record in outcome.records.values()] == ["done", "done"]
    assert passes == []
    assert results(tmp_path / "runs").items() <= whole.items()


def test_an_error_of_a_shared_pass_is_that_of_its_cell(many, passes, sweep_file, tmp_path):
    file = sweep_file({**TWO, "texts": {"many": str(many)}})
    outcome = sweep(file, watch=Told(), store=str(tmp_path / "runs"), work=meeting.faulty)
    assert [(cell[:4], record.reason) for cell, record in outcome.failed.items()] == [
        ("axes", "ZeroDivisionError: nothing to divide by")
    ]
    assert passes == [2, 2, 2, 2]


@pytest.mark.parametrize(("engine", "fixture"), ENGINES)
def test_workers_share_the_documents_of_one_model(engine, fixture, many, whole, sweep_file, tmp_path, request):
    request.getfixturevalue(fixture)
    watch = Told()
    options = {"workers": 2} if engine == "local" else {}
    file = sweep_file({**MANY, "texts": {"many": str(many)}})
    store = tmp_path / "runs"
    outcome = sweep(file, watch=watch, store=str(store), engine=engine, work=meeting.meeting, **options)
    assert sorted(watch.ended) == sorted((cell, "done") for cell in outcome.cells)
    assert results(store) == whole
    lines = [line.split(maxsplit=1) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({part for _, part in lines}) == len(lines) == 2 * 8 + 2  # two measurements, axes' means, and split
    for measurement in ("attention", "axes"):
        assert len({worker for worker, part in lines if part.startswith(measurement)}) == 2
    assert outcome.folder.loads() == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_workers_with_a_remote_store_exchange_parts(many, whole, sweep_file, tmp_path):
    file = sweep_file({**MANY, "texts": {"many": str(many)}})
    remote = tmp_path / "runs"
    outcome = sweep(file, watch=Told(), store=f"file://{remote}", workers=2, work=meeting.distant)
    assert not outcome.failed
    assert results(remote) == whole
    lines = [line.split(maxsplit=1) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({part for _, part in lines}) == len(lines) == 2 * 8 + 2
    assert len({worker for worker, part in lines if part.startswith("axes")}) == 2
    assert not list((tmp_path / "cache").glob("*/sweeps/*/*"))
    assert not list(remote.glob("sweeps/*/parts/*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_workers_that_die_with_their_shares_lose_nothing_and_repeat_nothing(many, whole, sweep_file, tmp_path):
    watch, store = Told(), tmp_path / "runs"
    file = sweep_file({**MANY, "texts": {"many": str(many)}})
    outcome = sweep(file, watch=watch, store=str(store), workers=2, work=meeting.dying)
    assert sorted(watch.ended) == sorted((cell, "done") for cell in outcome.cells)
    assert len(list((tmp_path / "deaths").iterdir())) >= 3
    assert results(store) == whole
    lines = [line.split(maxsplit=1)[1] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(set(lines)) == len(lines)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("parts", [3, 17])
def test_an_interrupted_sweep_is_resumed(parts, many, whole, sweep_file, tmp_path):
    """Interrupted among the shares of the documents, and later."""
    file, store, log = sweep_file({**MANY, "texts": {"many": str(many)}}), tmp_path / "runs", tmp_path / "log"

    def interrupt():
        meeting.wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= parts)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep(file, watch=Told(), store=str(store), workers=2, work=meeting.slow)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(statuses(Folder(store))[0].records) < 3
    outcome = sweep(file, watch=Told(), store=str(store), workers=2, work=meeting.perform)
    assert not outcome.failed
    assert results(store) == whole
    lines = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    assert len(set(lines)) == len(lines)


def test_a_worker_with_a_broken_gpu_ends(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    execution._leave_broken_device()  # a process that has not used a GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SystemExit):
        execution.perform(Job(tasks=(task("a"),)))


@pytest.mark.usefixtures("forked")
def test_an_error_of_one_cell_does_not_stop_the_others_of_its_text(many, sweep_file, tmp_path):
    file = sweep_file({**MANY, "texts": {"many": str(many)}})
    outcome = sweep(file, watch=Told(), store=str(tmp_path / "runs"), workers=2, work=meeting.faulty)
    ((cell, record),) = outcome.failed.items()
    assert cell.startswith("axes")
    assert record.reason == "ZeroDivisionError: nothing to divide by"
    assert len(outcome.records) == 3


@pytest.mark.slow
def test_a_node_that_is_killed_changes_no_byte(many, whole, sweep_home, tmp_path):
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({**MANY, "texts": {"many": str(many)}}))
    search = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "sweep.two_nodes", str(file), str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": search}
    ended = subprocess.run(command, cwd=sweep_home, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "stopped").exists()
    assert results(tmp_path / "runs") == whole


@pytest.fixture
def closed_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
def test_a_cluster_that_cannot_be_reached_is_one_line(closed_address, sweep_home, tmp_path):
    """In a process of its own, whose output has what Ray's own library prints."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed")
    values = {"models": [str(sweep_home / "tiny")], "texts": [str(sweep_home / "a.txt")], "measurements": ["axes"]}
    (tmp_path / "sweep.json").write_text(json.dumps(values))
    command = [sys.executable, "-m", "wherewhat", "sweep", "sweep.json", "--engine", "ray", "--address", closed_address]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    outcome = SimpleNamespace(code=ended.returncode, out=ended.stdout, err=ended.stderr)
    assert_one_line(outcome, f"the Ray cluster at {closed_address} cannot be reached: ")


def test_ray_does_not_look_for_a_cluster_that_cannot_be_reached(closed_address, monkeypatch):
    services = SimpleNamespace(canonicalize_bootstrap_address=lambda address: address)
    ray = SimpleNamespace(is_initialized=lambda: False, init=None, _private=SimpleNamespace(services=services))
    monkeypatch.setitem(sys.modules, "ray", ray)
    options = {"resources": Resources(), "work": None, "watch": Told()}
    for address in (closed_address, f"ray://{closed_address}", "127.0.0.1", "127.0.0.1:many"):
        with pytest.raises(EngineError, match=rf"^the Ray cluster at {address} cannot be reached: "):
            ray_engine.run_on_ray([], address=address, **options)


def test_a_server_that_says_nothing_is_no_cluster():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(TimeoutError, match=r"no answer from 127.0.0.1:\d+ within 0.1 s"),
    ):
        ray_engine._greet("127.0.0.1", server.getsockname()[1], timeout=0.1)
