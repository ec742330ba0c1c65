"""Weights under which attention has something to say.

Freshly built models draw their matrices with a standard deviation near 0.02, which at tiny widths makes every
row of attention almost uniform, and start norms at one and biases, sinks and gates at zero: a mistake in any
of these would not be seen. So the parameters are changed, from the seed alone:

- matrices are drawn again, so that an input of unit variance gives an output of standard deviation ``GAIN``,
  or ``QUERY_KEY_GAIN`` for projections into queries and keys; embeddings with ``EMBEDDING_STD``;
- constants and near-constants (norms, biases, gates, zeros) keep their value and receive ``NOISE``, attention
  sinks ``SINK_NOISE``;
- values with a meaning of their own (decay rates, time steps, mixing ratios) stay as the type starts them.
"""

from __future__ import annotations

import math
import re
import zlib

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

GAIN = 0.8
QUERY_KEY_GAIN = 1.3
EMBEDDING_STD = 0.5
NOISE = 0.2
SINK_NOISE = 1.0

# A parameter drawn with less than this is an initialisation, one with more has a meaning of its own.
_DRAWN_STD = 0.06
# q_proj, kv_a_proj_with_mqa, query_key_value, Wqkv, wq_b, project_k, in_proj_qkvz, c_attn, ... and r, r_proj
# and relative_pos_embeddings, which make relative position logits.
_QUERY_KEY = re.compile(r"(w|project_|in_proj_|index_)?[qk]|c_attn$|r$|r_proj$|relative_pos", re.IGNORECASE)

_QUERY_KEY_NORM = re.compile(r"(^|[._])[qk]_(layer)?norm$")
# Zaya multiplies its unit-length keys by this; at its initial zero there is no attention pattern at all.
_KEY_SCALE = "temp"


def reweight(
    model: nn.Module, *, seed: int, query_key_gain: float = QUERY_KEY_GAIN, query_key_norm_gain: float = 1.0
) -> None:
    """Change every parameter of ``model`` in place as the module docstring says.

    Args:
        model: A freshly built model.
        seed: A parameter's values depend on this, its name and its shape.
        query_key_gain: Standard deviation of queries and keys for an input of unit variance.
        query_key_norm_gain: Factor on the weights of norms of queries and keys, which undo the gain above.
    """
    with torch.no_grad():
        done: set[int] = set()
        # Embeddings first: an output layer that shares an embedding's weight is not to be drawn as a matrix.
        modules = sorted(model.named_modules(), key=lambda named: not isinstance(named[1], nn.Embedding))
        for prefix, module in modules:
            for own_name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in done or not parameter.is_floating_point():
                    continue
                if hasattr(module, "create_weight"):
                    continue  # a table of sines (RoFormer turns queries by it) is no weight
                done.add(id(parameter))
                name = f"{prefix}.{own_name}"
                std = _drawn_std(module, own_name, parameter)
                if std is not None:
                    leaf = prefix.rpartition(".")[2] if own_name == "weight" else own_name
                    gain = query_key_gain if _QUERY_KEY.match(leaf) else GAIN
                    parameter.copy_(_normal(name, parameter, seed) * std * gain)
                elif parameter.numel() == 1 or parameter.std() < _DRAWN_STD:
                    noise = SINK_NOISE if own_name == "sinks" else NOISE
                    parameter.add_(_normal(name, parameter, seed) * noise)
                    if own_name == _KEY_SCALE:
                        parameter.add_(1.0)
                    if _QUERY_KEY_NORM.search(prefix):
                        parameter.mul_(query_key_norm_gain)


def _normal(name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(parameter.shape, generator=generator)


def _drawn_std(module: nn.Module, name: str, parameter: torch.Tensor) -> float | None:
    """Standard deviation for unit gain if the parameter is to be drawn again, else None."""
    if isinstance(module, nn.Embedding):
        return EMBEDDING_STD / GAIN
    if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and name == "weight":
        return math.prod(parameter.shape[1:]) ** -0.5
    if isinstance(module, Conv1D) and name == "weight":
        return parameter.shape[0] ** -0.5
    if parameter.ndim < 2 or not 0 < parameter.std() < _DRAWN_STD:
        return None
    # Stacked experts, routers and bare projections, whose orientation differs between types.
    return max(parameter.shape) ** -0.5
