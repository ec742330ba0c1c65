"""The Retrieval transformer: what decides. Explicit weights for the letter task and the one-hop retrieval task."""

from __future__ import annotations

import math

import torch

from wherewhat.errors import ConfigError
from wherewhat.multihop.constructions.temperature import retrieval_temperature
from wherewhat.multihop.constructions.writing import blank_model, directions, write_layers
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.tasks import LetterTask, RetrievalTask, Task
from wherewhat.multihop.tasks.spelling import Pairs


def retrieval_transformer(
    task: Task,
    *,
    theta: float,
    layers: int = 1,
    temperature: float | None = None,
    longest: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> LabModel:
    """Layers in which a pair copies the pair whose left letter is its right one, one head and one angle each.

    Letter number φ is the direction -φω, ω = 2π over the number of letters. The key is its left letter's; the query is
    the right letter's of a (letter, letter), the left one's of a (letter, digit). Values are the stream itself, and
    what attention gives replaces it.

    Proved (``docs/constructions.md``): with hard attention, 0 ≤ θ < ω / (2 n0) and left letters on the path that no
    other pair has, the token a hops into the path holds the pair min(a + l, h) hops into it after l layers; so l ≥ h
    layers are right on every such input of up to n0 tokens, later layers are Reflexive. With softmax the same holds of
    the largest coordinate at the default temperature: of one layer for any such θ, of several where
    :func:`~wherewhat.multihop.constructions.temperature.retrieval_error` is below 1/2, which takes a smaller θ.

    Args:
        task: A letter or retrieval task.
        theta: Angle per position, from 0 to below ω / (2 n0).
        layers: Number of layers, the largest number of hops it can do.
        temperature: Logits are divided by it; cold enough for ``longest`` tokens if not given.
        longest: Largest number of tokens, n0; that of the task if not given.
        dtype: Arithmetic; float32 is enough.

    Raises:
        ConfigError: If the task is another one, an option is out of range, or no temperature is proved to do it.
    """
    if not isinstance(task, (LetterTask, RetrievalTask)):
        raise ConfigError(f"the Retrieval transformer does letter and retrieval tasks, not a {type(task).__name__}")
    omega = letter_angle(task)
    if temperature is None:
        temperature = retrieval_temperature(longest or task.length, theta, omega, layers=layers)
    model = blank_model(
        task.vocabulary, layers=layers, theta=theta, temperature=temperature, residual=False, dtype=dtype
    )
    left, asked = pair_letters(task, torch.arange(task.vocabulary))
    keys, queries = (directions(-letters.double() * omega) for letters in (left, asked))
    write_layers(model, queries=queries, keys=keys, values=torch.ones(model.config.width))
    return model


def letter_angle(task: LetterTask | RetrievalTask) -> float:
    """Angle between neighbouring letters, ω."""
    return 2 * math.pi / task.letters


def pair_letters(task: LetterTask | RetrievalTask, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters of pairs as numbers from 0, in the shape of ``tokens``: the left one, and the one it asks for."""
    first_link = Pairs(task.letters, task.digits).first_link
    link = tokens >= first_link
    left = torch.where(link, (tokens - first_link) // task.letters, tokens // task.digits)
    return left, torch.where(link, (tokens - first_link) % task.letters, left)
