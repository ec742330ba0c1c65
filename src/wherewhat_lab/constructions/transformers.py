"""Transformers with explicit weights: Index and Retrieval, with the softmax temperature needed; Fourier heads."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat_lab.config import LabConfig
from wherewhat_lab.constructions.discrepancy import index_bound, index_discrepancy, retrieval_discrepancy
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask
from wherewhat_lab.tasks.task import SequenceTask

ROUNDING = 2.0**-23
"""Models compute angles, cosines and sines in float32, whatever the dtype of their weights."""


def blank_model(
    vocabulary: int,
    *,
    layers: int,
    angles: tuple[float, ...],
    temperature: float,
    residual: bool,
) -> LabModel:
    """Return a float64 model with one head per layer, without norm, MLP and dropout, and with one-hot embeddings.

    Coordinate t of the residual stream belongs to token t, the next one, the bias coordinate, is 1 for every token, and
    one more is 0 where the width would be odd. Output projections are the identity, and the output reads the tokens'
    coordinates. Weights of queries, keys and values are 0.

    Args:
        vocabulary: Number of tokens.
        layers: Number of layers.
        angles: Angles per position of the heads' first planes; others do not rotate.
        temperature: Logits are divided by it.
        residual: Whether a layer adds to the stream or replaces it.
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
            angles=angles,
        )
    ).double()
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
    """Set the weights of every layer to the same head.

    Args:
        model: A blank model.
        queries: Contribution of each coordinate of the stream to the first dimensions of the query, the rotated ones,
            ``(coordinates, dimensions)``.
        keys: The same for the key.
        values: Factor of each coordinate of the stream in the value, ``(coordinates,)``.
    """
    width = model.config.width
    for block in model.blocks:
        assert isinstance(block.qkv, torch.nn.Linear)
        of_q, of_k, of_v = torch.split(block.qkv.weight, width)
        of_q[: queries.shape[1], : len(queries)] = queries.T.to(of_q.dtype)
        of_k[: keys.shape[1], : len(keys)] = keys.T.to(of_k.dtype)
        of_v.diagonal()[: len(values)] = values.to(of_v.dtype)


def directions(angles: Tensor) -> Tensor:
    """Return unit vectors ``(count, 2)`` at angles ``(count,)``."""
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def rounded_angle(theta: float) -> float:
    """Return the angle rounded to float32, as in a model."""
    return float(torch.tensor(theta, dtype=torch.float32))


def check_gap(gap: float, *, longest: int, theta: float) -> None:
    """Check that a gap between logits exceeds the rounding of a model's float32 angles.

    An angle pθ has an error of up to half its rounding, and the difference of two one of ``longest · θ · 2⁻²³``. Near
    the largest logit it changes ``1 - cos x`` by that times ``x = √(2 gap)``. Cosines and sines have errors of 2⁻²⁴.
    """
    off = math.sqrt(2 * max(gap, 0.0)) * longest * theta * ROUNDING + 2 * ROUNDING
    if not gap > 2 * off:
        raise ConfigError(
            f"theta={theta} leaves a gap of at most {gap:.2g} between logits at length {longest}, and float32 angles "
            f"need at least {2 * off:.2g}: choose another angle, or a smaller longest"
        )


LEAK = 1e-7
"""Attention weight on wrong keys for which positional and symbolic scores are 0 and 1 within 1e-6."""

_LOWEST_TEMPERATURE = 1e-9


def softmax_temperature(gap: float, others: int, *, leak: float = LEAK) -> float:
    """Return the temperature at which a key with a logit ``gap`` above ``others`` other keys has weight 1 - leak."""
    if not gap > 0:
        raise ConfigError(f"the gap is {gap}: it must be positive for a temperature to exist")
    if others < 1:
        raise ConfigError(f"others is {others}: there must be one other key or more")
    if not 0 < leak < 0.5:
        raise ConfigError(f"leak is {leak}: give a number above 0 and below 1/2")
    return gap / math.log(others * (1 - leak) / leak)


def index_leak(layers: int) -> float:
    """Return the largest leak at which stacked Index layers are correct on all inputs with up to ``layers`` hops.

    Attention is the same in all layers, a matrix A, and the letters' part of the stream is ``(1 + 2A)^l`` times the
    letters. With a leak ε the correct letter has at least ``(2 (1 - ε))^l`` after l hops in l layers, all wrong ones
    together at most ``3^l - (3 - 2ε)^l``, and the integer 1; fewer hops only help.
    """
    low, high = 0.0, 0.5
    while high - low > 1e-12:
        leak = (low + high) / 2
        right, wrong = (2 * (1 - leak)) ** layers, 3.0**layers - (3 - 2 * leak) ** layers
        low, high = (leak, high) if right > max(wrong, 1.0) else (low, leak)
    return low


