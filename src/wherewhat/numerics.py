"""PyTorch's numerical settings, reset to those of a new process while a result is computed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

_ONEDNN: Any = torch.backends.mkldnn  # its switch is a property made at import, unknown to type checkers


@contextmanager
def new_process_settings(dtypes: Iterable[torch.dtype] = ()) -> Iterator[None]:
    """Compute as a new process would, until the context ends; then everything is as it was.

    Sets oneDNN, the precision of float32 products, the default dtype and device, and autocast. oneDNN is off where it
    cannot multiply one of the dtypes, since torch would print a trace and switch it off by itself.

    Args:
        dtypes: Dtypes of the products, such as those of a model's weights.
    """
    with ExitStack() as stack:
        stack.enter_context(_onednn(_multiplies(dtypes)))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.callback(*_precision())
        torch.set_float32_matmul_precision("highest")
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def onednn_for(dtypes: Iterable[torch.dtype]) -> Iterator[None]:
    """Switch oneDNN off, until the context ends, if it cannot multiply one of the dtypes; change nothing else."""
    with _onednn(bool(_ONEDNN.enabled) and _multiplies(dtypes)):
        yield


def weight_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Dtypes of a model's weights, and those that its quantised layers compute in."""
    computed = (getattr(module, "compute_dtype", None) for module in model.modules())
    return {p.dtype for p in model.parameters()} | {dtype for dtype in computed if isinstance(dtype, torch.dtype)}


@contextmanager
def _onednn(enabled: bool) -> Iterator[None]:
    before = bool(_ONEDNN.enabled)
    _ONEDNN.enabled = enabled
    try:
        yield
    finally:
        _ONEDNN.enabled = before


def _precision() -> tuple[Any, ...]:
    """What to call to restore the precision of float32 products."""
    try:
        return torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by device, in the way of torch 2.9 and later, which has no one name
        holders: list[Any] = [torch.backends, torch.backends.cuda.matmul, _ONEDNN.matmul]
        before = [holder.fp32_precision for holder in holders]

        def restore() -> None:
            for holder, precision in zip(holders, before, strict=True):
                holder.fp32_precision = precision

        return (restore,)


def _multiplies(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether oneDNN is there and multiplies all of the dtypes on this CPU."""
    if not _ONEDNN.is_available():
        return False
    supported: Any = torch.ops.mkldnn
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return all(dtype not in checks or bool(getattr(supported, checks[dtype])()) for dtype in dtypes)


def has_triton(device: torch.device) -> bool:
    """Whether Triton is there to write kernels for the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
