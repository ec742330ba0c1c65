"""Brute force: checked scores are the same numbers. Identity: whatever is not declared is refused in one line."""

import math

import numpy as np
import pytest
import torch

from wherewhat.errors import MeasureError
from wherewhat.scores import (
    CORRELATION,
    MODEL,
    SHARE,
    Column,
    Metric,
    Scores,
    checked_each,
    copied_at_once,
    stored_metric,
)

DECLARED = (
    Metric("r", "r", "", range=SHARE, control="noise"),
    stored_metric("noise", range=SHARE),
    stored_metric("rise_*", unit="nats"),
    stored_metric("label", categories=("where", "what")),
    stored_metric("c", range=CORRELATION),
)


def layer(**heads):
    return Scores(layer=3, heads={name: torch.tensor(values) for name, values in heads.items()}, whole={"noise": 0.1})


def test_checked_scores_are_the_same_numbers_on_the_cpu_in_float64():
    curve = Column(torch.ones(2, 4), ("head", "distance"))
    first = Scores(layer=5, heads={"r": torch.tensor([0.1, 0.2])}, whole={"noise": 0.5}, curves={"a": curve})
    second = Scores(layer=1, heads={"r": torch.tensor([0.3], dtype=torch.bfloat16), "label": torch.tensor([-1])})
    found = Scores(layers=[first, second], whole={"rise_x": 2.5, "c": math.nan}).checked(DECLARED, of="m")
    assert [one.layer for one in found] == [1, 5, MODEL]
    assert [one.layer for one in found.layers] == [1, 5]
    for one, given in zip(found.layers, (second, first), strict=True):
        assert one.curves == given.curves
        assert one.whole == given.whole
        for name, values in given.heads.items():
            assert one.heads[name].dtype == torch.float64
            assert torch.equal(one.heads[name], values.double())
    assert found.whole["rise_x"] == 2.5
    assert found.metrics["rise_x"].unit == "nats"
    assert found.names == ["r", "label", "noise", "rise_x", "c"]
    assert Scores().checked((), of="m").names == []


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (layer(r2=[0.5]), r"m returned 'r2', which is not one of its metrics: .*r"),
        (Scores(layer=0, heads={"r": torch.ones(2)}), "m returned 'r' without its control 'noise': return it, or NaN"),
        (layer(r=[0.5, 1.01]), r"m returned r = 1.01 for layer 3: it is 0 to 1"),
        (layer(r=[-0.01]), r"m returned r = -0.01 for layer 3: it is 0 to 1"),
        (layer(c=[math.inf]), "m returned c = inf for layer 3: give a finite number, or NaN where it is undefined"),
        (
            Scores(whole={"rise_x": -math.inf}),
            "m returned rise_x = -inf for the model as a whole: give a",
        ),
        (layer(label=[2.0]), "m returned label = 2 for layer 3: it is 0 to 1"),
        (layer(label=[0.5]), "m returned label = 0.5 for layer 3: it is 0 to 1"),
        (layer(r=[0.5, 0.5], c=[0.5]), r"values per head of different shapes in layer 3: .*'r': \(2,\), 'c': \(1,\)"),
        (layer(r=[[0.5, 0.5]]), r"values per head of different shapes in layer 3"),
        (layer(r=[0.5j]), "m returned r as Tensor: return real numbers"),
        (Scores(layer=0, heads={"c": ["a"]}), "m returned c as list: return real numbers"),
        (Scores(whole={"c": None}), "m returned c as NoneType: return one real number"),
        (Scores(whole={"c": torch.zeros(2)}), "m returned c as Tensor: return one real number"),
        (Scores(whole={3: 1.0}), "m returned '3', which is not one of its metrics"),
        (Scores(heads={"c": torch.ones(2)}), "m returned values per head for the model as a whole: return Scores"),
        (
            Scores(layers=[Scores(heads={"c": torch.ones(2)})]),
            "m returned scores for layer -1: give each layer its ind",
        ),
        (Scores(layers=[layer(c=[0.5]), layer(c=[0.6])]), "m returned scores for layer 3 twice: give each layer its"),
        (Scores(layers=[Scores(layer=0, layers=[layer(c=[0.5])])]), "m returned layers of a layer"),
        (Scores(whole={"c": 0.0}, curves={"a": torch.ones(2)}), "m returned the curve 'a' without names of its dimen"),
    ],
)
def test_what_is_not_declared_is_refused_in_one_line(scores, words):
    with pytest.raises(MeasureError, match=words) as caught:
        Scores(layers=[scores]).checked(DECLARED, of="m") if scores.layer != MODEL else scores.checked(DECLARED, of="m")
    assert "\n" not in str(caught.value)


