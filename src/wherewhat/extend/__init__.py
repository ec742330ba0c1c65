"""Length methods: how a trained model attends in texts longer than those it was trained on."""

from wherewhat.extend.base import LengthMethod, extended
from wherewhat.extend.dynamic_ntk import DynamicNTK
from wherewhat.extend.generating import generate
from wherewhat.extend.infllm import InfLLM
from wherewhat.extend.interpolation import PositionInterpolation
from wherewhat.extend.lm_infinite import LMInfinite
from wherewhat.extend.ntk import NTKAware
from wherewhat.extend.registry import METHODS, find
from wherewhat.extend.rerope import ReRoPE
from wherewhat.extend.self_extend import SelfExtend
from wherewhat.extend.sliding_window import SlidingWindow
from wherewhat.extend.streaming import StreamingLLM
from wherewhat.extend.untouched import Untouched
from wherewhat.extend.yarn import YaRN
from wherewhat.positions import trained_length

__all__ = [
    "METHODS",
    "DynamicNTK",
    "InfLLM",
    "LMInfinite",
    "LengthMethod",
    "NTKAware",
    "PositionInterpolation",
    "ReRoPE",
    "SelfExtend",
    "SlidingWindow",
    "StreamingLLM",
    "Untouched",
    "YaRN",
    "extended",
    "find",
    "generate",
    "trained_length",
]
