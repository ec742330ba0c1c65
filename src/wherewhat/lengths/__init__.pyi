"""The public names of length methods, each imported from here on first use."""

from wherewhat.caches.kept_keys import keys_kept as keys_kept
from wherewhat.lengths.far_cache import far_on_cpu as far_on_cpu
from wherewhat.lengths.frequencies import DynamicNTK as DynamicNTK
from wherewhat.lengths.frequencies import NTKAware as NTKAware
from wherewhat.lengths.frequencies import PositionInterpolation as PositionInterpolation
from wherewhat.lengths.frequencies import YaRN as YaRN
from wherewhat.lengths.method import LengthMethod as LengthMethod
from wherewhat.lengths.method import extended as extended
from wherewhat.lengths.method import generate as generate
from wherewhat.lengths.near_far import NearFar as NearFar
from wherewhat.lengths.registry import METHODS as METHODS
from wherewhat.lengths.registry import find_method as find_method
from wherewhat.lengths.registry import length_methods as length_methods
from wherewhat.lengths.registry import register_length_method as register_length_method
from wherewhat.lengths.windows import InfLLM as InfLLM
from wherewhat.lengths.windows import LMInfinite as LMInfinite
from wherewhat.lengths.windows import ReRoPE as ReRoPE
from wherewhat.lengths.windows import SelfExtend as SelfExtend
from wherewhat.lengths.windows import SlidingWindow as SlidingWindow
from wherewhat.lengths.windows import StreamingLLM as StreamingLLM
from wherewhat.lengths.windows import Untouched as Untouched
