"""Brute force: exact discrepancies and predicted lengths against all inputs and real passes; identity: bounds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from helpers.tolerance import rounding
from wherewhat.errors import ConfigError, MeasureError
from wherewhat_lab.config import LabConfig
from wherewhat_lab.constructions.discrepancy import (
    head_failure_lengths,
    index_bound,
    index_discrepancy,
    measured_discrepancy,
    retrieval_bound,
    retrieval_discrepancy,
)
from wherewhat_lab.constructions.transformers import index_transformer, letter_angle, retrieval_transformer
from wherewhat_lab.model import LabModel
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, RetrievalTask

FAST = 10_000 ** (-1 / 64)
SLOW = 10_000 ** (-41 / 64)
EIGHT = math.pi / 4
SLACK = 1e-12
"""Angles of up to 1000 positions in float64: 1000 ε is 2e-13."""


def test_index_by_all_inputs():
    for n, theta in itertools.product((2, 3, 4, 5, 9, 24), (FAST, SLOW, 2.1, 3.0)):
        gaps = []
        for m in range(1, n):
            logits = sorted(math.cos((d - m) * theta) for d in range(n))
            gaps.append(logits[-1] - logits[-2])
        assert index_discrepancy(n, theta) == pytest.approx(max(gaps), abs=1e-12), (n, theta)
        assert index_discrepancy(n, theta, at="worst") == pytest.approx(min(gaps), abs=1e-12), (n, theta)


def test_retrieval_by_all_inputs():
    sizes = ((2, 8), (3, 5), (4, 4), (5, 3), (5, 4), (6, 3))
    for (n, letters), theta in itertools.product(sizes, (0.0, SLOW, 0.05, 0.3)):
        omega = 2 * math.pi / letters
        gaps = []
        for offsets in itertools.product(range(letters), repeat=n):
            if offsets.count(0) != 1 or offsets[0] == 0:
                continue  # not one pair with the letter asked for, or the query's own
            logits = [math.cos(d * theta + a * omega) for d, a in enumerate(offsets)]
            right = logits.pop(offsets.index(0))
            gaps.append(right - max(logits))
        found = [retrieval_discrepancy(n, theta, omega, at=at) for at in ("best", "worst")]
        assert found == pytest.approx([max(gaps), min(gaps)], abs=1e-12), (n, letters, theta)


def test_models_have_the_exact_discrepancy():
    task = IndexTask(target=15, symbols=3)
    sequences = task.sample(200, seed=0)
    attention = index_transformer(task, theta=FAST, temperature=1.0).attention(sequences.tokens)[0]
    values, margins = measured_discrepancy(attention), measured_discrepancy(attention, right=sequences.path[:, 1])
    # Angles are float32 products with positions up to 16.
    angles = rounding(8 * 16)
    assert float(values.max()) == pytest.approx(index_discrepancy(16, FAST), abs=angles)
    assert float(values.min()) == pytest.approx(index_discrepancy(16, FAST, at="worst"), abs=angles)
    torch.testing.assert_close(margins, values, atol=1e-12, rtol=0)
    assert bool((margins > 0).all())

    task = RetrievalTask(target=4, letters=3, digits=1)
    sequences = task.sample(1500, seed=0)
    attention = retrieval_transformer(task, theta=0.05, temperature=0.5).attention(sequences.tokens)[0]
    values = measured_discrepancy(attention)
    for value, at in ((values.max(), "best"), (values.min(), "worst")):
        expected = retrieval_discrepancy(5, 0.05, letter_angle(task), at=at)
        assert float(value) == pytest.approx(2 * expected, abs=angles)


def test_bound_of_index_holds_at_the_worst_input_only():
    for theta in (FAST, SLOW, 2 * math.pi / 3, math.pi * (math.sqrt(5) - 1), 1.0):
        for n in (*range(2, 100), *range(100, 600, 7)):
            for at in ("best", "worst"):
                assert index_discrepancy(n, theta, at=at) <= index_bound(n, theta, at=at) + SLACK
            expected = min(1 - math.cos(theta), 2 * math.pi**2 / n**2)
            assert index_bound(n, theta) == pytest.approx(expected, rel=1e-9)
    # As the theorem is stated, for the largest difference over inputs, it fails at some lengths.
    broken = [n for n in range(2, 101) if index_discrepancy(n, FAST) > index_bound(n, FAST) + SLACK]
    assert broken == [*range(8, 14), *range(29, 58)]
    assert index_discrepancy(4, 2 * math.pi / 3) == pytest.approx(1.5)
    assert index_bound(4, 2 * math.pi / 3) < 1.24


def test_bound_of_retrieval():
    for theta in (0.0, 1e-4, SLOW, 0.01):
        for n in (*range(2, 60), *range(60, 1000, 13)):
            if n * theta <= EIGHT:
                worst = retrieval_discrepancy(n + 1, theta, EIGHT, at="worst")
                assert worst <= retrieval_bound(n, theta, EIGHT) + SLACK, (theta, n)
    assert retrieval_discrepancy(17, SLOW, EIGHT, at="worst") > retrieval_bound(17, SLOW, EIGHT)  # n is off by one
    assert retrieval_discrepancy(17, SLOW, EIGHT) > 1.99  # and at the best input it says nothing
    assert retrieval_discrepancy(10_000, 0.0, EIGHT, at="worst") == pytest.approx(1 - math.cos(EIGHT))


def test_retrieval_is_wrong_from_half_the_length_at_which_its_bound_vanishes():
    margins = [retrieval_discrepancy(n, SLOW, EIGHT, at="worst") for n in range(2, 200)]
    first = next(n for n, margin in enumerate(margins, 2) if margin <= 0)
    assert first == 145
    assert EIGHT / (2 * SLOW) < first < EIGHT / (2 * SLOW) + 2


def test_measured_by_sorting():
    model = LabModel(LabConfig(vocabulary=40, layers=2, heads=2, width=16)).double()
    tokens = torch.randint(40, (6, 9), generator=torch.Generator().manual_seed(0))
    for attention in model.attention(tokens):
        right = torch.tensor([0, 1, 2, 3, 4, 8])
        found, margins = measured_discrepancy(attention), measured_discrepancy(attention, right=right)
        logits = attention.attn_scores()[:, :, -1].double()
        for head, row in itertools.product(range(2), range(6)):
            values = logits[row, head].tolist()
            ordered = sorted(values, reverse=True)
            assert float(found[head, row]) == pytest.approx(ordered[0] - ordered[1], abs=1e-12)
            at_right = values.pop(int(right[row]))
            assert float(margins[head, row]) == pytest.approx(at_right - max(values), abs=1e-12)
        with pytest.raises(MeasureError, match="must be one position from 0 to 8"):
            measured_discrepancy(attention, right=right + 1)
    with pytest.raises(MeasureError, match="fewer than two keys"):
        measured_discrepancy(model.attention(tokens[:, :1])[0])


def test_predicted_lengths_of_heads_are_where_index_fails():
    task = NumberTask(symbols=5, hops=1)
    sequences = task.sample(40, seed=4)
    for temperature in (2e-4, 1e-3, 0.05):
        model = index_transformer(task, theta=FAST, temperature=temperature)
        found = head_failure_lengths(model.attention(sequences.tokens)[0], sequences.path[:, 1], longest=500)
        for n in (17, 30, 60, 200, 500):
            longer = task.sample(40, seed=4, extra=n - 17)
            pattern = model.attention(longer.tokens)[0].pattern(slice(-1, None))[:, 0, 0]
            mass = pattern.gather(1, longer.path[:, 1:2])[:, 0]
            assert float((mass - 0.5).abs().min()) > 0.01  # none is a matter of rounding
            assert torch.equal(mass > 0.5, found[0] > n)


def test_predicted_lengths_of_retrieval_come_near():
    task = LetterTask(hops=1)
    sequences = task.sample(200, seed=4, extra=40)
    model = retrieval_transformer(task, theta=SLOW, temperature=0.05)
    like = slice(0, 40)
    found = head_failure_lengths(model.attention(sequences.tokens)[0], sequences.path[:, 1], like=like, longest=400)
    for n in (60, 150, 300):
        longer = task.sample(200, seed=4, extra=n - 17)
        pattern = model.attention(longer.tokens)[0].pattern(slice(-1, None))[:, 0, 0]
        kept = (pattern.gather(1, longer.path[:, 1:2])[:, 0] > 0.5).double().mean()
        assert float((found[0] > n).double().mean()) == pytest.approx(float(kept), abs=0.1)


def test_predicted_length_without_positions_is_a_matter_of_numbers():
    # A head that does not rotate, its right key ahead of all others by log 10: ten others take half of the mass.
    model = index_transformer(IndexTask(target=4, symbols=2), theta=FAST, temperature=1.0)
    attention = model.attention(torch.tensor([[0, 0, 0, 0, 2]]))[0]
    k = torch.zeros_like(attention.rot_k)
    k[:, :, 3, 0] = (math.log(10) + 1e-6) / attention.rot_q[:, :, -1, 0]
    still = replace(attention, rot_k=k, rotation=None)
    assert head_failure_lengths(still, torch.tensor([3])).tolist() == [[12]]
    k[:, :, 3, 0] *= 9
    assert head_failure_lengths(still, torch.tensor([3])).tolist() == [[math.inf]]


def test_wrong_numbers(subtests):
    for make, message in (
        (lambda: index_discrepancy(1, 1.0), "n is 1"),
        (lambda: index_discrepancy(5, 0.0), "theta is 0.0: give a positive angle"),
        (lambda: index_bound(5, math.nan), "theta is nan"),
        (lambda: retrieval_discrepancy(5, 0.1, 1.0), "omega is 1.0"),
        (lambda: retrieval_discrepancy(5, 0.1, 0.0), "omega is 0.0"),
    ):
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            make()


def test_lengths_are_not_predicted_for_other_attention():
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    attention = LabModel(LabConfig(layers=1, encoding="alibi")).attention(tokens)[0]
    with pytest.raises(MeasureError, match="not plain causal attention"):
        head_failure_lengths(attention, torch.tensor([2]))
    attention = LabModel(LabConfig(layers=1, encoding="nope")).attention(tokens)[0]
    assert head_failure_lengths(attention, torch.tensor([2]), longest=9).shape == (1, 1)
