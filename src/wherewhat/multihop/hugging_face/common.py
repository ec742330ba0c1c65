"""What all exports to Hugging Face share: refusing what a family has not, renaming weights, reordering planes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.model import LabModel

WRITTEN_BY_HAND = ("frequencies", "norm", "mlp", "residual", "scale", "angles")
"""Options that no family of Hugging Face has."""

_Theirs = TypeVar("_Theirs")


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face's: which models it has, and what it calls their weights.

    Attributes:
        name: What messages call it.
        encoding: Encodings it has.
        block: Blocks it has.
        biases: Biases it has.
        whole: Its names by ours, of weights outside layers.
        layer: The same within layers.
        prefix: What its layers' names begin with, with ``{}`` for the layer's index.
    """

    name: str
    encoding: tuple[str, ...]
    block: tuple[str, ...]
    biases: tuple[str, ...]
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str

    def options(self, config: LabConfig) -> dict[str, Any]:
        """What every family's configuration calls alike, for a model that this one has.

        Raises:
            ConfigError: If it has no such model, with all options that do not fit.
        """
        plain = LabConfig()
        allowed = {name: getattr(self, name) for name in ("encoding", "block", "biases")}
        odd = [name for name in WRITTEN_BY_HAND if getattr(config, name) != getattr(plain, name)]
        odd += [name for name, values in allowed.items() if getattr(config, name) not in values]
        if odd:
            values = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
            possible = ", ".join(f"{name}={' or '.join(values)}" for name, values in allowed.items())
            raise ConfigError(f"Hugging Face's {self.name} has no {values}: it has {possible}")
        return {
            "vocab_size": config.vocabulary,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": False,
        }

    def renamed(self, model: LabModel) -> dict[str, Tensor]:
        """Weights under this family's names; those the model has not are left out."""
        weights = model.state_dict()
        names = dict(self.whole)
        for index in range(model.config.layers):
            prefix = self.prefix.format(index)
            names.update({f"blocks.{index}.{ours}": f"{prefix}.{theirs}" for ours, theirs in self.layer.items()})
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
