"""Parity: Student's quantile is SciPy's. Brute force: intervals hold the truth as often as they say, drawn anew."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import t, ttest_ind

from wherewhat.measures.statistics import (
    Interval,
    change_bounds,
    in_brief,
    in_words,
    interval,
    share_bounds,
    student,
    welch,
    wilson,
)
from wherewhat.measures.tensors import over_documents


def test_student_is_that_of_scipy():
    for n in (2, 3, 4, 5, 8, 16, 17, 100, 1001):
        assert student(n) == pytest.approx(float(t.ppf(0.975, n - 1)), rel=1e-10), n


def test_intervals_over_documents_hold_the_mean_as_often_as_they_say():
    """The standard error of a share of 0.95 of 3,000 is 0.004."""
    for documents, between in product((2, 4, 8), (0.0, 1.0)):
        generator = torch.Generator().manual_seed(documents)
        shared = torch.randn(3000, documents, 1, generator=generator)
        values = between * shared + torch.randn(3000, documents, 16, generator=generator)
        low, high = over_documents(values).unbind(-1)
        share = float(((low <= 0) & (high >= 0)).double().mean())
        assert share == pytest.approx(0.95, abs=0.015), (documents, between)


MEASURED = {
    "normal": (0.0, 1.0, 0.0),
    "share, unique_c": (0.316, 0.012, -0.5),
    "share, heads_high_r": (0.463, 0.055, 0.6),
    "loss": (4.0, 0.40, 0.13),
    "rise, words at 5 %, untouched": (0.155, 0.054, 0.06),
}
COUNTS = {"positional heads": (13.6, 4.6, 0.1), "positional heads, all keys": (8.8, 2.6, 0.3)}
"""Mean, standard deviation and skewness over 64 documents of SmolLM2 (``studies/coverage.py``)."""


def drawn(mean: float, deviation: float, skewness: float, shape: tuple[int, ...]) -> np.ndarray:
    """Values of Pearson's type III, a shifted gamma distribution; normal without skewness."""
    generator = np.random.default_rng(shape[-1])
    if not skewness:
        return generator.normal(mean, deviation, shape)
    alpha = 4 / skewness**2
    return mean + deviation * np.sign(skewness) * (generator.gamma(alpha, size=shape) - alpha) / alpha**0.5


def contained(values: np.ndarray, mean: float) -> float:
    """How often Student's interval of each row contains the mean; the first rows are those of ``interval``."""
    n = values.shape[1]
    inside = np.abs(values.mean(1) - mean) <= student(n) * values.std(1, ddof=1) / n**0.5
    for row, covered in zip(values[:20].tolist(), inside, strict=False):
        about = interval(row)
        assert (about.low <= mean <= about.high) == covered
    return float(inside.mean())


def test_intervals_hold_the_mean_as_quantities_are_distributed_over_documents():
    """93 to 97 % of 20,000 draws, up to three standard errors of such a share; 95 % is no name for strong skewness."""
    draws = 20_000
    error = math.sqrt(0.93 * 0.07 / draws)
    for documents, (name, (mean, deviation, skewness)) in product((2, 3, 4, 8), MEASURED.items()):
        values = drawn(mean, deviation, skewness, (draws, documents))
        assert 0.93 - 3 * error <= contained(values, mean) <= 0.97 + 3 * error, (documents, name)
    for documents in (2, 3, 4, 8):
        assert contained(drawn(1.0, 1.0, 2.0, (draws, documents)), 1.0) < 0.93, documents


def test_intervals_of_counts_hold_the_mean_where_documents_differ():
    """Two documents often have the same number of heads: their interval has no width, and no sentence rests on it."""
    draws = 20_000
    error = math.sqrt(0.93 * 0.07 / draws)
    for documents, (mean, deviation, skewness) in product((2, 3, 4, 8), COUNTS.values()):
        values = drawn(mean, deviation, skewness, (draws, documents)).round()
        if documents > 2:
            assert 0.93 - 3 * error <= contained(values, mean) <= 0.97 + 3 * error, documents
        else:
            assert contained(values, mean) < 0.95
            assert contained(values[values.std(1) > 0], mean) > 0.93


def test_documents_count_once_and_a_single_one_by_its_queries():
    values = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row, bounds in zip(values, over_documents(values), strict=True):
        expected = interval(row.mean(-1).tolist())
        assert bounds.tolist() == pytest.approx([expected.low, expected.high])
    repeated = values[..., :1].expand(3, 5, 64)
    torch.testing.assert_close(over_documents(repeated), over_documents(values[..., :1]), rtol=1e-9, atol=1e-9)
    for row, bounds in zip(values[:, 0], over_documents(values[:, :1]), strict=True):
        expected = interval(row.tolist())
        assert bounds.tolist() == pytest.approx([expected.low, expected.high])


def test_what_is_unknown_is_left_out():
    values = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gaps = values.clone()
    gaps[0, 3], gaps[1, :3] = math.nan, math.nan
    found = over_documents(gaps)
    torch.testing.assert_close(found[0], over_documents(values[:1, :3])[0], rtol=1e-9, atol=1e-9)
    assert bool(found[1].isnan().all())  # one document is left
    assert bool(over_documents(values[:, :1, :1]).isnan().all())


