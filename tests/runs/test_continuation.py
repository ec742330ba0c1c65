"""Brute force: continuations that share their context score as those run with it one by one, in many families."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import proved, tiny, tokens
from wherewhat.captures.proof import prove
from wherewhat.errors import MeasureError
from wherewhat.lengths import InfLLM, NearFar, extended
from wherewhat.measures.perturb.changes import swap
from wherewhat.runs.subject import continued

# A cache of all keys with rotations, a table and biases; one with recurrent states; one with windows in some layers.
FAMILIES = ["llama", "gpt2", "bloom", "jamba", "qwen2:window"]
MORE_FAMILIES = ["gpt_neox", "gemma2", "gemma3_text", "mistral", "qwen3", "phi3", "mpt", "cohere2", "falcon"]
# Scores are sums of up to five float32 log-probabilities near -5, whose logits are sums over 64 products and a few
# layers: 5 · 5 · 64 ε is 2e-4 at worst, of which random signs leave about a hundredth.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
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


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAMILIES)])
def test_equal_to_one_pass_each(family):
    model, proof = proved(family)
    ids = tokens(23)
    expected, said = slowly(model, ids, CONTINUATIONS)
    for shared in (True, False):
        found, greedy = continued(model, proof, ids, CONTINUATIONS, shared=shared)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, **CLOSE)
        assert torch.equal(greedy, said)


@pytest.mark.parametrize(
    "method", [InfLLM(2, 6, block=4, top=2, representatives=2), NearFar(sinks=2, window=6)], ids=lambda x: x.name
)
def test_equal_to_one_pass_each_under_a_method(method):
    """What is kept of the text's queries and keys is that of each continuation."""
    (model, proof), ids = proved("llama"), tokens(23)
    with extended(model, method, proof=proof):
        expected, said = slowly(model, ids, CONTINUATIONS)
        found, greedy = continued(model, proof, ids, CONTINUATIONS)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(greedy, said)


@pytest.fixture(scope="module")
def llama():
    return proved("llama")


def count_passes(model):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return seen, handle


def test_what_the_model_says_itself_is_greedy(llama):
    model, proof = llama
    ids = tokens(12)
    for _ in range(3):
        with torch.no_grad():
            best = model(input_ids=ids).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "rounding decides what the model says"
        ids = torch.cat([ids, best.indices[None, :1]], 1)
    said = tuple(ids[0, 12:].tolist())
    _, greedy = continued(model, proof, ids[:, :12], [said, (*said[:-1], (said[-1] + 1) % 160), said[:1]])
    assert greedy.tolist() == [True, False, True]


def test_positions_and_orders_shared_or_not(llama):
    model, proof = llama
    ids = tokens(23)
    plain, _ = continued(model, proof, ids, CONTINUATIONS)
    for start in (0, 5):  # the usual positions, and a constant shift
        found, _ = continued(model, proof, ids, CONTINUATIONS, positions=torch.arange(27) + start)
        torch.testing.assert_close(found, plain, **CLOSE)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    positions = torch.cat([swap(23, 0.5, 0)[0], torch.arange(23, 27)])
    for changes in ({"positions": positions}, {"orders": {1: order}}, {"positions": positions, "orders": {0: order}}):
        one, _ = continued(model, proof, ids, CONTINUATIONS, **changes)
        other, _ = continued(model, proof, ids, CONTINUATIONS, shared=False, **changes)
        torch.testing.assert_close(one, other, **CLOSE)
        assert (one - plain).abs().max() > 1e-3


def test_the_context_is_read_once_unless_its_cache_drops_keys(llama):
    model, proof = llama
    seen, handle = count_passes(model)
    continued(model, proof, tokens(23), CONTINUATIONS)
    continued(model, proof, tokens(23), [(3,), (4,)])
    handle.remove()
    assert seen == [(1, 23), (3, 4), (1, 23)]
    model = tiny("gemma3_text:window")
    proof = prove(model)
    seen, handle = count_passes(model)
    found, _ = continued(model, proof, tokens(23), CONTINUATIONS)
    handle.remove()
    assert seen[-4:] == [(1, 23), (1, 25), (1, 27), (1, 24)]
    torch.testing.assert_close(found, slowly(model, tokens(23), CONTINUATIONS)[0], **CLOSE)


def test_nothing_to_score_is_refused(llama):
    model, proof = llama
    for ids, continuations in ((tokens(5)[:, :0], [(1,)]), (tokens(5), []), (tokens(5), [(1,), ()])):
        with pytest.raises(MeasureError, match="must have tokens"):
            continued(model, proof, ids, continuations)
