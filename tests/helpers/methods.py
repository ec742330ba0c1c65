"""Every length method with windows small enough for texts of a few tokens."""

from __future__ import annotations

import pytest

from wherewhat.lengths.frequencies import DynamicNTK, NTKAware, PositionInterpolation, YaRN
from wherewhat.lengths.method import LengthMethod
from wherewhat.lengths.near_far import NearFar
from wherewhat.lengths.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM, Untouched

SMALL: list[LengthMethod] = [
    Untouched(),
    SlidingWindow(window=9),
    StreamingLLM(sinks=2, window=9),
    LMInfinite(sinks=3, window=9),
    InfLLM(sinks=2, window=9, block=4, top=2, representatives=2),
    PositionInterpolation(trained=12),
    NTKAware(trained=12),
    DynamicNTK(trained=12, step=4),
    YaRN(trained=12),
    SelfExtend(window=5, trained=12),
    ReRoPE(window=9),
    NearFar(sinks=2, window=9, top=3),
]
BY_NAME = pytest.mark.parametrize("method", SMALL, ids=lambda m: m.name)
