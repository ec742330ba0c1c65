"""Identity: after any failure the old content is whole and nothing temporary remains; equal settings have one hash."""

import errno
import hashlib
import itertools
import json
import os
import time

import pytest
import torch

from helpers.runs import leftovers
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import (
    atomic_file,
    atomic_folder,
    canonical_json,
    config_hash,
    file_sha256,
    fingerprints,
    make_folder,
    model_file_sha256,
    remove_temporaries,
    write_file,
    write_parts,
)


def failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def test_failing_file_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, b"old")
    for call, code in itertools.product(("fsync", "replace"), (errno.ENOSPC, errno.EIO, errno.EACCES)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(code))
            with pytest.raises(StoreError) as caught:
                write_file(path, b"new")
        assert str(caught.value) == f"cannot write {path}: {os.strerror(code)}"
        assert path.read_bytes() == b"old", call
        assert list(tmp_path.iterdir()) == [path], call


def test_parts_are_written_one_after_another_with_the_fingerprint_of_the_file(tmp_path, monkeypatch):
    parts = [b"head", memoryview(b"abc"), b"", torch.arange(5.0).numpy()]
    for kept in (parts, []):
        fingerprint = write_parts(tmp_path / "file", kept)
        assert (tmp_path / "file").read_bytes() == b"".join(bytes(part) for part in kept)
        assert fingerprints(tmp_path, ["file"]) == {"file": fingerprint}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(StoreError, match="No space left on device"):
            write_parts(tmp_path / "file", parts)
    assert (tmp_path / "file").read_bytes() == b""
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_file(path, b"old")

    def fill():
        with atomic_file(path) as file:
            file.write(b"half")
            failing(errno.ENOSPC)()

    with pytest.raises(StoreError, match="No space left on device"):
        fill()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_failing_folder_leaves_nothing(tmp_path, monkeypatch):
    def fill():
        with atomic_folder(tmp_path / "folder") as folder:
            write_file(folder / "file", b"x")

    for call in ("fsync", "replace", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(errno.ENOSPC))
            with pytest.raises(StoreError, match="No space left on device"):
                fill()
        assert list(tmp_path.iterdir()) == [], call
    fill()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_an_interrupt_passes_and_leaves_nothing(tmp_path):
    def interrupted_folder():
        with atomic_folder(tmp_path / "folder") as folder:
            write_file(folder / "file", b"x")
            raise KeyboardInterrupt

    def interrupted_file():
        with atomic_file(tmp_path / "file") as file:
            file.write(b"x")
            raise KeyboardInterrupt

    for interrupted in (interrupted_folder, interrupted_file):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert list(tmp_path.iterdir()) == []


def test_folder_sync_is_optional_where_the_file_system_lacks_it(tmp_path, monkeypatch):
    real = os.fsync

    def only_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    longest = tmp_path / ("x" * 255)
    write_file(longest, b"x")
    assert longest.read_bytes() == b"x"
    assert not leftovers(tmp_path)


def test_make_folder_says_what_it_made_and_takes_it_back_on_failure(tmp_path, monkeypatch):
    assert make_folder(tmp_path / "a" / "b") == [tmp_path / "a" / "b", tmp_path / "a"]
    assert make_folder(tmp_path / "a" / "b") == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file is not a folder"):
        make_folder(tmp_path / "file" / "x")
    with pytest.raises(StoreError, match="cannot make the folder"):
        make_folder(tmp_path / "c" / ("x" * 300))
    with pytest.raises(StoreError, match="cannot make the folder"):
        make_folder(tmp_path / "nul\0byte")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_unfinished_writes_are_removed_by_their_age(tmp_path):
    for name, age in ((".tmp-old", 7200), (".tmp-new", 0), ("kept", 7200)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_temporaries(tmp_path, older_than=3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-new", "kept"]
    remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_equal_configurations_meet_in_one_hash_and_others_do_not():
    assert config_hash({"a": 1, "b": {"c": [1, 2], "d": None}}) == config_hash({"b": {"d": None, "c": (1, 2)}, "a": 1})
    others = [{"a": 1}, {"a": 2}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"b": 1}, {}]
    assert len({config_hash(other) for other in others}) == len(others)


def test_canonical_form_is_sorted_compact_and_exact():
    config = {"b": 0.1, "a": 1e-300, "é": "ü", "z": 2**70}
    text = canonical_json(config)
    assert text == '{"a":1e-300,"b":0.1,"z":1180591620717411303424,"é":"ü"}'
    assert canonical_json(json.loads(text)) == text
    assert config_hash(config) == hashlib.sha256(text.encode()).hexdigest()  # the same in every process and release


WRONG = [
    ({"a": {"b": float("nan")}}, "config.a.b is nan"),
    ({"a": [0.0, float("-inf")]}, r"config.a\[1\] is -inf"),
    ({1: 2}, "has the key 1 of type int"),
    ({"a": {"b": {1, 2}}}, "config.a.b has type set"),
    ({"a": b"x"}, "config.a has type bytes"),
    ({"a": "\ud800"}, "lone surrogate"),
    ({"\udcff": 1}, "lone surrogate"),
]


def test_what_json_cannot_carry_is_refused_in_one_line(subtests):
    for config, words in WRONG:
        with subtests.test(words=words):
            with pytest.raises(ConfigError, match=words) as caught:
                config_hash(config)
            assert "\n" not in str(caught.value)


def test_file_hash_equals_hashlib(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert file_sha256(tmp_path / "file") == hashlib.sha256(data).hexdigest()
    with pytest.raises(StoreError, match=r"cannot read .*missing: No such file"):
        file_sha256(tmp_path / "missing")


def test_a_changed_model_file_is_hashed_again(tmp_path, monkeypatch):
    path, cache = tmp_path / "model", tmp_path / "digests"
    path.write_bytes(b"a" * 100)
    expected = hashlib.sha256(b"a" * 100).hexdigest()
    monkeypatch.setattr("wherewhat.files._CACHED_FROM_BYTES", 50)
    assert model_file_sha256(path, cache=cache) == expected
    assert not cache.exists()  # it has just changed, and could change again within one tick of the clock
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 60 * 10**9)
    assert model_file_sha256(path, cache=cache) == expected
    (entry,) = cache.iterdir()
    monkeypatch.setattr("wherewhat.files._digest", failing(errno.EIO))
    assert model_file_sha256(path, cache=cache) == expected
    monkeypatch.undo()
    monkeypatch.setattr("wherewhat.files._CACHED_FROM_BYTES", 50)
    monkeypatch.setattr(time, "time_ns", lambda: now + 60 * 10**9)
    entry.write_text("damaged")
    assert model_file_sha256(path, cache=cache) == expected
    before = path.stat()
    time.sleep(0.05)
    path.write_bytes(b"b" * 100)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as tools that keep times do
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert model_file_sha256(path, cache=cache) == hashlib.sha256(b"b" * 100).hexdigest()
