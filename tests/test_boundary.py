"""Identity: whatever a user names, it is accepted or refused in one line before anything waits for it or allocates."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from wherewhat.boundary import (
    MOST_DEPTH,
    check_at_most,
    check_depth,
    check_file,
    check_values,
    check_whole_number,
    output_file,
    output_folder,
    parse_json,
    read_file,
    read_json,
    read_user_file,
    shown,
    size_in_bytes,
    size_in_words,
    user_path,
)
from wherewhat.errors import ConfigError, LoadError, StoreError, WherewhatError

posix = pytest.mark.skipif(os.name != "posix", reason="needs named pipes and devices")


def refusal(function, *arguments, **options) -> str:
    with pytest.raises(WherewhatError) as refused:
        function(*arguments, **options)
    message = str(refused.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_messages_are_printable_and_names_in_them_short():
    assert shown("a\x1b[31m\nb") == r"'a\x1b[31m\nb'"
    assert shown(Path("x" * 500)) == f"'{'x' * 60}…{'x' * 60}'"
    assert str(StoreError("no \x1b[31mfile\r here\u202e")) == r"no \x1b[31mfile\r here\u202e"
    assert str(ConfigError("first\nsecond")) == r"first\nsecond"
    assert str(ConfigError("36\xa0%")) == "36 %"
    assert str(ConfigError()) == ""
    words = [size_in_words(count) for count in (0, 1023, 1024, 8 << 40, 1 << 60)]
    assert words == ["0 bytes", "1023 bytes", "1.0 KiB", "8.0 TiB", "1024.0 PiB"]


def test_sizes_in_bytes():
    sizes = {"80GB": 80 * 10**9, " 24 GiB ": 24 << 30, "1.5k": 1500, "7": 7, "2TiB": 2 << 40, "3MB": 3 * 10**6}
    assert {text: size_in_bytes(text, name="--memory") for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "80 apples", "0", "1e9", "9" * 40, "1GBB", "nan"):
        with pytest.raises(ConfigError, match=r"--memory is .*: give a size such as 80GB"):
            size_in_bytes(text, name="--memory")


PATHS = {
    "empty": ("", "--out is empty"),
    "blank": (" \t", "--out is empty"),
    "NUL": ("a\0b", "NUL"),
    "home": ("~nosuchuser/x", "home folder of an unknown user"),
    "long": ("x" * 300, "File name too long"),
    "long below a missing folder": ("missing/" + "x" * 300, "File name too long"),
    "many folders": ("a/" * 5000, "File name too long"),
    "surrogate": ("\ud800", "cannot be opened"),
}


def test_paths_that_no_system_accepts(subtests):
    for case, (given, words) in PATHS.items():
        for function in (user_path, output_file, output_folder):
            with subtests.test(case=case, function=function.__name__):
                assert words in refusal(function, given, name="--out")


def test_paths_may_exist_or_not_and_outputs_are_checked_without_writing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x", name="--out") == tmp_path / "x"
    assert user_path(tmp_path, name="--out") == tmp_path
    assert output_file(tmp_path / "a" / "b.csv", name="--csv") == tmp_path / "a" / "b.csv"
    assert output_folder(tmp_path / "a" / "b", name="--out") == tmp_path / "a" / "b"
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert user_path(tmp_path / "file" / "x", name="--out") == tmp_path / "file" / "x"
    for function in (output_file, output_folder):
        assert "not a folder" in refusal(function, tmp_path / "file" / "new" / "x", name="--out")
    with pytest.raises(StoreError):
        output_folder(tmp_path / "file", name="--out")


def test_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    def denied(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        assert "Permission denied" in refusal(user_path, tmp_path, name="--out")
        assert "permission denied" in refusal(output_folder, tmp_path / "new", name="--out")
        assert "Permission denied" in refusal(output_file, tmp_path / "new.csv", name="--csv")
        assert output_folder(tmp_path / "new", name="--out", writable=False) == tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied)
        assert "Permission denied" in refusal(user_path, tmp_path / "x", name="--out")
    assert not list(tmp_path.iterdir())


@posix
def test_only_regular_files_are_read_and_replaced(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    for name, kind in (("pipe", "named pipe"), ("zeros", "device"), ("socket", "socket"), (".", "folder")):
        for read in (check_file, read_file):
            assert kind in refusal(read, tmp_path / name, name=name, most=100)
        assert kind in refusal(output_file, tmp_path / name, name="--csv")
    assert "No such file" in refusal(read_file, tmp_path / "missing", name="x", most=100)
    (tmp_path / "folder").mkdir()
    for name in ("folder", ".", "..", "/"):
        assert "is a folder" in refusal(output_file, name, name="--csv")
    for name in ("/dev/null", "/dev/stdout", "/dev/fd/1"):
        refusal(output_file, name, name="--csv")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "symbolic links" in refusal(user_path, tmp_path / "a", name="the model", error=LoadError)
    assert "symbolic links" in refusal(check_file, tmp_path / "a", name="x", most=1)


@posix
def test_streams_of_the_shell_are_read_and_limited():
    for content, most in ((b"content", 100), (b"content", 3)):
        read, write = os.pipe()
        os.write(write, content)
        os.close(write)
        path = Path(f"/dev/fd/{read}")
        try:
            if len(content) <= most:
                assert read_file(path, name="x", most=most) == content
            else:
                assert "more than 3 bytes" in refusal(read_file, path, name="x", most=most)
        finally:
            os.close(read)


def test_large_files_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 42)
    assert "4.0 TiB" in refusal(read_file, path, name="x", most=1 << 20)
    assert "at most 16.0 MiB" in refusal(read_user_file, path, name="x")


def test_json_is_read_as_written_or_refused(tmp_path):
    path = tmp_path / "x.json"
    value = {"a": [1, 2.5, None], "b": {"c": "é"}}
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_json(path, name="x") == value
    assert parse_json("\ufeff[1]".encode(), name="x") == [1]
    for data, words in ((b"{", "valid JSON"), (b"\xff", "not UTF-8"), (b"1" * 5000, "valid JSON"), (b"", "valid JSON")):
        assert words in refusal(parse_json, data, name="x"), data[:9]
    path.write_text("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    assert read_json(path, name="x") is not None
    for depth, start, end in ((MOST_DEPTH + 1, "[", "]"), (100_000, "[", "]"), (100_000, '{"a":', "")):
        path.write_text(start * depth + end * depth)
        assert "nested more than" in refusal(read_json, path, name="x")


def test_depth_of_shared_values():
    bomb: list[object] = [1]
    for _ in range(MOST_DEPTH - 2):
        bomb = [bomb] * 10
    check_depth(bomb)
    with pytest.raises(ValueError, match="more than 1,000,000 values"):
        check_values(bomb)
    endless: list[object] = []
    endless.append(endless)
    for check in (check_depth, check_values):
        with pytest.raises(RecursionError):
            check(endless)
        with pytest.raises(RecursionError):
            check(nested(MOST_DEPTH))
        check(nested(MOST_DEPTH - 1))


def test_limits_of_numbers():
    check_values({"a": [1, 2.5, "x", None, {"b": 2**63 - 1}]})
    with pytest.raises(ValueError, match="from -2\\^63"):
        check_values({"a": [{"b": 2**63}]})
    for number in (2**63, -(2**63) - 1, 10**5000, (1, 2**63)):
        assert "count is" in refusal(check_whole_number, "count", number)
    for value in (2**63 - 1, -(2**63), 1e300, "9" * 100, None, (1, 2), True):
        check_whole_number("count", value)
    check_at_most(10, a=10, b=None, c=(1, 10), d=2.5)
    assert "b is 11: give at most 10" in refusal(check_at_most, 10, a=1, b=11)
    assert "c is 12" in refusal(check_at_most, 10, c=(1, 12))
    with pytest.raises(ConfigError):
        check_at_most(10, **{"--tokens": 99})