def test_scores_that_are_checked_at_once_are_those_checked_one_by_one():
    several = [
        Scores(
            layers=[layer(r=[0.1, 0.2]), Scores(layer=1, heads={"label": torch.tensor([-1])})], whole={"noise": 0.3}
        ),
        layer(c=[0.5]),
        Scores(whole={"rise_x": 2.5}),
    ]
    for given, found in zip(several, checked_each(several, DECLARED, of="m"), strict=True):
        alone = given.checked(DECLARED, of="m")
        assert found.metrics == alone.metrics
        for one, other in zip(found, alone, strict=True):
            assert (one.layer, one.whole, [*one.heads]) == (other.layer, other.whole, [*other.heads])
            assert all(torch.equal(one.heads[name], other.heads[name]) for name in one.heads)


def test_the_first_scores_that_are_refused_raise_after_those_before_them():
    each = checked_each([layer(c=[0.5]), layer(c=[2.0]), layer(r2=[0.5])], DECLARED, of="m")
    assert next(each).heads["c"].tolist() == [0.5]
    with pytest.raises(MeasureError, match="m returned c = 2 for layer 3"):
        next(each)


def test_rounding_may_exceed_a_range_and_nothing_else_may():
    assert layer(r=[1 + 1e-5, -1e-5]).checked(DECLARED, of="m").heads["r"].tolist() == pytest.approx([1, 0], abs=1e-4)
    assert layer(r=[math.nan]).checked(DECLARED, of="m").heads["r"].isnan().all()


def test_numbers_of_other_types_are_accepted():
    given = {"c": np.array([1, 0]), "label": [0, -1], "r": torch.ones(2, dtype=torch.float16, requires_grad=True)}
    whole = {"noise": torch.tensor([0.5], requires_grad=True), "rise_x": np.float32(2), "c": True}
    found = Scores(layer=np.int64(2), heads=given, whole=whole).checked(DECLARED, of="m")
    assert {name: values.tolist() for name, values in found.heads.items()} == {
        "c": [1, 0],
        "label": [0, -1],
        "r": [1, 1],
    }
    assert found.whole == {"noise": 0.5, "rise_x": 2.0, "c": 1.0}
    assert {type(value) for value in found.whole.values()} == {float}


@pytest.mark.parametrize("name", ["", "layer", "head", "weights"])
def test_a_metric_has_not_the_name_of_another_column(name):
    with pytest.raises(MeasureError, match="as another column of tables: choose another name"):
        stored_metric(name)


def test_a_column_is_a_tensor():
    with pytest.raises(MeasureError, match="a column has values of type list: give a tensor"):
        Column([1.0], ("distance",))


def test_tensors_copied_at_once_keep_values_shapes_and_shared_memory():
    shared, large = torch.arange(24.0).view(2, 3, 4), torch.arange(1000.0)
    tensors = [*shared.unbind(), shared[1].mT, large[7:9], large[::400], torch.tensor(5.0), torch.zeros(0, 3)]
    copies = copied_at_once(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.shape == tensor.shape
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr() or not copy.numel()
    assert copies[1].data_ptr() == copies[2].data_ptr()  # copied once
    assert copies[0].untyped_storage().nbytes() < large.nbytes  # little of a large tensor
