"""What all exports to Hugging Face share: refusing what a family has not, renaming weights, reordering planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.model import LabModel

WRITTEN_BY_HAND = ("frequencies", "norm", "mlp", "residual", "scale", "angles")
"""Options that no family of Hugging Face has."""

_Theirs = TypeVar("_Theirs")


def check_family(config: LabConfig, family: str, **allowed: Sequence[str]) -> None:
    """Refuse a model that a family of Hugging Face's has not.

    Args:
        config: The model.
        family: The family's name, for the message.
        allowed: What ``encoding``, ``block`` and ``biases`` may be.

    Raises:
        ConfigError: With all options that do not fit.
    """
    plain = LabConfig()
    odd = [name for name in WRITTEN_BY_HAND if getattr(config, name) != getattr(plain, name)]
    odd += [name for name, values in allowed.items() if getattr(config, name) not in values]
    if odd:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        possible = ", ".join(f"{name}={' or '.join(values)}" for name, values in allowed.items())
        raise ConfigError(f"Hugging Face's {family} has no {values}: it has {possible}")


def renamed(model: LabModel, whole: Mapping[str, str], layer: Mapping[str, str], prefix: str) -> dict[str, Tensor]:
    """Weights under Hugging Face's names.

    Args:
        model: The model; weights it has not are left out.
        whole: Their names by ours, of weights outside layers.
        layer: The same within layers.
        prefix: What their layers' names begin with, with ``{}`` for the layer's index.
    """
    weights = model.state_dict()
    names = dict(whole)
    for index in range(model.config.layers):
        names.update({f"blocks.{index}.{ours}": f"{prefix.format(index)}.{theirs}" for ours, theirs in layer.items()})
    return {theirs: weights[ours] for ours, theirs in names.items() if ours in weights}


def fill(theirs: _Theirs, weights: Mapping[str, Tensor], model: LabModel) -> _Theirs:
    """Their model with these weights, zeros for biases it has beyond them, in evaluation mode, like ours in place."""
    module: Any = theirs
    module.to(device=model.embedding.device, dtype=model.embedding.dtype).eval()
    missing = {name for name in module.state_dict() if name not in weights}
    zeros = {name: torch.zeros_like(module.state_dict()[name]) for name in missing if name.endswith(".bias")}
    module.load_state_dict({**weights, **zeros})
    return theirs


def split_qkv(model: LabModel, layer: int, planes: int = 0) -> list[Tensor]:
    """Projections of queries, keys and values, each ``(heads, d, width)``.

    Args:
        model: The model.
        layer: Which layer's.
        planes: Planes that turn: ours lie side by side, theirs have their first dimensions in one half of the turning
            ones and their second in the other.
    """
    config = model.config
    weight = model.state_dict()[f"blocks.{layer}.qkv.weight"].view(3, config.heads, config.head_width, config.width)
    turning = torch.arange(2 * planes).view(planes, 2).T.flatten()
    order = torch.cat([turning, torch.arange(2 * planes, config.head_width)]).to(weight.device)
    return [weight[0][:, order], weight[1][:, order], weight[2]]
