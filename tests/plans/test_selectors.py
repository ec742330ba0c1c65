"""Brute force and identity: scores of heads against their definitions, and the choice by them."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import TinySubject, proved, tokens
from wherewhat.caches.plan import LayerHeads, plannable
from wherewhat.errors import MeasureError
from wherewhat.measures.extend.retrieval import plant
from wherewhat.measures.variants import DEPTHS, RUN
from wherewhat.plans.costs import replaced_output
from wherewhat.plans.selectors import (
    SCORED,
    chosen,
    combined_scores,
    distance_score,
    distant_mass,
    document_scores,
    induction_scores,
    output_scores,
    placed_layers,
    random_scores,
    rank_scores,
    unit_scores,
)

N, WINDOW, SINKS = 200, 20, 3


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_every_selector_scores_every_head(family):
    model, proof = proved(family)
    layers = plannable(proof)
    found = document_scores(
        TinySubject(family), model, proof, tokens(N), layers, selectors=SCORED, window=WINDOW, sinks=SINKS
    )
    assert set(found) == set(SCORED)
    for scores in found.values():
        assert {layer: len(x) for layer, x in scores.items()} == {layer: x.heads for layer, x in layers.items()}
        assert all(x.isfinite().all() for x in scores.values())


def test_models_without_rotation_have_no_distance_curve():
    model, proof = proved("bloom")
    subject, options = TinySubject("bloom"), {"selectors": ("distance",), "window": WINDOW, "sinks": SINKS}
    with pytest.raises(MeasureError, match="there is no distance curve: leave the selector distance out"):
        document_scores(subject, model, proof, tokens(N), plannable(proof), **options)


def test_distance_score_is_that_of_the_mean_logits():
    def check(attention):
        found = distance_score(attention, sinks=SINKS)
        for head in range(attention.heads):
            q, k = attention.q[0, head].double().mean(0), attention.k[0, head // 2, SINKS:].double().mean(0)
            at = [attention.rotation.rotate(q[None], torch.tensor([d]))[0] for d in range(N)]
            logits = torch.stack([x @ k for x in at]) * attention.scale
            area = torch.softmax(logits, 0).cumsum(0).mean()
            assert float(found[head]) == pytest.approx(1 - float(area), abs=1e-5)

    TinySubject("llama").run(tokens(N), check)


def test_distant_mass_is_the_weight_beyond_the_window():
    def check(attention):
        i, j = torch.arange(N)[:, None], torch.arange(N)
        far = (attention.pattern()[0] * ((i - j >= WINDOW) & (j >= SINKS))).sum(-1)[:, WINDOW + SINKS :].mean(-1)
        found = distant_mass(attention, window=WINDOW, sinks=SINKS)
        torch.testing.assert_close(found, far.double(), atol=1e-5, rtol=0)

    TinySubject("llama").run(tokens(N), check)


def test_induction_is_the_weight_on_the_next_token_of_the_copy():
    subject = TinySubject("llama")
    ids = torch.randperm(140, generator=torch.Generator().manual_seed(0))[None, :100] + 16
    layers = {0: LayerHeads(4, 2), 2: LayerHeads(4, 2)}
    found = induction_scores(subject, ids, layers)
    assert set(found) == {0, 2}

    def check(attention):
        if attention.layer in layers:
            rows = torch.arange(50, 100)
            weights = attention.pattern()[0][:, rows, rows - 49].mean(-1)
            torch.testing.assert_close(found[attention.layer], weights.double(), atol=1e-5, rtol=0)

    subject.run(torch.cat([ids[:, :50]] * 2, 1), check)


def test_output_score_is_the_derivative_of_the_loss():
    """Moving a head's output by a small part of its change moves the loss by that part of the score."""
    model, proof = proved("llama")
    subject, ids = TinySubject("llama"), tokens(N)
    scores = output_scores(model, proof, ids, plannable(proof), window=WINDOW, sinks=SINKS)
    planting = plant(ids, DEPTHS, run=RUN)

    def loss(layer, head, part):
        def edit(attention):
            if attention.layer != layer:
                return None
            limited = replaced_output(attention, "window", None, window=WINDOW, sinks=SINKS)
            output = attention.output.clone()
            output[:, :, head] += part * (limited - attention.output)[:, :, head]
            return output

        logits = subject.edited(planting.planted, edit)[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, planting.planted[0, 1:], reduction="none")
        runs = losses[planting.body - 1 :].view(-1, RUN)[:, RUN // 4 :]
        return float(losses.mean() + runs.mean())

    for layer, head in ((0, 1), (3, 2)):
        slope = (loss(layer, head, 0.05) - loss(layer, head, -0.05)) / 0.1
        assert float(scores[layer][head]) == pytest.approx(slope, rel=0.05, abs=2e-5)


def test_combination_predicts_the_order_of_costs():
    generator = torch.Generator().manual_seed(0)
    one, other = ({layer: torch.rand(6, generator=generator) for layer in (0, 3)} for _ in range(2))
    target = {layer: 3 * one[layer] + 1 for layer in one}
    found = combined_scores([one, other], target)
    assert torch.equal(torch.cat([*found.values()]).argsort(), torch.cat([*one.values()]).argsort())


def test_ranks_are_summed_over_all_layers():
    found = rank_scores([{0: torch.tensor([1.0, 3.0]), 2: torch.tensor([2.0])}, {0: torch.ones(2), 2: torch.ones(1)}])
    assert {layer: x.tolist() for layer, x in found.items()} == {0: [-1.0, 1.0], 2: [0.0]}


def test_choice_takes_the_largest_scores_of_all_layers():
    scores = {0: torch.tensor([0.1, 0.9]), 5: torch.tensor([0.5, 0.7])}
    assert chosen(scores, 0.5) == {0: (1,), 5: (1,)}
    assert chosen(scores, 0) == {0: (), 5: ()}
    assert chosen(scores, 1) == {0: (0, 1), 5: (0, 1)}
    with pytest.raises(MeasureError, match="NaN"):
        chosen({0: torch.tensor([torch.nan])}, 0.5)


def test_scores_of_groups():
    layers = {0: LayerHeads(4, 2)}
    scores = {0: torch.tensor([1.0, 2.0, -1.0, 5.0])}
    assert torch.equal(unit_scores(scores, layers, "head", summed=True)[0], scores[0])
    assert unit_scores(scores, layers, "group", summed=True)[0].tolist() == [3.0, 4.0]
    assert unit_scores(scores, layers, "group", summed=False)[0].tolist() == [2.0, 5.0]
    drawn = random_scores(layers, 0)[0]
    assert drawn[0] == drawn[1]
    assert not torch.equal(drawn, random_scores(layers, 1)[0])


def test_layers_by_their_place():
    def kept(selector, count, layers=range(6)):
        choice = placed_layers(selector, layers, count / 6)
        return [layer for layer, units in choice.items() if units]

    assert [kept("interleaved", count) for count in range(4)] == [[], [3], [1, 4], [1, 3, 5]]
    assert [kept("ends", count) for count in range(5)] == [[], [0], [0, 5], [0, 1, 5], [0, 1, 4, 5]]
    assert kept("interleaved", 6) == kept("ends", 6) == list(range(6))
    assert kept("ends", 2, (2, 3, 5, 8, 9, 11)) == [2, 11]  # the others have a window of their own
