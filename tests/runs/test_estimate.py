"""Identity: what is said before long work."""

from __future__ import annotations

import pytest
import torch

from helpers.models import llama_config
from wherewhat.measures.measurement import DocumentScores, Text, TextMeasurement
from wherewhat.progress import duration
from wherewhat.runs.execution import estimate, memory


@pytest.mark.parametrize(("seconds", "words"), [(3.2, "3 s"), (89, "89 s"), (240, "4 min"), (9000, "2.5 h")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


class Slow(TextMeasurement):
    """Moves a clock forward instead of computing, so that other work on the machine does not count."""

    def __init__(self, monkeypatch, per_token):
        self._per_token, self._now = per_token, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self._now)

    def measure(self, subject, text, config):
        self._now += self._per_token * text.ids.shape[1]
        return DocumentScores([])


def texts(length, count):
    return [Text(torch.arange(length)[None])] * count


def test_time_is_extrapolated_from_short_pieces(monkeypatch):
    line = estimate(None, Slow(monkeypatch, 1e-4), None, texts(4096, 20))
    assert line == "20 documents of 4096 tokens: about 8 s"


def test_quick_work_is_not_announced(monkeypatch):
    assert estimate(None, Slow(monkeypatch, 0), None, texts(1000, 1)) == ""
    assert estimate(None, Slow(monkeypatch, 1), None, texts(200, 50)) == ""


def test_memory_counts_the_weights_and_grows_with_the_text():
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config())
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert memory(model, 0) == weights
    assert memory(model, 1000) > memory(model, 10) > weights
