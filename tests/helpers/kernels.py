"""Where Triton kernels run in tests: on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU."""

from __future__ import annotations

import os

import pytest
import torch


def kernel_device() -> str:
    """Return the device of tensors for Triton kernels; skip the module that calls it where there is none."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here", allow_module_level=True)
    return "cuda"
