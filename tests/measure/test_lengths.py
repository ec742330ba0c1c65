"""Identity and end-to-end: losses beyond the trained length, and the shift of attention outputs."""

from __future__ import annotations

import pytest
import torch

from capturing.tiny import tokens
from measure.test_heads import TinySubject
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measure.lengths import EXTEND
from wherewhat.measure.lengths.measurement import ExtendConfig
from wherewhat.measure.lengths.outputs import Reference, rank_correlation, shift


class Trained(TinySubject):
    """A tiny model that says it was trained on 16 tokens."""

    def trained_length(self):
        return 16


@pytest.fixture(scope="module")
def subject():
    return Trained("llama")


def test_none_is_the_untouched_model(subject):
    ids = tokens(40)
    found = EXTEND.measure(subject, ids, ExtendConfig(methods=("none",)))
    with torch.no_grad():
        logits = subject.model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert found.whole["loss_beyond_none"] == pytest.approx(float(losses[16:].mean()), abs=1e-5)
    assert found.whole["loss_inside_none"] == pytest.approx(float(losses[8:16].mean()), abs=1e-5)
    curve = found.curves["loss_by_position_none"].values
    assert float(curve[0, 1]) == pytest.approx(float(losses[:4].mean()), abs=1e-5)


def test_every_method_is_measured(subject):
    config = ExtendConfig()
    found = EXTEND.measure(subject, tokens(48), config)
    for metric in EXTEND.words(config):
        assert metric.name in found.whole
    assert -1 <= found.whole["rank_shift_loss"] <= 1


def test_windows_change_nothing_inside(subject):
    found = EXTEND.measure(subject, tokens(40), ExtendConfig(methods=("none", "sliding-window", "lm-infinite")))
    for name in ("sliding-window", "lm-infinite"):
        assert found.whole[f"loss_inside_{name}"] == pytest.approx(found.whole["loss_inside_none"], abs=1e-5)
        assert found.whole[f"loss_beyond_{name}"] != found.whole["loss_beyond_none"]


def test_shift_of_the_same_outputs_is_nothing():
    x = torch.randn(500, 3, 8, generator=torch.Generator().manual_seed(0))
    same = shift(Reference.of(x), x)
    torch.testing.assert_close(same.mean, torch.zeros(3).double())
    torch.testing.assert_close(same.covariance, torch.zeros(3).double())
    torch.testing.assert_close(same.outliers, torch.full((3,), 0.01).double(), atol=1e-3, rtol=0)


def test_shift_in_units_of_the_spread():
    x = torch.randn(4000, 1, 8, generator=torch.Generator().manual_seed(0))
    moved = shift(Reference.of(x), x + 2.0)
    assert float(moved.mean) == pytest.approx(2.0, rel=0.03)  # √(8 · 4) over √8
    wider = shift(Reference.of(x), 2 * x)
    assert float(wider.covariance) == pytest.approx(3.0, rel=0.01)
    assert float(wider.outliers) > 0.3


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -x) == pytest.approx(-1)


def test_bad_input(subject):
    with pytest.raises(MeasureError, match="not beyond the 16"):
        EXTEND.measure(subject, tokens(16), ExtendConfig())
    for options in ({"methods": ("yarm",)}, {"methods": ()}, {"trained": 1}, {"window": 0}):
        with pytest.raises(ConfigError):
            ExtendConfig(**options)


def test_a_model_without_rotation_is_refused_or_left_alone():
    subject = Trained("gpt2")
    found = EXTEND.measure(subject, tokens(40), ExtendConfig(methods=("none", "sliding-window")))
    assert found.whole["loss_beyond_sliding-window"] != found.whole["loss_beyond_none"]
    with pytest.raises(MeasureError, match="no layer of this model rotates"):
        EXTEND.measure(subject, tokens(40), ExtendConfig(methods=("none", "yarn")))
