"""Brute force: continuations that share their context score as those run with it one by one, in many families."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import proved, tiny, tokens
from wherewhat.captures.proof import prove
from wherewhat.errors import MeasureError
from wherewhat.measures.perturb.changes import swap
from wherewhat.runs import placement as continuing
from wherewhat.runs.placement import continued

FAMILIES = [
    "llama",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gemma3_text",
    "mistral",
    "qwen3",
    "phi3",
    "bloom",
    "mpt",
    "cohere2",
    "falcon",
    "jamba",
    "qwen2:window",
]
CONTINUATIONS = [(20, 31, 47), (33,), (90, 18, 25, 61, 77), (20, 31)]


def slowly(model, ids, continuations):
    """One pass over text and continuation each, all logits kept."""
    found, greedy = [], []
    for one in continuations:
        whole = torch.cat([ids, torch.tensor([one])], 1)
        with torch.no_grad():
            rows = model(input_ids=whole, use_cache=False).logits[0, ids.shape[1] - 1 : -1].double()
        found.append(sum(rows.log_softmax(-1)[i, token] for i, token in enumerate(one)))
        greedy.append(rows.argmax(-1).tolist() == list(one))
    return torch.stack(found), torch.tensor(greedy)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_equal_to_one_pass_each(family, shared):
    model, proof = proved(family)
    ids = tokens(23)
    found, greedy = continued(model, proof, ids, CONTINUATIONS, shared=shared)
    expected, said = slowly(model, ids, CONTINUATIONS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(greedy, said)


@pytest.fixture(scope="module")
def llama():
    model = tiny("llama")
    return model, prove(model)


def count_passes(model):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen, handle


def test_the_context_is_read_once(llama):
    model, proof = llama
    seen, handle = count_passes(model)
    continued(model, proof, tokens(23), CONTINUATIONS)
    continued(model, proof, tokens(23), [(3,), (4,)])
    handle.remove()
    assert seen == [(1, 23), (3, 4), (1, 23)]


def test_what_the_model_says_itself_is_greedy(llama):
    model, proof = llama
    ids = tokens(12)
    for _ in range(3):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    said = tuple(ids[0, 12:].tolist())
    _, greedy = continued(model, proof, ids[:, :12], [said, (*said[:-1], (said[-1] + 1) % 160), said[:1]])
    assert greedy.tolist() == [True, False, True]


def test_positions_and_orders_shared_or_not(llama):
    model, proof = llama
    ids = tokens(23)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([swap(23, 0.5, 0)[0], torch.arange(23, 27)])
    for changes in ({"positions": positions}, {"orders": {1: order}}, {"positions": positions, "orders": {0: order}}):
        one, _ = continued(model, proof, ids, CONTINUATIONS, **changes)
        other, _ = continued(model, proof, ids, CONTINUATIONS, shared=False, **changes)
        plain, _ = continued(model, proof, ids, CONTINUATIONS)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert (one - plain).abs().max() > 1e-3


def test_usual_positions_and_a_constant_shift_change_nothing(llama):
    model, proof = llama
    plain, _ = continued(model, proof, tokens(23), CONTINUATIONS)
    for start in (0, 5):
        found, _ = continued(model, proof, tokens(23), CONTINUATIONS, positions=torch.arange(27) + start)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_caches_that_drop_keys_are_not_shared():
    model = tiny("gemma3_text:window")
    proof = prove(model)
    seen, handle = count_passes(model)
    found, _ = continued(model, proof, tokens(23), CONTINUATIONS)
    handle.remove()
    assert seen[-4:] == [(1, 23), (1, 25), (1, 27), (1, 24)]
    torch.testing.assert_close(found, slowly(model, tokens(23), CONTINUATIONS)[0], rtol=1e-5, atol=1e-5)


def test_nothing_to_score_is_refused(llama):
    model, proof = llama
    for ids, continuations in ((tokens(5)[:, :0], [(1,)]), (tokens(5), []), (tokens(5), [(1,), ()])):
        with pytest.raises(MeasureError, match="must have tokens"):
            continued(model, proof, ids, continuations)


def test_scored_is_the_sum_of_log_probabilities():
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 3.0], [9.0, 9.0, 9.0]])
    found, greedy = continuing.scored(logits, [1, 0])
    expected = logits.double().log_softmax(-1)
    assert float(found) == pytest.approx(float(expected[0, 1] + expected[1, 0]), abs=1e-6)
    assert not bool(greedy)
