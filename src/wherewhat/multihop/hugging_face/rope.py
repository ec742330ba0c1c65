"""RoPE's options as Hugging Face writes them."""

from __future__ import annotations

from typing import Any

from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.places import find_rotation


def rope_parameters(config: LabConfig) -> dict[str, Any]:
    """The ``rope_parameters`` of a model with rope, p-rope or partial; p-RoPE is called proportional there."""
    rotation = find_rotation(config)
    assert rotation is not None
    turning = int(rotation.inv_freq.count_nonzero())
    kind = "proportional" if config.encoding == "p-rope" else "default"
    return {
        "rope_type": kind,
        "rope_theta": config.base,
        "partial_rotary_factor": 2 * turning / config.head_width,
    }
