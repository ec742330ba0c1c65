"""Identity: what is packed or written as JSON comes back, whatever it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from helpers.report import unpacked
from wherewhat.measures.statistics import interval
from wherewhat.report.data import band, centred_curves, drawn_distances, packed, rounded, script_json


def test_packed_numbers_come_back():
    values = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    values[7] = torch.nan
    for bits in (8, 16):
        found = unpacked(packed(values, bits=bits))
        step = float(values.nan_to_num().max() - values.nan_to_num().min()) / (2**bits - 2)
        assert np.isnan(found).nonzero()[0].tolist() == [7]
        # Half a step, and the two ends, which are stored with seven digits.
        assert np.nanmax(abs(found - values.numpy())) <= 0.5 * step + 1e-4


def test_packed_constants_and_nothing():
    assert unpacked(packed(torch.full((3,), 2.5), bits=8)).tolist() == [2.5] * 3
    assert np.isnan(unpacked(packed(torch.full((3,), torch.nan), bits=16))).all()


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
