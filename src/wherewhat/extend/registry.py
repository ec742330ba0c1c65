"""The list of length methods."""

from __future__ import annotations

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.extend.base import LengthMethod
from wherewhat.extend.dynamic_ntk import DynamicNTK
from wherewhat.extend.infllm import InfLLM
from wherewhat.extend.interpolation import PositionInterpolation
from wherewhat.extend.lm_infinite import LMInfinite
from wherewhat.extend.ntk import NTKAware
from wherewhat.extend.rerope import ReRoPE
from wherewhat.extend.self_extend import SelfExtend
from wherewhat.extend.sliding_window import SlidingWindow
from wherewhat.extend.streaming import StreamingLLM
from wherewhat.extend.untouched import Untouched
from wherewhat.extend.yarn import YaRN

METHODS: tuple[type[LengthMethod], ...] = (
    Untouched,
    SlidingWindow,
    StreamingLLM,
    LMInfinite,
    InfLLM,
    PositionInterpolation,
    NTKAware,
    DynamicNTK,
    YaRN,
    SelfExtend,
    ReRoPE,
)


def find(name: str) -> type[LengthMethod]:
    """The method of that name.

    Raises:
        ConfigError: If there is none, with the nearest name.
    """
    by_name = {method.name: method for method in METHODS}
    if name in by_name:
        return by_name[name]
    raise ConfigError(f"there is no length method '{name}': {nearest(name, by_name, cutoff=0.6)}")
