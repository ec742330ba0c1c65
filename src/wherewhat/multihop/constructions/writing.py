"""A model with nothing in it, for weights to be written into."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.multihop.config import LabConfig
from wherewhat.multihop.model import LabModel

ROUNDING = 2.0**-23
"""Models turn their planes by angles, cosines and sines that are rounded to float32, whatever their weights are in."""


def blank_model(
    vocabulary: int, *, layers: int, theta: float, temperature: float, residual: bool, dtype: torch.dtype
) -> LabModel:
    """One head and one angle per layer, no norm, no MLP, no dropout; a token is its one-hot and a bias coordinate.

    Coordinate t of the residual stream belongs to token t, the next one is 1 for every token, and one more is 0 where
    the width would be odd. Heads hand on what they attend to as it is, and the output reads the tokens' coordinates.
    Weights of queries, keys and values are 0.

    Args:
        vocabulary: Number of tokens.
        layers: Number of layers.
        theta: Angle per position of the heads' first plane; others do not turn.
        temperature: Logits are divided by it.
        residual: Whether a layer adds to the stream, or replaces it.
        dtype: Arithmetic of the weights.

    Raises:
        ConfigError: If the temperature is not positive, or another option is out of range.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature is {temperature}: give a positive number")
    width = vocabulary + 1 + (vocabulary + 1) % 2
    model = LabModel(
        LabConfig(
            vocabulary=vocabulary,
            layers=layers,
            heads=1,
            width=width,
            dropout=0.0,
            norm=False,
            mlp=False,
            residual=residual,
            scale=1 / temperature,
            angles=(theta,),
        )
    ).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.embedding.copy_(torch.eye(vocabulary, width))
        model.embedding[:, vocabulary] = 1
        model.head.weight.copy_(torch.eye(vocabulary, width))
        for block in model.blocks:
            assert isinstance(block.out, torch.nn.Linear)
            block.out.weight.copy_(torch.eye(width))
    return model


@torch.no_grad()
def write_layers(model: LabModel, *, queries: Tensor, keys: Tensor, values: Tensor) -> None:
    """Give every layer the same head.

    Args:
        model: A blank model.
        queries: What each coordinate of the stream adds to the query in the plane that turns, ``(coordinates, 2)``.
        keys: The same for the key.
        values: Factor of each coordinate of the stream in the value, ``(coordinates,)``.
    """
    width = model.config.width
    for block in model.blocks:
        assert isinstance(block.qkv, torch.nn.Linear)
        of_q, of_k, of_v = torch.split(block.qkv.weight, width)
        of_q[:2, : len(queries)] = queries.T.to(of_q.dtype)
        of_k[:2, : len(keys)] = keys.T.to(of_k.dtype)
        of_v.diagonal()[: len(values)] = values.to(of_v.dtype)


def directions(angles: Tensor) -> Tensor:
    """Vectors of length 1 at some angles ``(count,)``, ``(count, 2)``."""
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def held_angle(theta: float) -> float:
    """The angle as a model holds it, rounded to float32."""
    return float(torch.tensor(theta, dtype=torch.float32))


def check_held(gap: float, *, longest: int, theta: float) -> None:
    """Refuse a gap between logits that a model's float32 angles do not hold.

    An angle pθ is off by up to half its rounding, so the difference of two is by ``longest · θ · 2⁻²³``. Near the
    largest logit that moves ``1 - cos x`` by it times ``x = √(2 gap)``. Cosines and sines are off by 2⁻²⁴ each.

    Raises:
        ConfigError: If so.
    """
    off = math.sqrt(2 * max(gap, 0.0)) * longest * theta * ROUNDING + 2 * ROUNDING
    if not gap > 2 * off:
        raise ConfigError(
            f"theta={theta} leaves a gap of no more than {gap:.2g} between logits at length {longest}, and float32 "
            f"angles hold no less than {2 * off:.2g}: take another angle, or a smaller longest"
        )
