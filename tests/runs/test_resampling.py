"""Brute force: a resampled run has the numbers of a run that was measured on the drawn documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import wherewhat
from helpers.capture import tiny
from wherewhat.runs.resampling import ResampledRun
from wherewhat.text.documents import Document

COLUMNS = ("layer", "head", "value")


def documents(*letters):
    """Texts of random tokens by letter; the same letter is the same text under another name."""
    generator = {letter: torch.Generator().manual_seed(ord(letter)) for letter in "abc"}
    texts = {letter: torch.randint(32, (24,), generator=generator[letter]).tolist() for letter in "abc"}
    return [
        Document(f"{letters[:i].count(letter)} {letter}", "", ids=tuple(texts[letter]))
        for i, letter in enumerate(letters)
    ]


def measured(measurement, texts, out):
    return wherewhat.measure(measurement, tiny("llama"), texts=texts, out=out).stored


@pytest.mark.parametrize("measurement", ["heads", "axes"])
def test_numbers_are_those_of_a_run_on_the_drawn_documents(measurement, tmp_path):
    run = measured(
        measurement, [Document(x.name[2:], "", ids=x.ids) for x in documents("a", "b", "c")], tmp_path / "own"
    )
    drawn = measured(measurement, documents("a", "a", "c"), tmp_path / "drawn")
    resampled = ResampledRun(run, {"a": 2, "c": 1})
    assert sorted(resampled.documents) == sorted(drawn.documents)
    assert set(resampled.numbers) == set(drawn.numbers)
    for metric, numbers in drawn.numbers.items():
        found = resampled.numbers[metric]
        names = [[one.documents[i] for i in one.document] for one in (found, numbers)]
        assert names[0] == names[1], metric
        for column in COLUMNS:
            np.testing.assert_allclose(getattr(found, column), getattr(numbers, column), rtol=0, atol=1e-6)
    for summary in drawn.summaries:
        again = resampled.summary(summary.metric.name)
        assert again is not None
        if np.isfinite(summary.overall.mean):
            assert again.overall.n == summary.overall.n
            assert again.overall.mean == pytest.approx(summary.overall.mean, abs=1e-6)
    if measurement == "heads":
        assert resampled.labels("label_no_sink") == drawn.labels("label_no_sink")


def test_all_documents_once_change_nothing(tmp_path):
    run = measured("heads", documents("a", "b", "c"), tmp_path)
    same = ResampledRun(run, dict.fromkeys(run.documents, 1))
    assert list(same.document_means("s_pos").values()) == list(run.document_means("s_pos").values())
    assert same.labels("label") == run.labels("label")
    assert len(ResampledRun(run, {}).numbers["s_pos"].value) == 0
