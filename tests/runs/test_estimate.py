"""Identity: what is said before long work."""

from __future__ import annotations

import time

import pytest
import torch

from helpers.models import llama_config
from wherewhat.measures.measurement import DocumentScores, Measurement
from wherewhat.runs.execution import duration, estimate, memory


@pytest.mark.parametrize(("seconds", "words"), [(3.2, "3 s"), (89, "89 s"), (240, "4 min"), (9000, "2.5 h")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def slow(per_token):
    def measure(subject, ids, config):
        time.sleep(per_token * ids.shape[1])
        return DocumentScores([])

    return Measurement("slow", "Slow.", dict, measure, (), "Nothing.")


def test_time_is_extrapolated_from_short_pieces():
    line = estimate(None, slow(1e-4), None, [torch.arange(4096)] * 20)
    assert line.startswith("20 documents of 4096 tokens: about ")
    assert float(line.split()[-2]) == pytest.approx(8.2, rel=0.3)


def test_quick_work_is_not_announced():
    assert estimate(None, slow(0), None, [torch.arange(1000)]) == ""
    assert estimate(None, slow(1), None, [torch.arange(200)] * 50) == ""


def test_memory_counts_the_weights_and_grows_with_the_text():
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config())
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert memory(model, 0) == weights
    assert memory(model, 1000) > memory(model, 10) > weights
