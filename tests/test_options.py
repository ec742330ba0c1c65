"""Identity: options survive the way from text to config, and every mistake is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from wherewhat.errors import ConfigError
from wherewhat.measures.registry import find_measurement, measurements
from wherewhat.options import build_config, config_values, parse_assignments


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
