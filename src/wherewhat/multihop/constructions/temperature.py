"""How cold softmax must be to do what hard attention does, up to a length.

A key whose logit is ``gap`` above each of n - 1 others has at least ``1 / (1 + (n - 1) exp(-gap / T))`` of the mass.
What is missing to 1, the *leak*, goes to wrong keys; how much of it a construction bears depends on what its layers
make of it. ``docs/constructions.md`` has the derivations.
"""

from __future__ import annotations

import math

from wherewhat.errors import ConfigError
from wherewhat.multihop.constructions.writing import check_held, held_angle
from wherewhat.multihop.discrepancy import index_bound, index_discrepancy, retrieval_discrepancy

LEAK = 1e-7
"""Small enough for positional and symbolic scores to be 0 and 1 within 1e-6."""

_COLDEST = 1e-9


def softmax_temperature(gap: float, others: int, *, leak: float = LEAK) -> float:
    """The temperature at which a key whose logit is ``gap`` above ``others`` others has 1 - leak of the mass.

    Raises:
        ConfigError: If there is no gap, or the leak is not between 0 and 1/2.
    """
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

    Raises:
        ConfigError: If there is none, or float32 angles are too coarse for it.
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

    Raises:
        ConfigError: If there is none, or it is not proved for so many layers.
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
