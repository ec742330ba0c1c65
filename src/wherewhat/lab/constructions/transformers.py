"""Index and Retrieval transformers with explicit weights, and the softmax temperature they need."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.lab.config import LabConfig
from wherewhat.lab.constructions.discrepancy import index_bound, index_discrepancy, retrieval_discrepancy
from wherewhat.lab.model import LabModel
from wherewhat.lab.tasks.multi_hop import LetterTask, NumberTask, Pairs
from wherewhat.lab.tasks.one_hop import IndexTask, RetrievalTask
from wherewhat.lab.tasks.task import SequenceTask

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
    """
    off = math.sqrt(2 * max(gap, 0.0)) * longest * theta * ROUNDING + 2 * ROUNDING
    if not gap > 2 * off:
        raise ConfigError(
            f"theta={theta} leaves a gap of no more than {gap:.2g} between logits at length {longest}, and float32 "
            f"angles hold no less than {2 * off:.2g}: take another angle, or a smaller longest"
        )


LEAK = 1e-7
"""Small enough for positional and symbolic scores to be 0 and 1 within 1e-6."""

_COLDEST = 1e-9


def softmax_temperature(gap: float, others: int, *, leak: float = LEAK) -> float:
    """The temperature at which a key whose logit is ``gap`` above ``others`` others has 1 - leak of the mass."""
    if not gap > 0:
        raise ConfigError(f"the gap is {gap}: no temperature singles out a key that is not above the others")
    if others < 1:
        raise ConfigError(f"{others} other keys: there must be one or more")
    if not 0 < leak < 0.5:
        raise ConfigError(f"leak is {leak}: give a number above 0 and below 1/2")
    return gap / math.log(others * (1 - leak) / leak)


def index_leak(layers: int) -> float:
    """The leak below which stacked Index layers are right on all inputs of up to so many hops.

    Attention is the same in all layers, a matrix A, and the letters' part of the stream is ``(1 + 2A)^l`` times the
    letters. With a leak ε the right letter has at least ``(2 (1 - ε))^l`` after as many hops as layers, all wrong ones
    together at most ``3^l - (3 - 2ε)^l``, and the integer 1; fewer hops only help.
    """
    low, high = 0.0, 0.5
    while high - low > 1e-12:
        leak = (low + high) / 2
        right, wrong = (2 * (1 - leak)) ** layers, 3.0**layers - (3 - 2 * leak) ** layers
        low, high = (leak, high) if right > max(wrong, 1.0) else (low, leak)
    return low


def index_temperature(longest: int, theta: float, *, layers: int = 1, leak: float = LEAK) -> float:
    """A temperature at which Index layers are right on all inputs of up to ``longest`` tokens.

    The gap is the discrepancy of the worst input: every token of a sequence asks, the first and the last too.

    Args:
        longest: Largest number of tokens, n0.
        theta: Angle per position.
        layers: Number of layers, not less than the number of hops.
        leak: Mass that may go to wrong keys; no more than :func:`index_leak` is taken.
    """
    theta = held_angle(theta)
    # The bound takes no time at any length. Where it is too coarse, so is the gap, which is no larger.
    check_held(index_bound(longest, theta), longest=longest, theta=theta)
    gap = index_discrepancy(longest, theta, at="worst")
    check_held(gap, longest=longest, theta=theta)
    return softmax_temperature(gap, longest - 1, leak=min(leak, index_leak(layers)))


def retrieval_error(longest: int, theta: float, omega: float, *, layers: int, temperature: float) -> float:
    """How much of the last token's content can be wrong after stacked Retrieval layers: right if below 1/2.

    After a layer each token holds a mixture of tokens. In the first, the right key's leak is that of its gap. Later, a
    token that is off the path may hold almost the right content and stand nearer than the one that holds it: what it
    lacks is then copied along. See ``docs/constructions.md``.
    """
    lost = 1 - math.cos((longest - 1) * theta)
    step = 1 - math.cos(omega - (longest - 1) * theta)
    others = longest - 1
    share = others * math.exp(-retrieval_discrepancy(longest, theta, omega, at="worst") / temperature)
    error = share / (1 + share)
    for _ in range(layers - 1):
        slope = (1 - error) * step - 2 * error
        if slope <= temperature:
            return 1.0
        behind = 2 * error + (1 - error) * lost + 2 * error**2 + error * (longest - 1) * theta
        error = (behind + temperature * (1 + math.log(others * slope / temperature))) / slope
        if error >= 0.5:
            return 1.0
    return error


def retrieval_temperature(longest: int, theta: float, omega: float, *, layers: int = 1, leak: float = LEAK) -> float:
    """A temperature at which Retrieval layers are right on all inputs of up to ``longest`` tokens.

    For one layer that of the worst input's discrepancy, for more one with :func:`retrieval_error` below 1/2.

    Args:
        longest: Largest number of tokens, n0.
        theta: Angle per position, from 0 to below ω / (2 n0).
        omega: Angle between neighbouring letters.
        layers: Number of layers, not less than the number of hops.
        leak: Mass of the first layer's queries that may go to wrong keys.
    """
    theta = held_angle(theta)
    gap = retrieval_discrepancy(longest, theta, omega, at="worst")
    if not gap > 0:
        raise ConfigError(
            f"theta={theta:.6g} is too large for Retrieval with letters {omega:.4g} apart at length {longest}: give "
            f"less than {omega / (2 * longest):.3g}"
        )
    temperature = softmax_temperature(gap, longest - 1, leak=leak)
    while retrieval_error(longest, theta, omega, layers=layers, temperature=temperature) >= 0.5:
        temperature /= 2
        if temperature < _COLDEST:
            raise ConfigError(
                f"{layers} layers of Retrieval with theta={theta:.6g} are not proved at length {longest}: take a "
                "smaller angle, or give a temperature and check it"
            )
    return temperature


def index_transformer(
    task: SequenceTask,
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


def retrieval_transformer(
    task: SequenceTask,
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
    :func:`~wherewhat.lab.constructions.transformers.retrieval_error` is below 1/2, which takes a smaller θ.

    Args:
        task: A letter or retrieval task.
        theta: Angle per position, from 0 to below ω / (2 n0).
        layers: Number of layers, the largest number of hops it can do.
        temperature: Logits are divided by it; cold enough for ``longest`` tokens if not given.
        longest: Largest number of tokens, n0; that of the task if not given.
        dtype: Arithmetic; float32 is enough.
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
