"""Confidence intervals of means, proportions and changes of proportions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_Z = 1.959964
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval over ``n`` documents; the bounds are None if one document is too few."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def reach(self) -> float | None:
        """Half of the interval; None if there is none, or the mean is not its middle, as at the end of a range."""
        if self.low is None or self.high is None or abs(self.high + self.low - 2 * self.mean) > 1e-9:
            return None
        return (self.high - self.low) / 2

    def within(self, range: tuple[float, float]) -> Interval:
        """Return the interval with bounds inside the range of possible values, but never beyond the mean."""
        if self.low is None or self.high is None:
            return self
        least, most = range
        return replace(self, low=min(max(self.low, least), self.mean), high=max(min(self.high, most), self.mean))


_DIGITS = 4
"""Most significant digits of a mean in words."""


def in_words(value: Interval, *, percent: bool = False) -> str:
    """Return a mean with its interval, rounded to its uncertainty: ``0.874 ± 0.004``, or ``0.87 (0.80 to 1.00)``.

    All means that a person reads are rounded here. The half width has one digit, or two if they are below 36 and there
    are more than two documents; the mean ends with the same digit and has at most four. A mean without an interval has
    three digits. Bounds are given if the mean is not their middle.

    Args:
        value: The mean and its interval.
        percent: Write it in percent.
    """
    scale, unit = (100.0, " %") if percent else (1.0, "")
    mean = scale * value.mean
    if value.low is None or value.high is None or not math.isfinite(value.high - value.low):
        return f"{_fixed(mean, 2 - _order(mean))}{unit}"
    half = scale * (value.high - value.low) / 2
    if half <= 0:
        return f"{_fixed(mean, 2 - _order(mean))} ± 0{unit}"
    two = value.n > 2 and half < 3.55 * 10.0 ** _order(half)
    decimals = min(int(two) - _order(half), _DIGITS - 1 - _order(max(abs(mean), half)))
    if value.reach is None:
        low, high = (_fixed(scale * bound, decimals) for bound in (value.low, value.high))
        return f"{_fixed(mean, decimals)}{unit} ({low} to {high}{unit})"
    least = 10.0 ** -max(0, decimals)
    reach = f"<{_fixed(least, decimals)}" if half < least / 2 else _fixed(half, decimals)
    return f"{_fixed(mean, decimals)} ± {reach}{unit}"


def in_brief(value: Interval, *, percent: bool = False) -> str:
    """Return a mean alone, with two digits or fewer: none is smaller than the second digit of the half width.

    Args:
        value: The mean and its interval.
        percent: Write it in percent.
    """
    scale, unit = (100.0, " %") if percent else (1.0, "")
    mean = scale * value.mean
    decimals = 1 - _order(mean)
    if (
        value.low is not None
        and value.high is not None
        and math.isfinite(value.high - value.low)
        and value.high > value.low
    ):
        decimals = min(decimals, 1 - _order(scale * (value.high - value.low) / 2))
    return f"{_fixed(round(mean, decimals), decimals)}{unit}"


def _order(value: float) -> int:
    """Return the power of ten of the first digit of a number; 0 for zero and for numbers that are not finite."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def _fixed(value: float, decimals: int) -> str:
    """Return a number with some decimals, none if negative, and no sign where it rounds to zero."""
    text = f"{value:.{max(0, decimals)}f}"
    return text.lstrip("-") if not float(text) else text


def interval(values: Sequence[float], *, tests: int = 1) -> Interval:
    """Return the mean and 95 % Student interval of independent values.

    Args:
        values: The values.
        tests: Number of quantities of which the clearest is reported; each interval then has a level of 1 - 0.05 /
            tests, so that all of them hold together with 95 % (Bonferroni).
    """
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Interval(mean, None, None, n)
    return around(mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n), n, tests=tests)


def welch(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the mean of the second sample minus that of the first with its 95 % interval (Welch 1947).

    The samples must be independent. The degrees of freedom (Welch & Satterthwaite) are rounded down; ``n`` is the size
    of the smaller sample. It contains the difference in 94 to 98 % of normal samples of three or more. A sample of two
    has no interval: beside one of eight it would be 91 %.
    """
    means = [sum(values) / len(values) for values in (first, second)]
    n, change = min(len(first), len(second)), means[1] - means[0]
    if n < 3:
        return Interval(change, None, None, n)
    errors = [
        sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)
        for values, mean in zip((first, second), means, strict=True)
    ]
    total = sum(errors)
    spread = sum(error**2 / (len(values) - 1) for values, error in zip((first, second), errors, strict=True))
    reach = student(int(total**2 / spread) + 1) * math.sqrt(total) if spread > 0 else 0.0
    return Interval(change, change - reach, change + reach, n)


def around(mean: float, error: float, n: int, *, tests: int = 1) -> Interval:
    """Return the 95 % Student interval around a mean with a standard error over ``n`` documents."""
    reach = student(n, tests=tests) * error
    return Interval(mean, mean - reach, mean + reach, n)


def wilson(values: Sequence[float]) -> Interval:
    """Return the proportion of ones among zeros and ones with its 95 % score interval (Wilson 1927)."""
    n = len(values)
    share = sum(values) / n
    return Interval(share, *share_bounds(share, n), n)


def share_bounds(share: float, n: float) -> tuple[float, float]:
    """Return the bounds of Wilson's interval of a proportion of ``n``, which may be a fractional effective size."""
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    reach = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def change_bounds(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the change of a proportion over ``n`` pairs (Bonett & Price 2012).

    The adjusted Wald interval counts one more gain and one more loss: its width is positive if nothing changed, and its
    centre is slightly closer to zero than the change.
    """
    middle, reach = (gained - lost) / (n + 2), _Z * change_error(gained, lost, n)
    return max(-1.0, middle - reach), min(1.0, middle + reach)


def change_error(gained: int, lost: int, n: int) -> float:
    """Return the standard error of such a change, which is positive even if nothing changed."""
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    return math.sqrt((up + down - (up - down) ** 2) / (n + 2))


@functools.cache
def student(n: int, *, tests: int = 1) -> float:
    """Return the 97.5 % quantile of Student's distribution for the mean of ``n >= 2`` values; see :func:`interval`."""
    low, high, level = 0.0, math.pi / 2, 1 - 0.05 / tests
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, n - 1) < level else (low, angle)
    return math.sqrt(n - 1) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """Return the probability of ``|t| < √degrees · tan(angle)`` (Abramowitz & Stegun 1964, 26.7.3 and 4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