def test_changes_are_those_of_bonett_and_price():
    """By their formula on paper; the change itself always lies inside."""
    assert change_bounds(12, 0, 12) == (pytest.approx(0.58733, abs=1e-5), 1.0)
    assert change_bounds(0, 12, 12) == (-1.0, pytest.approx(-0.58733, abs=1e-5))
    error = math.sqrt((10 / 102 + 19 / 102 - (9 / 102) ** 2) / 102)
    assert change_bounds(9, 18, 100) == pytest.approx((-9 / 102 - 1.959964 * error, -9 / 102 + 1.959964 * error))
    for n in (1, 2, 5, 30):
        for gained in range(n + 1):
            for lost in range(n + 1 - gained):
                low, high = change_bounds(gained, lost, n)
                assert -1 <= low <= (gained - lost) / n <= high <= 1
                assert low < high


def test_shares_of_all_or_none_have_a_width():
    assert wilson([0.0] * 12).low == 0
    assert 0.2 < wilson([0.0] * 12).high < 0.3
    assert share_bounds(0.5, 20) == pytest.approx((wilson([0.0, 1.0] * 10).low, wilson([0.0, 1.0] * 10).high))


def test_intervals_end_at_the_range_of_possible_values():
    about = interval([0.9, 0.98, 0.99])
    assert about.reach is not None
    assert about.high > 1
    clipped = about.within((0.0, 1.0))
    assert (clipped.mean, clipped.low, clipped.high, clipped.reach) == (about.mean, about.low, 1.0, None)
    assert about.within((-math.inf, math.inf)) == about
    assert interval([0.5]).within((0.0, 1.0)) == interval([0.5])
    # Rounding can put a mean slightly outside; the interval still contains it.
    assert interval([-1e-9, -1e-9]).within((0.0, 1.0)).low == -1e-9


def test_welch_is_that_of_scipy_with_whole_degrees_of_freedom():
    for sizes in ((3, 3), (3, 7), (20, 5)):
        generator = torch.Generator().manual_seed(3)
        draws = ((i + 1) * torch.randn(n, generator=generator, dtype=torch.float64) for i, n in enumerate(sizes))
        first, second = (x.tolist() for x in draws)
        found, expected = welch(first, second), ttest_ind(second, first, equal_var=False)
        error = (expected.confidence_interval().high - found.mean) / float(t.ppf(0.975, expected.df))
        assert found.mean == pytest.approx(math.fsum(second) / sizes[1] - math.fsum(first) / sizes[0]), sizes
        assert found.high - found.mean == pytest.approx(error * float(t.ppf(0.975, int(expected.df)))), sizes
        assert found.n == min(sizes)
    for few in ([1.0], [1.0, 2.0]):
        assert welch(few, [3.0, 4.0, 5.0]).low is None
    assert welch([1.0] * 3, [3.0] * 4) == Interval(2.0, 2.0, 2.0, 3)


def test_means_are_rounded_to_their_uncertainty():
    """One digit of the half width, or two below 36; of two documents always one; four digits of the mean at most."""
    for mean, half, n, words in (
        (0.8741, 0.0041, 4, "0.874 ± 0.004"),
        (0.2844, 0.0214, 4, "0.284 ± 0.021"),
        (0.51, 0.35, 4, "0.51 ± 0.35"),
        (0.51, 0.35, 2, "0.5 ± 0.3"),
        (0.852269, 0.000036, 2, "0.8523 ± <0.0001"),
        (0.0004, 0.0001, 5, "0.00040 ± 0.00010"),
        (1234.5, 3.2, 4, "1234 ± 3"),
        (-0.0001, 0.2, 3, "0.00 ± 0.20"),
        (0.5, 0.0, 3, "0.500 ± 0"),
    ):
        assert in_words(Interval(mean, mean - half, mean + half, n)) == words
    assert in_words(Interval(0.284, 0.264, 0.304, 4), percent=True) == "28.4 ± 2.0 %"
    assert in_words(interval([0.9, 0.98, 0.99]).within((0.0, 1.0))) == "0.96 (0.83 to 1.00)"
    assert in_words(interval([0.0, 0.1, 0.2]).within((0.0, 1.0)), percent=True) == "10 % (0 to 35 %)"
    assert in_words(interval([0.51234])) == "0.512"


def test_means_alone_have_two_digits_or_fewer():
    for mean, half, words in (
        (0.8741, 0.0041, "0.87"),
        (0.0123, 0.0001, "0.012"),
        (0.51, 0.35, "0.51"),
        (14.1, 12.0, "14"),
        (4.4, 12.0, "4"),
        (0.044, 3.5, "0.0"),
        (3.14, 0.0, "3.1"),
        (1234.5, 3.2, "1200"),
        (-0.0001, 0.2, "0.00"),
        (0.99998, 0.001, "1.00"),
    ):
        assert in_brief(Interval(mean, mean - half, mean + half, 4)) == words
    assert in_brief(Interval(0.623, 0.473, 0.773, 4), percent=True) == "62 %"
    assert in_brief(interval([0.51234]), percent=True) == "51 %"


def test_several_quantities_hold_together():
    """Of eight intervals of level 1 - 0.05 / 8, all hold the mean in at least 95 % of draws."""
    draws = torch.randn(2000, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = draws.std(-1) / 2
    together = (draws.mean(-1).abs() <= student(4, tests=8) * error).all(-1)
    assert 0.94 < float(together.double().mean()) < 0.98  # the standard error is 0.005
