"""PyTorch's numerical settings, reset to those of a new process while results are computed; what GPUs hold."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_ONEDNN: Any = torch.backends.mkldnn  # its switch is a property made at import, unknown to type checkers


@contextmanager
def new_process_settings(dtypes: Iterable[torch.dtype] = ()) -> Iterator[None]:
    """Use the numerical settings of a new process inside the context, then restore the previous ones.

    Sets oneDNN, the precision of float32 products, the default dtype and device, and autocast. oneDNN is disabled if it
    does not support one of the dtypes, since torch would otherwise print a stack trace before disabling it.

    Args:
        dtypes: Dtypes of matrix products, such as those of a model's weights.
    """
    with ExitStack() as stack:
        stack.enter_context(_onednn(_onednn_supports(dtypes)))
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
    """Disable oneDNN inside the context if it does not support one of the dtypes; change nothing else."""
    with _onednn(bool(_ONEDNN.enabled) and _onednn_supports(dtypes)):
        yield


@contextmanager
def random_states() -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and torch, on all devices in use, after the context."""
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate()), (torch.set_rng_state, torch.get_rng_state())]
    if "numpy" in sys.modules:
        generators: Any = sys.modules["numpy"].random
        states.append((generators.set_state, generators.get_state()))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)


_DEVICE: ContextVar[str] = ContextVar("device", default="cpu")


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Make :func:`computing_device` return a GPU inside the context; of several devices joined by "+", the first."""
    first = device.split("+")[0]
    token = _DEVICE.set(first if first.startswith("cuda") else "cpu")
    try:
        yield
    finally:
        _DEVICE.reset(token)


def computing_device() -> torch.device:
    """Return the device for long sums over results that are on the CPU: a GPU that holds the model, else the CPU."""
    return torch.device(_DEVICE.get())


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of the CPU inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def few_threads(model: nn.Module) -> AbstractContextManager[None]:
    """Use one thread for a small model on a CPU inside the context: its tensors are shorter than a thread's start."""
    weights = list(model.parameters())
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    small = on_cpu and sum(weight.numel() for weight in weights) < _SMALL
    return one_thread() if small else nullcontext()


_SMALL = 20_000_000
"""Number of weights below which more threads make a pass over a short text slower."""


def weight_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the dtypes of a model's weights, and those in which its quantised layers compute."""
    computed = (getattr(module, "compute_dtype", None) for module in model.modules())
    return {p.dtype for p in model.parameters()} | {dtype for dtype in computed if isinstance(dtype, torch.dtype)}


@lru_cache(maxsize=4096)
@torch.inference_mode(False)  # the kept tensors are also used outside of inference mode
def constant_tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a few numbers ``(n,)`` on a device, such as indices; kept, because a copy to a GPU waits for it."""
    return torch.tensor(values, device=device)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, with those that torch has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def has_triton(device: torch.device) -> bool:
    """Return whether Triton can compile kernels for the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@contextmanager
def _onednn(enabled: bool) -> Iterator[None]:
    before = bool(_ONEDNN.enabled)
    _ONEDNN.enabled = enabled
    try:
        yield
    finally:
        _ONEDNN.enabled = before


def _precision() -> tuple[Any, ...]:
    """Return a function, and its arguments, that restores the current precision of float32 products."""
    try:
        return torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
    except RuntimeError:  # set per device, with the settings of torch 2.9 and later, which have no single name
        holders: list[Any] = [torch.backends, torch.backends.cuda.matmul, _ONEDNN.matmul]
        before = [holder.fp32_precision for holder in holders]

        def restore() -> None:
            for holder, precision in zip(holders, before, strict=True):
                holder.fp32_precision = precision

        return (restore,)


def _onednn_supports(dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether oneDNN is available and multiplies matrices of all the dtypes on this CPU."""
    if not _ONEDNN.is_available():
        return False
    supported: Any = torch.ops.mkldnn
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return all(dtype not in checks or bool(getattr(supported, checks[dtype])()) for dtype in dtypes)
