"""What a GPU offers here."""

from __future__ import annotations

import importlib.util

import torch


def has_triton(device: torch.device) -> bool:
    """Whether Triton is there to write kernels for the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
