"""Hostile values and mutations of JSON, bytes and files."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Container
from pathlib import Path
from random import Random
from typing import Any

NUMBERS = [
    "0", "-1", "1", "2", "3", "7", "0.5", "-0.5", "1e9", "1e308", "1e400", "nan", "inf", "-inf", "2147483648",
    "99999999", "9223372036854775807", "9223372036854775808", "99999999999999999999", "-99999999999999999999",
    "9" * 5000, "", " ", "0x10", "١٢", "1_000", "1,2", ",", "1,,2", "0,0", "-1,3", "many", "true", "None", "{}",
]  # fmt: skip
WORDS = [
    "", " ", "-", "--", "x", "é", "日本", "a b", "a\nb", "a\tb", "\x1b[31mred", "\x07", "\x9b1m", "\udcff", "*", "%s",
    "{0}", "$HOME", "[red]", "<b>", "'", '"', "x" * 300, "x" * 70000, "none", "null", "-1", "auto", "=", "a=b",
]  # fmt: skip
NAMES = [
    "~nosuchuser/x", "~", "~/x", ".", "..", "./", "x" * 300, "a/" * 3000 + "a", "models--x", "models--x--y", "x/y",
    "-x", "nobody/" + "x" * 120, "a--b/c", "a..b", "a/b/c", "\\\\host\\x", "C:\\x", "http://127.0.0.1:9/x", "s3://b/x",
    "x\0y", "file:///x", "memory://x", "x.gguf", "x.safetensors", "é" * 200, "none.jsonl", "harness:x", "x.toml",
]  # fmt: skip
PROPS = [
    "fifo", "endless", "oversize", "locked", "locked/x", "locked.txt", "dangling", "loop", "empty", "empty-folder",
    "binary", "deep.json", "deep.toml", "deep.jsonl", "\x1b[31mred.txt", "text.txt", "text.txt/x", "tiny", "runs",
]  # fmt: skip
VALUES: list[Any] = [
    0, -1, 1, 2, 3, 7, 13, 2**31, 2**40, 2**63, 2**70, -(2**63), 0.0, 0.5, -2.5, 1e308, 1e-308, float("nan"),
    float("inf"), "", "x", "0", "\0", "\x1b[31m", "é" * 300, "x" * 70000, "../../x", "/etc/passwd", "~nosuchuser", None,
    True, False, [], {}, [0], [None], ["x"], [[]], {"x": 1}, {"": {}}, [1] * 2000, {"type": "x"},
]  # fmt: skip
DEEP = 20_000
"""Levels of nesting, more than any parser's stack holds."""


def props() -> None:
    """Make files of every unusual kind in the working directory."""
    os.mkfifo("fifo")
    Path("endless").symlink_to("/dev/zero")
    with Path("oversize").open("wb") as file:
        file.truncate(1 << 38)
    Path("locked").mkdir(mode=0)
    Path("locked.txt").touch(mode=0)
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("empty").touch()
    Path("empty-folder").mkdir()
    Path("binary").write_bytes(bytes(range(256)) * 20)
    Path("deep.json").write_text("[" * DEEP)
    Path("deep.toml").write_text(f"x = {'[' * DEEP}{']' * DEEP}")
    Path("deep.jsonl").write_text(f'{{"text": {"[" * DEEP}{"]" * DEEP}}}\n')
    Path("\x1b[31mred.txt").write_text("the cat sat on a mat " * 9)


def word(random: Random) -> str:
    """Return a hostile word of a command line."""
    pool = random.choice([NUMBERS, NUMBERS, WORDS, NAMES, PROPS])
    return random.choice(pool)


def value(random: Random, like: Any = None) -> Any:
    """Return a hostile JSON value; often one of the type of another value, which gets further."""
    same = [one for one in VALUES if type(one) is type(like)] if random.random() < 0.6 else []
    return copy.deepcopy(random.choice(same or VALUES))


