"""Where a model lives and in which number format."""

from typing import Any

import torch

from wherewhat.errors import ConfigError, LoadError
from wherewhat.models.optional import require

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def torch_name(value: Any) -> Any:
    """The name of a torch dtype or device, such as ``float32`` or ``cuda:0``; anything else as it is."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    Raises:
        ConfigError: The name is not one of `DTYPES`.
    """
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """The torch device of a name; "auto" is the first CUDA device, or the CPU where there is none.

    Raises:
        ConfigError: The name is no device.
        LoadError: The device is not present on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise LoadError(f"device {name!r} was asked for, but this machine has no usable CUDA device: use cpu")
        if (device.index or 0) >= count:
            raise LoadError(f"device {name!r} was asked for, but only cuda:0 to cuda:{count - 1} exist")
        return device
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise LoadError(f"device {name!r} was asked for, but this machine has no usable MPS device: use cpu")
        return device
    raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")


def check_device_map(device_map: Any, device: str) -> None:
    """Refuse a device map that cannot be followed.

    Raises:
        ConfigError: A device was asked for as well.
        LoadError: accelerate is not installed.
    """
    if device_map is None:
        return
    if device != "auto":
        raise ConfigError(f"device={device!r} and device_map={device_map!r} were both given: give only one")
    require("accelerate", why="device_map", install="'wherewhat[large]'")


def describe_device(model: torch.nn.Module) -> str:
    """The device, or the devices joined by "+", that hold a model's parameters."""
    seen = dict.fromkeys(str(parameter.device) for parameter in model.parameters())
    return "+".join(name if name != "meta" else "offloaded" for name in seen)


def describe_dtype(model: torch.nn.Module) -> str:
    """Number format of a model's weights; quantised checkpoints keep their own, whatever was asked for."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(dtype).removeprefix("torch.")
