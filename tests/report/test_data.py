"""Identity: what is packed or written as JSON comes back, whatever it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from helpers.report import unpacked
from wherewhat.report.data import packed, rounded, script_json


@pytest.mark.parametrize("bits", [8, 16])
def test_packed_numbers_come_back(bits):
    values = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    values[7] = torch.nan
    found = unpacked(packed(values, bits=bits))
    step = float(values.nan_to_num().max() - values.nan_to_num().min()) / (2**bits - 2)
    assert np.isnan(found[7])
    assert np.isnan(found).sum() == 1
    assert np.nanmax(abs(found - values.numpy())) <= 0.5 * step + 1e-4


def test_packed_constants_and_nothing():
    assert unpacked(packed(torch.full((3,), 2.5), bits=8)).tolist() == [2.5] * 3
    assert np.isnan(unpacked(packed(torch.full((3,), torch.nan), bits=16))).all()


@pytest.mark.parametrize(
    "text",
    ["</script><script>", "<!--", "]]>", "\u2028\u2029", "\ud800", "שלום 🐈 \u200b\u202e", "\\u003c", '"\\', "&lt;"],
)
def test_json_cannot_leave_its_script(text):
    written = script_json({text: [text]})
    assert json.loads(written) == {text: [text]}
    assert written.isascii()
    assert not set("<>&") & set(written)


def test_rounded():
    assert rounded(0.123456) == 0.1235
    assert rounded(float("nan")) is None
    assert rounded(None) is None
