"""Identity: records are joined in the order of steps, cut, and read back as they were written."""

from __future__ import annotations

import torch

from wherewhat.runs.records import Records
from wherewhat.runs.schema import Profile

AXES = {"a": ("head",), "b": ()}


def test_a_score_that_a_record_does_not_have_is_nan():
    first = Records().joined(0, {"a": torch.ones(2)}, AXES)
    second = first.joined(5, {"b": torch.tensor(3.0)}, AXES)
    third = second.joined(9, {"a": torch.zeros(2), "b": torch.tensor(4.0)}, AXES)
    assert third["a"].nan_to_num(-1).tolist() == [[1, 1], [-1, -1], [0, 0]]
    assert third["b"].nan_to_num(-1).tolist() == [-1, 3, 4]
    assert third.axes == AXES


def test_records_until_a_step(tmp_path):
    constants = {"layer": Profile(torch.tensor([0, 1]), ("head",))}
    records = Records(constants=constants)
    for step in (10, 0, 5):
        records = records.joined(step, {"a": torch.full((2,), float(step)), "b": torch.tensor(0.5)}, AXES)
    kept = records.until(5)
    assert kept.steps.tolist() == [0, 5]
    assert kept["a"].tolist() == [[0, 0], [5, 5]]
    assert len(records.until(-1)) == 0
    for wanted in (records, kept, records.until(-1)):
        wanted.write(tmp_path / "records.safetensors")
        found = Records.read(tmp_path / "records.safetensors")
        assert found.steps.tolist() == wanted.steps.tolist()
        assert found.axes == wanted.axes
        assert found["layer"].tolist() == [0, 1]
