"""How positions enter a laboratory model: one file per encoding."""

from wherewhat.multihop.encodings.alibi import ALIBI
from wherewhat.multihop.encodings.allowed import allowed_planes
from wherewhat.multihop.encodings.base import Encoding
from wherewhat.multihop.encodings.learned import LEARNED
from wherewhat.multihop.encodings.nope import NOPE
from wherewhat.multihop.encodings.p_rope import P_ROPE
from wherewhat.multihop.encodings.partial import PARTIAL
from wherewhat.multihop.encodings.pope import POPE
from wherewhat.multihop.encodings.rope import ROPE

ENCODINGS = {encoding.name: encoding for encoding in (ROPE, P_ROPE, PARTIAL, ALIBI, LEARNED, NOPE, POPE)}
"""All encodings by name."""

__all__ = ["ENCODINGS", "Encoding", "allowed_planes"]
