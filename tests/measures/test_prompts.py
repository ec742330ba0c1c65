"""Brute force: candidates scored token by token. Identity: thirds of the list do not tell sizes apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Question, all_metrics
from wherewhat.measures.prompts import PromptsConfig, PromptsMeasurement, _third, answer_prompt
from wherewhat.measures.statistics import wilson
from wherewhat.scores import Scores


@dataclass
class Bigrams:
    """A model whose next token depends on the last one alone."""

    logits: torch.Tensor

    def run(self, ids, reducer, *, logits=False):
        return self.logits[ids]


def ask(candidates, correct, *, ids=(1, 2, 3)):
    return Question(torch.tensor([ids]), candidates, correct, "binding", len(candidates), 0.5)


def table(seed=0):
    return torch.randn(10, 10, generator=torch.Generator().manual_seed(seed))


def test_candidates_of_several_tokens_are_scored_to_their_end():
    candidates = ((4,), (5, 6), (5, 7, 1), (8, 2))
    for seed in range(5):
        logits = table(seed)
        logp = logits.double().log_softmax(-1)
        expected = [float(logp[3, 4]), float(logp[3, 5] + logp[5, 6]), float(logp[3, 5] + logp[5, 7] + logp[7, 1])]
        expected.append(float(logp[3, 8] + logp[8, 2]))
        found = answer_prompt(Bigrams(logits), ask(candidates, 2))
        assert found.chosen == max(range(4), key=expected.__getitem__)
        assert found.correct == (found.chosen == 2)
        assert found.logprob == pytest.approx(expected[2], abs=1e-5)
        assert found.margin == pytest.approx(expected[2] - max(expected[i] for i in (0, 1, 3)), abs=1e-5)
        assert found.said == (int(logits[3].argmax()) == 5)


def test_accuracy_by_size_and_place():
    logits = torch.zeros(10, 10)
    logits[3, 4] = 9
    right = PromptsMeasurement().measure(Bigrams(logits), ask(((4,), (5,)), 0), PromptsConfig())
    wrong = PromptsMeasurement().measure(Bigrams(logits), ask(((4,), (5,)), 1), PromptsConfig())
    assert right.whole["accuracy_binding_2"] == 1
    assert right.whole["chance"] == 0.5
    together = PromptsMeasurement().combine([right, wrong], PromptsConfig(kinds=("binding",), sizes=(2, 4)))
    values = together.curves["accuracy_binding"].values
    assert values[0, 1] == 0.5
    assert bool(values[1].isnan().all())
    assert together.whole["accuracy_together"] == 0.5
    assert "accuracy_binding_middle" not in together.whole  # the others are empty: there is nothing to compare


def asked(size, place, *, right):
    whole = {"accuracy": float(right), "chance": 1 / size, "answer_place": place / max(1, size - 1)}
    return Scores(whole=whole | {f"accuracy_binding_{size}": float(right)})


def test_thirds_do_not_differ_where_only_the_size_does():
    """Right at size 4 and never else; size 2 has no middle and must not count."""
    sizes = (2, 4, 8, 16, 32)
    documents = [asked(size, k % size, right=size == 4) for size in sizes for k in range(max(size, 12))]
    found = PromptsMeasurement().combine(documents, PromptsConfig(kinds=("binding",), sizes=sizes))
    for third in ("first", "middle", "last"):
        name = f"binding_{third}"
        assert found.whole[f"accuracy_{name}"] == pytest.approx(1 / 4)
        assert found.whole[f"chance_{name}"] == pytest.approx((1 / 4 + 1 / 8 + 1 / 16 + 1 / 32) / 4)
        assert 0 < found.whole[f"accuracy_{name}_low"] < 1 / 4 < found.whole[f"accuracy_{name}_high"] < 1
    table = found.curves["accuracy_binding"].values
    assert table[0].isnan().tolist() == [False, True, False]
    assert table[1:].tolist() == [[1.0] * 3, *[[0.0] * 3] * 3]


def test_thirds_of_one_size_have_wilsons_interval():
    documents = [asked(6, k % 6, right=k % 4 > 0) for k in range(24)]
    found = PromptsMeasurement().combine(documents, PromptsConfig(kinds=("binding",), sizes=(6,))).whole
    expected = wilson([float(bool(k % 4)) for k in range(24) if k % 6 < 2])
    assert found["accuracy_binding_first"] == pytest.approx(expected.mean)
    assert found["accuracy_binding_first_low"] == pytest.approx(expected.low)
    assert found["accuracy_binding_first_high"] == pytest.approx(expected.high)


def test_first_and_last_third_are_equally_full():
    for size in range(2, 33):
        thirds = [_third(k / (size - 1)) for k in range(size)]
        assert thirds == [2 - x for x in reversed(thirds)], size
        assert thirds.count(0) == thirds.count(2)


def test_words_follow_the_options():
    names = [metric.name for metric in all_metrics(PromptsMeasurement(), PromptsConfig(kinds=("letters",), sizes=(3,)))]
    assert names[-5:] == [f"accuracy_letters{x}" for x in ("", "_3", "_first", "_middle", "_last")]


def test_bad_options(subtests):
    for options in ({"kinds": ("songs",)}, {"sizes": ()}, {"sizes": (1,)}, {"count": 0}, {"sizes": (4, 4)}):
        with subtests.test(**options), pytest.raises(ConfigError):
            PromptsConfig(**options)
