"""Identity: a registered method is found, measured under its name, and its code is part of the identity of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import wherewhat
from helpers.capture import tiny, tokens
from wherewhat import lengths
from wherewhat.errors import ConfigError, PluginWarning
from wherewhat.lengths import LengthMethod, SlidingWindow, find_method, length_methods, register_length_method, registry
from wherewhat.measures.extend import ExtendConfig
from wherewhat.runs.code import options_code
from wherewhat.sweep.cells import expand
from wherewhat.sweep.file import read_sweep_file

SIZES = {"trained": 32, "run": 4, "depths": (0, 50)}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_searched", {registry.GROUP})


def half(keys):
    @register_length_method
    @dataclass(frozen=True)
    class Half(SlidingWindow):
        """A query sees the last keys only."""

        name: ClassVar[str] = "half-window"

        def default_window(self, trained):
            return trained // keys

    return Half


def test_a_registered_method_is_measured_under_its_name():
    half(2)
    assert length_methods()[-1] == "half-window"
    options = {**SIZES, "methods": ("none", "half-window", "sliding-window")}
    found = wherewhat.measure("extend", tiny("llama"), tokens(96), **options)
    losses = {one.metric.name: one.overall.mean for one in found.summary()}
    same = wherewhat.measure(
        "extend", tiny("llama"), tokens(96), **{**options, "methods": ("sliding-window",)}, window=16
    )
    expected = {one.metric.name: one.overall.mean for one in same.summary()}
    assert losses["loss_beyond_half-window"] == expected["loss_beyond_sliding-window"]
    assert losses["loss_beyond_half-window"] != losses["loss_beyond_sliding-window"]


def test_its_code_is_part_of_what_numbers_depend_on():
    half(2)
    config = ExtendConfig(methods=("none", "half-window"))
    before = options_code(config)
    assert list(before["options_code"]) == ["half-window"]
    assert options_code(config) == before
    half(3)  # registered again after a change
    assert options_code(config) != before
    assert options_code(ExtendConfig(methods=("none", "yarn"))) == {}


def test_its_code_is_part_of_the_cells_of_a_sweep(tmp_path):
    half(2)
    file = tmp_path / "sweep.toml"
    file.write_text('[[measurements]]\nmeasurement = "extend"\nset = {methods = ["none", "half-window"]}\n')
    (before,) = expand(read_sweep_file(file))
    assert expand(read_sweep_file(file)) == [before]
    half(3)
    assert expand(read_sweep_file(file))[0].id != before.id


def test_every_method_has_a_public_name():
    assert {getattr(wherewhat.lengths, kind.__name__) for kind in map(find_method, lengths.METHODS)} == set(
        map(find_method, lengths.METHODS)
    )
    assert all(hasattr(wherewhat.lengths, name) for name in lengths.__all__)
    with pytest.raises(AttributeError):
        wherewhat.lengths.YARN  # noqa: B018


@dataclass(frozen=True)
class Nameless(LengthMethod):
    """No rule."""


class Plain(SlidingWindow):
    """No dataclass."""

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Taken(SlidingWindow):
    """The name of another."""

    name: ClassVar[str] = "yarn"


@dataclass(frozen=True)
class Spaced(SlidingWindow):
    """A name that is not one."""

    name: ClassVar[str] = "My Method"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (Nameless, "the name of the length method Nameless is None: give words such as 'leaky-rerope'"),
        (Plain, "the length method Plain is no dataclass: decorate it with"),
        (Taken, "there is already a length method 'yarn': choose another name"),
        (Spaced, "the name of the length method Spaced is 'My Method'"),
        (torch.nn.Linear, "is not a length method: give a subclass of wherewhat.lengths.LengthMethod"),
        ("yarn", "'yarn' is not a length method"),
    ],
)
def test_what_is_no_method_is_refused(declared, words):
    with pytest.raises(ConfigError, match=words):
        register_length_method(declared)
    assert length_methods() == list(lengths.METHODS)


def test_a_method_without_a_name_is_refused_when_it_is_made():
    with pytest.raises(ConfigError, match="the length method Nameless has no name"):
        Nameless()


def test_entry_points_are_read_once_and_wrong_ones_left_out(monkeypatch):
    monkeypatch.setattr(registry, "_searched", set())
    calls = []

    def entry_points(group):
        calls.append(group)
        return {"good": half(2), "bad": Nameless}

    monkeypatch.setattr(registry, "plugins", entry_points)
    with pytest.warns(PluginWarning, match="the entry point 'bad' in wherewhat.length_methods is left out"):
        assert find_method("half-window").name == "half-window"
    assert find_method("half-window").name == "half-window"
    assert calls == [registry.GROUP]
