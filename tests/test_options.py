"""Identity: options survive the way from text to config, and every mistake is named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy
import pytest

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import find_measurement, measurements
from wherewhat.options import _fits, build_config, checked, config_values, parse_assignments, read_config


@dataclass(frozen=True)
class Everything:
    count: int = 1
    share: float = 0.5
    name: str = "x"
    on: bool = False
    maybe: int | None = None
    many: tuple[float, ...] = (1.0,)
    kind: Literal["a", "b"] = "a"


def test_text_becomes_typed_values():
    values = parse_assignments(["count=3", "share=1e-3", "name=a=b", "on=yes", "maybe=7", "many=1, 2.5", "kind=b"])
    assert build_config(Everything, values) == Everything(3, 1e-3, "a=b", True, 7, (1.0, 2.5), "b")


def test_plain_values_are_kept():
    plain = {"count": 3, "on": True, "maybe": None, "many": [1, 2]}
    assert build_config(Everything, plain) == Everything(count=3, on=True, maybe=None, many=(1.0, 2.0))
    assert build_config(Everything, config_values(Everything())) == Everything()


@checked()
def _called(count: int) -> int:
    return count


WRONG = [
    ({"cuont": "1"}, "did you mean 'count'"),
    ({"count": "x"}, "count='x' is not a whole number"),
    ({"count": 1.5}, "not a whole number"),
    ({"count": True}, "not a whole number"),
    ({"on": "maybe"}, "not true or false"),
    ({"kind": "c"}, "one of a, b"),
    ({"share": "much"}, "not a number"),
    ({"share": "nan"}, "is not a finite number"),
    ({"share": float("inf")}, "is not a finite number"),
    ({"name": 3}, "not a string"),
    ({"many": 3}, "many=3"),
    ({"many": "1,-inf"}, "is not a finite number"),
    ({"many": [1.0] * 10_001}, "many has 10,001 values"),
    ({"count": 2**63}, r"from -2\^63 to 2\^63 - 1"),
    ({"count": str(-(2**63) - 1)}, r"from -2\^63 to 2\^63 - 1"),
    ({"maybe": -(2**63) - 1}, r"from -2\^63 to 2\^63 - 1"),
    ({"count": 10**5000}, "a number of 16610 bits"),
    ({"count": "x" * 10_000}, "not a whole number"),
]


def test_wrong_values_are_named(subtests):
    for values, message in WRONG:
        with subtests.test(message=message):
            with pytest.raises(ConfigError, match=message) as refused:
                build_config(Everything, values)
            assert len(str(refused.value)) < 200
    with pytest.raises(ConfigError, match="a number of 16610 bits"):
        _called(10**5000)


def test_assignments_that_are_none():
    for text in ("count", "=3", ""):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignments([text])
    with pytest.raises(ConfigError, match="--where 'a' is not"):
        parse_assignments(["a"], name="--where")
    with pytest.raises(ConfigError, match="twice"):
        parse_assignments(["a=1", "a=2"])


def test_every_measurement_explains_itself(subtests):
    for name, measurement in measurements().items():
        with subtests.test(measurement=name):
            assert measurement.config() == measurement.config()
            assert measurement.summary.endswith(".")
            assert measurement.limits
            assert all(metric.reading.endswith(".") and metric.title for metric in measurement.metrics)
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        find_measurement("atention")


CONFIGS = {
    "deep.toml": ("a = " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
    "dotted.toml": (".".join(["a"] * 200_000) + " = 1", "nested more than 64 deep"),
    "quoted.toml": (" . ".join(['"a"'] * 70) + " = 1", "nested more than 64 deep"),
    "tables.toml": ("[" + ".".join(["a"] * 70) + "]", "nested more than 64 deep"),
    "inline.toml": ("x = {" + ".".join(["a"] * 70) + " = 1}", "nested more than 64 deep"),
    "deep.json": ('{"a":' * 100_000, "nested more than 64 deep"),
    "deeper.json": ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
    "deep.yaml": ("a: " + "[" * 1500 + "]" * 1500, "nested more than 64 deep"),
    "loop.yaml": ("a: &a [*a]", "nested more than 64 deep"),
    "bomb.yaml": (
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        "more than 1,000,000 values",
    ),
    "tag.yaml": ("a: !!int ''", "is not valid YAML"),
    "time.yaml": ("a: !!timestamp x", "is not valid YAML"),
    "object.yaml": ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    "large.yaml": ("a: " + "x" * (1 << 18), "at most 256.0 KiB"),
    "huge.toml": (f"a = 0x{'f' * 10_000}", r"a number of 40000 bits"),
    "huge.json": ('{"a": [{"b": 9223372036854775808}]}', r"from -2\^63"),
    "digits.json": ('{"a": ' + "1" * 5000 + "}", "is not valid JSON"),
    "list.json": ("[1]", "must hold names and values, not a list"),
    "twice.yaml": ("a-b: 1\na_b: 2", "has the key 'a_b' twice"),
}


def test_hostile_files_of_settings(tmp_path, subtests):
    for name, (content, words) in CONFIGS.items():
        with subtests.test(name=name):
            (tmp_path / name).write_text(content)
            with pytest.raises(ConfigError, match=words) as refused:
                read_config(tmp_path / name, name="--config")
            assert "\n" not in str(refused.value)
            assert len(str(refused.value)) < 500


def test_settings_that_are_accepted(tmp_path):
    for name, content in {
        "a.toml": "\ufeffa-b = [1.5, 2.5]\nc = {d.e.f = 1}\ng = 'https://a.b.c'\n",
        "a.json": '{"a-b": [1.5, 2.5], "c": {"d": {"e": {"f": 1}}}, "g": "https://a.b.c"}',
        "a.yaml": "a-b: &x [1.5, 2.5]\nc: {d: {e: {f: 1}}}\ng: https://a.b.c\n",
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        expected = {"a_b": [1.5, 2.5], "c": {"d": {"e": {"f": 1}}}, "g": "https://a.b.c"}
        assert read_config(tmp_path / name) == expected


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_settings_in_no_readable_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    for kind in ("pipe", "device", "folder", "latin", "missing"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_config(tmp_path / f"{kind}.toml", name="--config")


def test_lists_of_simple_types_are_checked_as_item_by_item():
    items = (1, True, 2.5, float("nan"), "a", None, numpy.int64(3), [1])
    for kind in (int, float, bool, str):
        for count in range(4):
            for listed in itertools.product(items, repeat=count):
                assert _fits(listed, Sequence[kind]) == all(_fits(item, kind) for item in listed)
