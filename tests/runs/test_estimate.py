"""Identity: what is said before long work."""

from __future__ import annotations

import time

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
    def __init__(self, per_token):
        self._per_token = per_token

    def measure(self, subject, text, config):
        time.sleep(self._per_token * text.ids.shape[1])
        return DocumentScores([])


def texts(length, count):
    return [Text(torch.arange(length)[None])] * count


def test_time_is_extrapolated_from_short_pieces():
    line = estimate(None, Slow(1e-4), None, texts(4096, 20))
    assert line.startswith("20 documents of 4096 tokens: about ")
    assert float(line.split()[-2]) == pytest.approx(8.2, rel=0.3)


def test_quick_work_is_not_announced():
    assert estimate(None, Slow(0), None, texts(1000, 1)) == ""
    assert estimate(None, Slow(1), None, texts(200, 50)) == ""


def test_memory_counts_the_weights_and_grows_with_the_text():
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config())
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert memory(model, 0) == weights
    assert memory(model, 1000) > memory(model, 10) > weights
