"""Capture: a causal language model's queries and keys, layer by layer, proved against its own attention."""

from wherewhat.capturing.attention import LayerAttention
from wherewhat.capturing.compare import LayerProof
from wherewhat.capturing.masking import Mask
from wherewhat.capturing.proof import Proof, capture, intervene, prove
from wherewhat.capturing.rotation import Rotation, identify_rotation
from wherewhat.capturing.session import Capture, Editor, Reducer
from wherewhat.capturing.unmeasured import Unmeasured

__all__ = [
    "Capture",
    "Editor",
    "LayerAttention",
    "LayerProof",
    "Mask",
    "Proof",
    "Reducer",
    "Rotation",
    "Unmeasured",
    "capture",
    "identify_rotation",
    "intervene",
    "prove",
]