def repeating_distance(theta: float, longest: int) -> int | None:
    """Return the smallest t < ``longest`` for which tθ is a multiple of 2π in float32, None if there is none.

    Keys at distances d and d + t have equal logits then, and Index has no unique largest one. Such a t exists at some
    length if and only if θ/π is rational; an irrational θ is not enough: θ = 2π/7 is irrational and repeats after 7.
    """
    turns = torch.arange(1, longest, dtype=torch.float64) * theta / (2 * math.pi)
    apart = (turns - turns.round()).abs() * 2 * math.pi
    repeats = (apart <= turns * 2 * math.pi * ROUNDING).nonzero()
    return int(repeats[0]) + 1 if len(repeats) else None


def index_temperature(longest: int, theta: float, *, layers: int = 1, leak: float = LEAK) -> float:
    """Return a temperature at which Index layers are correct on all inputs of up to ``longest`` tokens.

    The gap is the discrepancy of the worst input: every token of a sequence is a query.

    Args:
        longest: Largest number of tokens, n0.
        theta: Angle per position.
        layers: Number of layers, not less than the number of hops.
        leak: Attention weight allowed on wrong keys; at most :func:`index_leak` is used.
    """
    theta = rounded_angle(theta)
    # The bound is fast at any length. Where it is too small, so is the gap, which is not larger.
    check_gap(index_bound(longest, theta), longest=longest, theta=theta)
    repeated = repeating_distance(theta, longest)
    if repeated is not None:
        raise ConfigError(
            f"theta={theta:.6g} times {repeated} is a multiple of 2π in float32, and keys {repeated} apart have equal "
            f"logits: choose an angle whose ratio to π is irrational, or at most {repeated} tokens"
        )
    gap = index_discrepancy(longest, theta, at="worst")
    check_gap(gap, longest=longest, theta=theta)
    return softmax_temperature(gap, longest - 1, leak=min(leak, index_leak(layers)))


