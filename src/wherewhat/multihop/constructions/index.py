"""The Index transformer: where decides. Explicit weights for the number task and the one-hop index task."""

from __future__ import annotations

import torch

from wherewhat.errors import ConfigError
from wherewhat.multihop.constructions.temperature import index_temperature
from wherewhat.multihop.constructions.writing import blank_model, directions, held_angle, write_layers
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.tasks import IndexTask, NumberTask, Task


def index_transformer(
    task: Task,
    *,
    theta: float,
    layers: int = 1,
    temperature: float | None = None,
    longest: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> LabModel:
    """Layers that copy the letter an integer points at, one head and one angle each, all the same.

    Every key is v, a unit vector; the query is v for a letter and v turned by -mθ for an integer m; so the logit of
    query i and key j is ``cos((i - j - m)θ)``. Values are 2 on letters and 0 elsewhere, added to the stream. Keys and
    v come from the bias coordinate, and integers add what turns v, so that letters copied to an integer change neither
    its query nor its key.

    Proved (``docs/constructions.md``): all layers attend alike, whatever was copied. With hard attention an integer h
    hops from its letter holds it from layer h on, ``Σ_{k ≥ h} C(l, k) 2^k`` times after layer l, and no other letter,
    while its own coordinate stays 1: so l ≥ h layers are right on every input, later layers are Reflexive. With softmax
    the same holds of the largest coordinate for up to ``longest`` tokens at the default temperature.

    Args:
        task: A number or index task.
        theta: Angle per position; 2π must not be a small multiple of it.
        layers: Number of layers, the largest number of hops it can do.
        temperature: Logits are divided by it; cold enough for ``longest`` tokens if not given.
        longest: Largest number of tokens, n0; that of the task if not given.
        dtype: Arithmetic. What limits n0 is that the model's angles are float32 in either, so float32 is enough
            wherever a temperature is found; float64 has smaller leaks.

    Raises:
        ConfigError: If the task is another one, an option is out of range, or no temperature does it.
    """
    if not isinstance(task, (NumberTask, IndexTask)):
        raise ConfigError(f"the Index transformer does number and index tasks, not a {type(task).__name__}")
    if temperature is None:
        temperature = index_temperature(longest or task.length, theta, layers=layers)
    model = blank_model(
        task.vocabulary, layers=layers, theta=theta, temperature=temperature, residual=True, dtype=dtype
    )
    letters = task.answers
    integers = torch.arange(1, task.vocabulary - letters + 1, dtype=torch.float64)
    v = torch.tensor([1.0, 0.0], dtype=torch.float64)
    keys = torch.zeros(task.vocabulary + 1, 2, dtype=torch.float64)
    keys[-1] = v
    queries = keys.clone()
    queries[letters:-1] = directions(-integers * held_angle(theta)) - v
    values = torch.zeros(task.vocabulary)
    values[:letters] = 2
    write_layers(model, queries=queries, keys=keys, values=values)
    return model
