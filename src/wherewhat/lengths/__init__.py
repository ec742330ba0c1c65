"""Length methods: attention beyond the trained length, and all methods by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from wherewhat.errors import ConfigError
from wherewhat.options import nearest

if TYPE_CHECKING:
    from wherewhat.lengths.method import LengthMethod

METHODS = {
    "none": "windows.Untouched",
    "sliding-window": "windows.SlidingWindow",
    "streaming-llm": "windows.StreamingLLM",
    "lm-infinite": "windows.LMInfinite",
    "infllm": "windows.InfLLM",
    "position-interpolation": "frequencies.PositionInterpolation",
    "ntk-aware": "frequencies.NTKAware",
    "dynamic-ntk": "frequencies.DynamicNTK",
    "yarn": "frequencies.YaRN",
    "self-extend": "windows.SelfExtend",
    "rerope": "windows.ReRoPE",
    "near-far": "near_far.NearFar",
}
"""Module and class of each method by name; a method is imported when it is used."""


def find_method(name: str) -> type[LengthMethod]:
    """Return the class of a method."""
    if name not in METHODS:
        raise ConfigError(f"there is no length method '{name}': {nearest(name, METHODS, cutoff=0.6)}")
    module, kind = METHODS[name].split(".")
    return cast("type[LengthMethod]", getattr(import_module(f"wherewhat.lengths.{module}"), kind))
