"""Identity: what is packed or written as JSON comes back, whatever it is."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.report import unpacked
from wherewhat.measures.statistics import in_words, interval
from wherewhat.report.data import band, centred_curves, drawn_distances, packed_rows, rounded, script_json
from wherewhat.rules.captions import additive_price
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import Request
from wherewhat.runs.results import HeadCount, MetricSummary
from wherewhat.scores import Metric


def test_packed_numbers_come_back():
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    values[0, 7], values[1, 9] = torch.nan, torch.inf
    for bits in (8, 16):
        for row, pack in zip(values.numpy(), packed_rows(values, bits=bits), strict=True):
            found, defined = unpacked(pack), np.isfinite(row)
            step = np.ptp(row[defined]) / (2**bits - 2)
            assert np.array_equal(np.isfinite(found), defined)
            # Half a step, and the two ends, which are stored with seven digits.
            assert abs(found - row)[defined].max() <= 0.5 * step + 1e-4


def test_packed_constants_and_nothing():
    constant, nothing = packed_rows(torch.tensor([[2.5] * 3, [torch.nan] * 3]), bits=8)
    assert unpacked(constant).tolist() == [2.5] * 3
    assert np.isnan(unpacked(nothing)).all()


def test_json_cannot_leave_its_script():
    hostile = [
        "</script><script>",
        "<!--",
        "]]>",
        "\u2028\u2029",
        "\ud800",
        "שלום 🐈 \u200b\u202e",
        "\\u003c",
        '"\\',
        "&lt;",
    ]
    for text in hostile:
        written = script_json({text: [text]})
        assert json.loads(written) == {text: [text]}
        assert written.isascii()
        assert not set("<>&") & set(written)


def test_drawn_distances_are_all_near_ones_and_few_far_ones():
    assert drawn_distances(100) == list(range(100))
    assert drawn_distances(256) == list(range(256))
    for width in (257, 512, 100_000):
        found = drawn_distances(width)
        assert found[:128] == list(range(128))
        assert (len(found), found[-1]) == (256, width - 1)
        assert found == sorted(set(found))


def test_curves_of_documents_are_aligned():
    """Curves that differ by a constant and by their length are the same curve."""
    curve = torch.randn(3, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, means = centred_curves([curve, curve[:, :30] + 5.0], range(40))
    exact = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(found[0, :, :30], found[1, :, :30], **exact)
    torch.testing.assert_close(means[1] - means[0], torch.full((3, 1), 5.0, dtype=torch.float64), **exact)
    torch.testing.assert_close(found[0] + means[0], curve, **exact)
    assert found[1, :, 30:].isnan().all()


def test_band_is_the_interval_of_every_point():
    for documents in (1, 2, 5):
        values = torch.randn(documents, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        values[-1, 3] = torch.nan
        mean, half = band(values)
        for at in range(4):
            found = [x for x in values[:, at].tolist() if x == x]
            if not found:
                assert mean[at].isnan()
                continue
            expected = interval(found)
            assert float(mean[at]) == pytest.approx(expected.mean, rel=1e-9)
            if expected.high is None:
                assert half[at].isnan()
            else:
                assert float(half[at]) == pytest.approx(expected.high - expected.mean, rel=1e-9)


def test_rounded():
    assert rounded(0.123456) == 0.1235
    assert rounded(float("nan")) is None
    assert rounded(None) is None


LABELLED = MetricSummary(
    Metric("heads_sink", "sinks", "", counts=("label_no_sink", "sink")),
    interval([0.05, 0.05, 0.06]),
    {},
    None,
    {"full": interval([0.1, 0.1])},
    {"": HeadCount(14, 270, (12, 17, 13)), "full": HeadCount(9, 90, (9, 9, 9))},
)


def test_heads_with_a_label_are_counted():
    """The count is of labels over all documents together, then come those of single documents."""
    assert LABELLED.words() == "14 of 270; 12 to 17 in single documents"
    assert LABELLED.words("full") == "9 of 90; 9 in single documents"
    assert replace(LABELLED, counts={"": HeadCount(14, 270, (14,))}).words() == "14 of 270"
    assert replace(LABELLED, counts={}).words() == in_words(LABELLED.overall)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            ([3.9], [6.07], [4.83]),
            "rises from 3.90 to 6.07 nats; with NOISE it is 4.83 (one document of 256 tokens, no interval).",
        ),
        (
            ([3.9], [3.5], []),
            "falls from 3.90 to 3.50 nats; a control was not measured (one document of 256 tokens, no interval).",
        ),
        (
            ([5.301], [5.302], [5.3]),
            "stays at 5.30 nats; with NOISE it is 5.30 (one document of 256 tokens, no interval).",
        ),
        (
            ([3.0, 4.0, 3.5], [5.0, 6.1, 5.4], [4.0, 4.0, 4.0]),
            "rises by 2.00 ± 0.25 nats, from 3.50 to 5.50; "
            "with NOISE it changes by 0.5 ± 1.2 nats, from 3.50 to 4.00 (3 documents of 256 tokens).",
        ),
        (
            ([3.0, 4.0], [2.9, 3.89], []),
            "falls by 0.10 ± 0.06 nats, from 3.50 to 3.40; a control was not measured (2 documents of 256 tokens).",
        ),
        (([], [], []), None),
        (([3.9], [], []), None),
    ],
)
def test_price_of_additive_logits(values, expected):
    named = dict(zip(("loss", "loss_strength_0", "loss_noise"), values, strict=True))
    run = SimpleNamespace(
        measurement=SimpleNamespace(name="residual"),
        values=named.get,
        directory=SimpleNamespace(config={"tokens": 256}),
    )
    noise = "noise of the same size added to the logits instead,"
    text = "" if expected is None else f"With exactly additive logits the loss {expected.replace('NOISE', noise)}"
    request = Request("residual")
    assert additive_price(Runs([(request, run)])) == text
