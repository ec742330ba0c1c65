"""End-to-end: places that cannot be written end in one line and stay as they were."""

import errno
import os
import resource
import subprocess
import tempfile
from pathlib import Path

import pytest

from helpers.runs import KEYS, complete_run, compute, leftovers, open_run, provenance, result_bytes
from wherewhat.errors import StoreError


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def error_line(parent):
    try:
        complete_run(parent)
    except StoreError as error:
        return str(error)
    return "no error"


def test_parent_or_run_folder_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    for parent in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(StoreError, match=r"cannot make the folder .*file is not a folder$"):
            complete_run(parent)
    assert tree(tmp_path) == ["file"]
    path = open_run(tmp_path).path
    path.write_text("x")
    with pytest.raises(StoreError, match="is not a folder"):
        complete_run(tmp_path)
    assert path.read_text() == "x"


def _as_nobody(parent, answer):
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)  # the superuser may write anywhere
    answer.put(error_line(Path(parent)))


def test_unwritable_parent(processes):
    # Not under tmp_path: another user may not even look in there.
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder) / "runs"
        parent.mkdir()
        parent.chmod(0o555)
        Path(folder).chmod(0o755)
        answer = processes.Queue()
        process = processes.Process(target=_as_nobody, args=(str(parent), answer))
        process.start()
        line = answer.get(timeout=60)
        process.join()
        assert line == f"cannot write to {parent}: permission denied; choose another folder"
        assert tree(Path(folder)) == ["runs"]


def _read_as_nobody(parent, answer):
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    run = open_run(Path(parent))
    answer.put((run.is_complete, run.scores().num_rows, len(run.profiles())))


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user who may read and not write")
def test_a_finished_run_can_be_read_where_nothing_can_be_written(processes):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        complete_run(Path(folder) / "runs")
        answer = processes.Queue()
        process = processes.Process(target=_read_as_nobody, args=(str(Path(folder) / "runs"), answer))
        process.start()
        assert answer.get(timeout=60) == (True, 8 * len(KEYS), 2 * len(KEYS))
        process.join()


class Failing:
    """Makes one kind of call fail from its n-th time on, as a full disk does."""

    def __init__(self, name, first):
        self.real = getattr(os, name)
        self.left = first
        self.failed = False

    def __call__(self, *args, **kwargs):
        if self.left == 0:
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.left -= 1
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("call", ["replace", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fsync", "mkdir"))])
def test_disk_full_at_any_moment_keeps_finished_parts_and_nothing_half_written(call, tmp_path, monkeypatch, reference):
    for first in range(200):
        parent = tmp_path / f"{first}"
        with monkeypatch.context() as patch:
            failing = Failing(call, first)
            patch.setattr(os, call, failing)
            line = error_line(parent)
        assert not leftovers(tmp_path)
        if not failing.failed:
            break
        assert "No space left on device" in line
        assert str(parent) in line
        assert "\n" not in line
        if parent.exists():  # only where a part was finished
            finished = [key for key in KEYS if open_run(parent).has(key)]
            assert finished
            assert len(tree(open_run(parent).path / "parts")) == 4 * len(finished)
        run, _ = complete_run(parent)
        assert result_bytes(run) == reference
    else:
        pytest.fail("the call never stopped failing")
    assert first > 5


def _with_small_files(parent, limit, answer):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    answer.put(error_line(Path(parent)))


def test_writes_that_the_system_really_refuses(tmp_path, processes, reference):
    for limit in (50, 700, max(map(len, reference.values())) - 1):
        answer, parent = processes.Queue(), tmp_path / str(limit)
        process = processes.Process(target=_with_small_files, args=(str(parent), limit, answer))
        process.start()
        line = answer.get(timeout=60)
        process.join()
        assert line.endswith("File too large")
        assert not leftovers(tmp_path)
        run, _ = complete_run(parent)
        assert result_bytes(run) == reference


def test_a_disk_that_is_really_full(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        parent = tmp_path / "runs"
        run = open_run(parent)
        saved = []

        def fill():
            with run.lock():
                while True:
                    key = str(len(saved))
                    run.save(key, compute(key), document=key, seconds=0)
                    saved.append(key)

        with pytest.raises(StoreError, match=r"No space left on device$"):
            fill()
        assert saved
        assert not leftovers(tmp_path)
        assert all(open_run(parent).has(key) for key in saved)
        subprocess.run(["mount", "-o", "remount,size=8m", str(tmp_path)], check=True)
        with run.lock():
            assert not run.has("last")
            run.save("last", compute("last"), document="last", seconds=0)
            run.finish([*saved, "last"], provenance=provenance())
        assert open_run(parent).is_complete
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "other").write_bytes(bytes(1 << 24))
        with pytest.raises(StoreError, match=r"No space left on device$"):
            complete_run(tmp_path / "more")
        assert not (tmp_path / "more").exists()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