def retrieval_error(longest: int, theta: float, omega: float, *, layers: int, temperature: float) -> float:
    """Return a bound on the wrong share of the last token's content after stacked Retrieval layers.

    The model is correct if it is below 1/2. After a layer each token holds a mixture of tokens. In the first layer the
    leak follows from the gap. In later ones a token off the path may hold almost the correct content and be nearer than
    the one that holds it, so that its error is copied. See ``docs/constructions.md``.
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


def retrieval_temperature(longest: int, theta: float, omega: float, *, layers: int = 1) -> float:
    """Return a temperature at which Retrieval layers are correct on all inputs of up to ``longest`` tokens.

    For one layer it follows from the worst input's discrepancy, for more from :func:`retrieval_error` below 1/2.

    Args:
        longest: Largest number of tokens, n0.
        theta: Angle per position, from 0 to below ω / (2 n0).
        omega: Angle between neighbouring letters.
        layers: Number of layers, not less than the number of hops.
    """
    theta = rounded_angle(theta)
    gap = retrieval_discrepancy(longest, theta, omega, at="worst")
    if not gap > 0:
        raise ConfigError(
            f"theta={theta:.6g} is too large for Retrieval with letters {omega:.4g} apart at length {longest}: give "
            f"less than {omega / (2 * longest):.3g}"
        )
    temperature = softmax_temperature(gap, longest - 1)
    while retrieval_error(longest, theta, omega, layers=layers, temperature=temperature) >= 0.5:
        temperature /= 2
        if temperature < _LOWEST_TEMPERATURE:
            raise ConfigError(
                f"{layers} layers of Retrieval with theta={theta:.6g} are not proved at length {longest}: choose a "
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
) -> LabModel:
    """Construct identical layers of one head and one angle that copy the letter an integer points at.

    Every key is v, a unit vector; the query is v for a letter and v rotated by -mθ for an integer m; so the logit of
    query i and key j is ``cos((i - j - m)θ)``. Values are 2 on letters and 0 elsewhere, added to the stream. Keys and
    v come from the bias coordinate, and integers add the difference to v, so that letters copied to an integer change
    neither its query nor its key.

    Proved (``docs/constructions.md``): all layers have the same attention, whatever was copied. With hard attention an
    integer h hops from its letter holds it from layer h on, ``Σ_{k ≥ h} C(l, k) 2^k`` times after layer l, and no other
    letter, while its own coordinate stays 1: so l ≥ h layers are correct on every input, later layers are Reflexive.
    With softmax the same holds of the largest coordinate for up to ``longest`` tokens at the default temperature.

    Args:
        task: A number or index task.
        theta: Angle per position. No length limits it if θ/π is irrational; for n0 tokens it is enough that no tθ with
            t < n0 is a multiple of 2π (:func:`repeating_distance`).
        layers: Number of layers, the largest number of hops it can do.
        temperature: Logits are divided by it; by default low enough for ``longest`` tokens.
        longest: Largest number of tokens, n0; that of the task by default.
    """
    if not isinstance(task, (NumberTask, IndexTask)):
        raise ConfigError(f"the Index transformer solves number and index tasks, not a {type(task).__name__}")
    if temperature is None:
        temperature = index_temperature(longest or task.length, theta, layers=layers)
    model = blank_model(task.vocabulary, layers=layers, angles=(theta,), temperature=temperature, residual=True)
    letters = task.answers
    integers = torch.arange(1, task.vocabulary - letters + 1, dtype=torch.float64)
    v = torch.tensor([1.0, 0.0], dtype=torch.float64)
    keys = torch.zeros(task.vocabulary + 1, 2, dtype=torch.float64)
    keys[-1] = v
    queries = keys.clone()
    queries[letters:-1] = directions(-integers * rounded_angle(theta)) - v
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
) -> LabModel:
    """Construct layers of one head and one angle in which a pair copies the pair whose left letter is its right one.

    Letter number φ is the direction -φω, ω = 2π over the number of letters. The key is its left letter's; the query is
    the right letter's of a (letter, letter), the left one's of a (letter, digit). Values are the stream itself,
    which the output of attention replaces.

    Proved (``docs/constructions.md``): with hard attention, 0 ≤ θ < ω / (2 n0) and left letters on the path that no
    other pair has, the token a hops into the path holds the pair min(a + l, h) hops into it after l layers; so l ≥ h
    layers are correct on every such input of up to n0 tokens, later ones are Reflexive. With softmax the same holds of
    the largest coordinate at the default temperature: of one layer for any such θ, of several where
    :func:`~wherewhat_lab.constructions.transformers.retrieval_error` is below 1/2, which takes a smaller θ.

    Args:
        task: A letter or retrieval task.
        theta: Angle per position, from 0 to below ω / (2 n0).
        layers: Number of layers, the largest number of hops it can do.
        temperature: Logits are divided by it; by default low enough for ``longest`` tokens.
        longest: Largest number of tokens, n0; that of the task by default.
    """
    if not isinstance(task, (LetterTask, RetrievalTask)):
        raise ConfigError(f"the Retrieval transformer solves letter and retrieval tasks, not a {type(task).__name__}")
    omega = letter_angle(task)
    if temperature is None:
        temperature = retrieval_temperature(longest or task.length, theta, omega, layers=layers)
    model = blank_model(task.vocabulary, layers=layers, angles=(theta,), temperature=temperature, residual=False)
    left, asked = pair_letters(task, torch.arange(task.vocabulary))
    keys, queries = (directions(-letters.double() * omega) for letters in (left, asked))
    write_layers(model, queries=queries, keys=keys, values=torch.ones(model.config.width))
    return model


def letter_angle(task: LetterTask | RetrievalTask) -> float:
    """Return the angle between neighbouring letters, ω."""
    return 2 * math.pi / task.letters


def pair_letters(task: LetterTask | RetrievalTask, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the letters of pairs as numbers from 0, in the shape of ``tokens``: the left one and the queried one."""
    link = tokens >= task.answers
    left = torch.where(link, (tokens - task.answers) // task.letters, tokens // task.digits)
    return left, torch.where(link, (tokens - task.answers) % task.letters, left)


Side = Literal["query", "key"]
"""The token that the function depends on: the one that attends, or the one that is attended to."""


def fourier_transformer(values: Tensor, *, side: Side = "query") -> LabModel:
    """Construct a layer of one head whose logits are any given function of a token and a distance.

    It is the positive control of the additive fit: a single head can have logits that are not
    ``a[i-j] + b[i] + c[j]``, and an r near that of noise. Each plane of RoPE contributes one frequency of the distance.

    The logit of query i and key j is ``values[x, (i - j) mod period]``, with x the token at i (side ``query``) or at j
    (side ``key``). Plane f turns by ``2π f / period`` per position. The tokens of one side have the amplitudes and
    phases of the Fourier transform of their function in the planes, those of the other side are all equal:
    ``Σ_f Re(q_f conj(k_f) e^(2πi f d / period))`` is the inverse transform.

    Args:
        values: The function, ``(tokens, period)``; at least as many tokens as the period, which determine the width.
        side: The token that it depends on.
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
    model = blank_model(tokens, layers=1, angles=angles, temperature=1.0, residual=False)
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