def changed(tree: Any, random: Random, *, kept: Container[str] = ()) -> tuple[Any, str]:
    """Return a copy of a JSON value with one change anywhere in it, and the change in words.

    Args:
        tree: The JSON value.
        random: Source of the change.
        kept: Keys that are not removed.
    """
    tree = copy.deepcopy(tree)
    places = [(tree, key) for key in _keys(tree)]
    for holder, key in places:
        places += [(holder[key], inner) for inner in _keys(holder[key])][:200]
    if not places or random.random() < 0.03:
        new = value(random)
        return new, f"the whole is {_brief(new)}"
    # Few entries of long lists and large vocabularies: other places should be as likely.
    at = random.randrange(len(places)) if random.random() < 0.5 else random.randrange(min(len(places), 30))
    holder, key = places[at]
    kind = random.random()
    if kind < 0.1 and key not in kept:
        del holder[key]
        return tree, f"{key!r} removed"
    if kind < 0.15 and isinstance(holder, dict):
        holder[str(value(random))[:300]] = holder[key]
        return tree, f"{key!r} copied to another name"
    if kind < 0.2:
        holder[key] = [holder[key]]
        return tree, f"{key!r} inside a list"
    holder[key] = value(random, holder[key])
    return tree, f"{key!r} is {_brief(holder[key])}"


def _keys(holder: Any) -> list[Any]:
    if isinstance(holder, dict):
        return list(holder)
    return list(range(min(len(holder), 8))) if isinstance(holder, list) else []


def _brief(new: Any) -> str:
    shown = repr(new)
    return shown if len(shown) < 60 else f"{shown[:40]}… ({len(shown)} characters)"


def change_json(path: Path, random: Random, *, times: int = 1) -> list[str]:
    """Change a JSON file in some places and return the changes in words."""
    try:
        tree = json.loads(path.read_text("utf-8"))
    except ValueError:  # changed before
        return [change_file(path, random)]
    notes = []
    for _ in range(times):
        tree, note = changed(tree, random)
        notes.append(f"{path}: {note}")
    path.write_text(json.dumps(tree))
    return notes


def change_bytes(data: bytes, random: Random, *, first: int | None = None) -> tuple[bytes, str]:
    """Return bytes with one change within the first ``first`` of them, and the change in words."""
    end = max(1, min(first or len(data), len(data)))
    at = random.randrange(end)
    kind = random.randrange(7)
    if kind == 0:
        return data[:at], f"cut to {at} bytes"
    if kind == 1:
        return data[:at] + bytes([random.randrange(256)]) + data[at + 1 :], f"byte {at} changed"
    if kind == 2:
        size = random.choice([2, 4, 8])
        number = random.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1, 10**9]) % (1 << 8 * size)
        return data[:at] + number.to_bytes(size, "little") + data[at + size :], f"{size} bytes at {at} are {number}"
    if kind == 3:
        return data[:at] + random.randbytes(random.randrange(1, 64)) + data[at:], f"random bytes inserted at {at}"
    if kind == 4:
        size = random.randrange(1, 64)
        return data[:at] + data[at + size :], f"{size} bytes removed at {at}"
    if kind == 5:
        return data + random.randbytes(random.randrange(1, 300)), "random bytes appended"
    other = random.randrange(end)
    return data[:at] + data[other:], f"bytes between {at} and {other} removed or repeated"


def change_file(path: Path, random: Random) -> str:
    """Replace a file by one of another kind, or change its bytes; return the change in words."""
    kinds = [
        "bytes",
        "bytes",
        "removed",
        "empty",
        "fifo",
        "endless",
        "oversize",
        "locked",
        "folder",
        "dangling",
        "loop",
    ]
    kind = random.choice([*kinds, "deep", "latin", "other", "blank"])
    if kind == "bytes":
        data, note = change_bytes(path.read_bytes(), random)
        path.write_bytes(data)
        return f"{path}: {note}"
    data = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind in ("endless", "dangling", "loop"):
        path.symlink_to({"endless": "/dev/zero", "dangling": "nowhere", "loop": path.name}[kind])
    elif kind == "oversize":
        path.write_bytes(data)
        os.truncate(path, 1 << 38)
    elif kind == "folder":
        path.mkdir()
    elif kind == "locked":
        path.write_bytes(data)
        path.chmod(0)
    elif kind != "removed":
        texts = {"empty": b"", "deep": b"[" * DEEP, "latin": b'{"\xe9": "\xff"}', "other": b"[1, 2]", "blank": b" \n"}
        path.write_bytes(texts[kind])
    return f"{path}: {kind}"
