"""Identity: options survive the way from text to config, and every mistake is named."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import pytest

from wherewhat.errors import ConfigError
from wherewhat.measures.registry import find_measurement, measurements
from wherewhat.options import build_config, checked, config_values, parse_assignments, read_config


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": "1"}, "did you mean 'count'"),
        ({"count": "x"}, "count='x' is not a whole number"),
        ({"count": 1.5}, "not a whole number"),
        ({"count": True}, "not a whole number"),
        ({"on": "maybe"}, "not true or false"),
        ({"kind": "c"}, "one of a, b"),
        ({"share": "much"}, "not a number"),
        ({"name": 3}, "not a string"),
        ({"many": 3}, "many=3"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        build_config(Everything, values)


@pytest.mark.parametrize("text", ["count", "=3", ""])
def test_assignment_without_key_or_value(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_assignments([text])


def test_assignments_of_another_option():
    with pytest.raises(ConfigError, match="--where 'a' is not"):
        parse_assignments(["a"], name="--where")


@pytest.mark.parametrize("values", [{"share": "nan"}, {"share": float("inf")}, {"many": "1,-inf"}])
def test_numbers_are_finite(values):
    with pytest.raises(ConfigError, match="is not a finite number"):
        build_config(Everything, values)


def test_assignment_twice():
    with pytest.raises(ConfigError, match="twice"):
        parse_assignments(["a=1", "a=2"])


def test_unknown_measurement_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'attention'"):
        find_measurement("atention")


@pytest.mark.parametrize("measurement", measurements().values(), ids=lambda m: m.name)
def test_every_measurement_explains_itself(measurement):
    assert measurement.config() == measurement.config()
    assert measurement.summary.endswith(".")
    assert measurement.limits
    assert all(metric.reading.endswith(".") and metric.title for metric in measurement.metrics)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1])
def test_whole_numbers_have_64_bits(number):
    for values in ({"count": number}, {"count": str(number)}, {"maybe": number}):
        with pytest.raises(ConfigError, match=r"from -2\^63 to 2\^63 - 1"):
            build_config(Everything, values)


def test_numbers_of_thousands_of_digits():
    with pytest.raises(ConfigError, match="a number of 16610 bits"):
        build_config(Everything, {"count": 10**5000})
    with pytest.raises(ConfigError, match="a number of 16610 bits"):
        _called(10**5000)


@checked()
def _called(count: int) -> int:
    return count


def test_options_with_too_many_values():
    with pytest.raises(ConfigError, match="many has 10,001 values"):
        build_config(Everything, {"many": [1.0] * 10_001})


def test_long_values_are_cut_in_messages():
    with pytest.raises(ConfigError) as refused:
        build_config(Everything, {"count": "x" * 10_000})
    assert len(str(refused.value)) < 200


CONFIGS = {
    "deep.toml": ("a = " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
    "dotted.toml": (".".join(["a"] * 200_000) + " = 1", "nested more than 64 deep"),
    "quoted.toml": (" . ".join(['"a"'] * 70) + " = 1", "nested more than 64 deep"),
    "tables.toml": ("[" + ".".join(["a"] * 70) + "]", "nested more than 64 deep"),
    "inline.toml": ("x = {" + ".".join(["a"] * 70) + " = 1}", "nested more than 64 deep"),
    "deep.json": ('{"a":' * 100_000, "nested more than 64 deep"),
    "deeper.json": ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
    "deep.yaml": ("a: " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_files_of_settings(tmp_path, name):
    content, words = CONFIGS[name]
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
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing", "latin"])
def test_settings_in_no_readable_file(tmp_path, kind):
    path = tmp_path / "x.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "latin":
        path.write_bytes(b"a = '\xe9'")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(path, name="--config")
