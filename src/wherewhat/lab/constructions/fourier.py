"""A RoPE head with any function of a token and a distance as its logits: the positive control of the additive fit.

Each plane of RoPE contributes one frequency of the distance. With the frequencies of a discrete Fourier transform, the
inverse transform of a function of the distance is a choice of amplitudes and phases, one per plane, which a query (or a
key) can hold. So a single head can have logits that are not ``a[i-j] + b[i] + c[j]``, and an r near that of noise.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.constructions.transformers import blank_model, write_layers
from wherewhat.lab.model import LabModel

Side = Literal["query", "key"]
"""The token that the function depends on: the one that attends, or the one that is attended to."""


def fourier_transformer(values: Tensor, *, side: Side = "query", dtype: torch.dtype = torch.float64) -> LabModel:
    """Construct a layer of one head whose logits are any given function of a token and a distance.

    The logit of query i and key j is ``values[x, (i - j) mod period]``, with x the token at i (side ``query``) or at j
    (side ``key``). Plane f turns by ``2π f / period`` per position. The tokens of one side have the amplitudes and
    phases of the Fourier transform of their function in the planes, those of the other side are all equal:
    ``Σ_f Re(q_f conj(k_f) e^(2πi f d / period))`` is the inverse transform.

    Args:
        values: The function, ``(tokens, period)``; at least as many tokens as the period, which determine the width.
        side: The token that it depends on.
        dtype: Dtype of the weights; the angles are float32 in any case.
    """
    if values.ndim != 2 or values.shape[1] < 2:
        raise ConfigError(f"values {tuple(values.shape)} must be (tokens, period), with a period of 2 or more")
    tokens, period = values.shape
    if tokens < period:
        raise ConfigError(
            f"{tokens} tokens do not have the width for a period of {period}: give at least as many tokens as distances"
        )
    planes = period // 2 + 1
    angles = tuple(2 * math.pi * f / period for f in range(planes))
    model = blank_model(tokens, layers=1, angles=angles, temperature=1.0, residual=False, dtype=dtype)
    spectrum = torch.fft.rfft(values.double(), dim=1) * 2 / period
    spectrum[:, 0] /= 2
    if period % 2 == 0:
        spectrum[:, -1] /= 2  # the frequencies 0 and 1/2 occur once in the transform, the others twice
    if side == "key":
        spectrum = spectrum.conj()
    by_token = torch.zeros(tokens + 1, 2 * planes, dtype=torch.float64)
    by_token[:tokens] = torch.view_as_real(spectrum.resolve_conj()).flatten(1)
    same = torch.zeros_like(by_token)
    same[-1, 0::2] = 1  # from the bias coordinate, which every token has
    queries, keys = (by_token, same) if side == "query" else (same, by_token)
    write_layers(model, queries=queries, keys=keys, values=torch.ones(tokens))
    return model


def random_function(tokens: int, period: int, *, seed: int = 0) -> Tensor:
    """Return a function without structure, ``(tokens, period)``: independent Gaussian values."""
    return torch.randn(tokens, period, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def index_function(tokens: int, period: int, *, seed: int = 0) -> Tensor:
    """Return a sparse function, ``(tokens, period)``: each token attends to one distance, drawn at random.

    It is the Index function of the multi-hop tasks, with a logit of 1 at the distance and 0 elsewhere.
    """
    distances = torch.randint(period, (tokens,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(distances, period).double()


def additive_function(tokens: int, period: int, *, seed: int = 0) -> Tensor:
    """Return a sum of a function of the distance and one of the token, ``(tokens, period)``: the negative control."""
    generator = torch.Generator().manual_seed(seed)
    by_distance, by_token = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (period, tokens))
    return by_distance + by_token[:, None]


def distinct_tokens(model: LabModel, n: int, *, seed: int = 0) -> Tensor:
    """Return an input of ``n`` different tokens in random order, ``(1, n)``: no two of them share a function."""
    if not 2 <= n <= model.config.vocabulary:
        raise ConfigError(f"n is {n}: the model has {model.config.vocabulary} different tokens; give 2 to that many")
    return torch.randperm(model.config.vocabulary, generator=torch.Generator().manual_seed(seed))[None, :n]
