"""Models and unfinished trainings as safetensors files with the options in the header, written atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import LoadError, WherewhatError
from wherewhat.files import open_regular, write_file
from wherewhat.options import build_config, config_values
from wherewhat_lab.config import LabConfig
from wherewhat_lab.model import LabModel

_MODEL = "wherewhat laboratory model 1"
_STATE = "wherewhat training state 1"


@dataclass(frozen=True)
class TrainState:
    """State from which a training can be resumed.

    Attributes:
        step: Number of finished steps.
        threads: Number of parts that a batch is divided into.
        identity: Model, options and data of the training; see :func:`wherewhat_lab.training.identify`.
        weights: Weights by name.
        mean: AdamW's first moments.
        square: AdamW's second moments.
    """

    step: int
    threads: int
    identity: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    square: Mapping[str, Tensor]


def save_model(model: LabModel, path: Path, *, identity: Mapping[str, Any] | None = None) -> None:
    """Write a model to a file.

    Args:
        model: The model.
        path: The file; its folder must exist.
        identity: Model, options and data of the training, which :func:`read_identity` returns.
    """
    header = {"config": config_values(model.config), "identity": identity}
    _write(path, model.state_dict(), _MODEL, header)


def load_model(path: Path, *, device: str = "cpu") -> LabModel:
    """Load a model from a file."""
    tensors, header = _read(path, _MODEL)
    try:
        model = LabModel(build_config(LabConfig, header["config"]))
        model.load_state_dict(tensors)
    except (WherewhatError, RuntimeError, KeyError) as error:
        raise LoadError(f"{path} does not hold the weights that its header describes: write it again") from error
    return model.to(device)


def read_identity(path: Path) -> Mapping[str, Any] | None:
    """Return model, options and data of the training from a model's file."""
    identity: Mapping[str, Any] | None = _read(path, _MODEL)[1].get("identity")
    return identity


def save_state(state: TrainState, path: Path) -> None:
    """Write an unfinished training to a file."""
    groups = {"weights": state.weights, "mean": state.mean, "square": state.square}
    tensors = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
    _write(path, tensors, _STATE, {"step": state.step, "threads": state.threads, "identity": state.identity})


def load_state(path: Path) -> TrainState:
    """Load an unfinished training from a file."""
    tensors, header = _read(path, _STATE)
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "mean": {}, "square": {}}
    try:
        for key, value in tensors.items():
            group, _, name = key.partition("/")
            groups[group][name] = value
        return TrainState(int(header["step"]), int(header["threads"]), header["identity"], **groups)
    except (KeyError, ValueError, TypeError) as error:
        raise LoadError(f"{path} is not a complete training state: remove it to train from the start") from error


def _write(path: Path, tensors: Mapping[str, Tensor], kind: str, header: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    contents = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    described = {"kind": kind, "sha256": _digest(contents), **header}
    # One entry: safetensors writes several in an order that changes from call to call.
    write_file(path, save(contents, {"header": json.dumps(described, sort_keys=True)}))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the values of tensors, in the order of their names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        values: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        hasher.update(values)
    return hasher.hexdigest()


def _read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # safetensors would wait for the writer of a pipe
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            header: dict[str, Any] = json.loads(metadata.get("header", "{}"))
            file_kind = header.pop("kind", metadata.get("kind", "nothing"))  # files of earlier versions: an own entry
            if file_kind != kind:
                raise LoadError(f"{path} is not a {kind[:-2]}: its kind is {file_kind!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dictionary
        if header.pop("sha256", None) not in (None, _digest(tensors)):  # files of earlier versions have none
            raise ValueError
        return tensors, header
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else "it is damaged"
        raise LoadError(f"cannot read {path}: {reason}") from error
