"""Identity: what is kept of a text changes nothing.

Keys that are rotated once give the logits of keys that are rotated for every token, bit for bit; blocks of keys that
are represented once give those of a pass over the whole text, up to rounding.
"""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from helpers.capture import assert_near, proved, run, shared, tokens
from helpers.methods import SMALL
from wherewhat.caches import kept_keys
from wherewhat.caches.kept_keys import keys_kept, own_positions, rotated_keys
from wherewhat.errors import MeasureError
from wherewhat.lengths import windows
from wherewhat.lengths.method import extended
from wherewhat.lengths.windows import InfLLM

N, NEW = 31, 9
ROTATING = ("position-interpolation", "dynamic-ntk", "yarn", "self-extend", "rerope", "near-far")
METHODS = {method.name: method.fitted(trained=12, length=N + 1) for method in SMALL}


def continued(model, ids, kept=None, rows=None):
    """Logits of the last tokens, each from a pass over it with a cache; later some texts only."""
    cache, logits, start = DynamicCache(config=model.config), [], 0
    for place in range(N - NEW, N + 1):
        if rows is not None and place == N - 3:
            ids = ids[rows]
            cache.batch_select_indices(rows)
            if kept is not None:
                kept.select(rows)
        logits.append(model(input_ids=ids[:, start:place], past_key_values=cache, use_cache=True).logits[:, -1])
        start = place
    return logits


@pytest.mark.parametrize("name", ROTATING)
def test_logits_are_those_of_keys_rotated_anew(name, monkeypatch):
    monkeypatch.setattr(kept_keys, "_SPARE", 2)
    model, ids, rows = shared("llama"), tokens(N, batch=3), torch.tensor([2, 0])
    with torch.no_grad(), extended(model, METHODS[name]):
        expected = continued(model, ids, rows=rows)
        with keys_kept() as kept:
            found = continued(model, ids, kept, rows)
    assert all(map(torch.equal, found, expected))


def test_each_key_is_rotated_once(monkeypatch):
    counts = []
    turned = kept_keys._turned

    def counted(attention, to, rotation, start):
        counts.append(attention.m - start)
        return turned(attention, to, rotation, start)

    monkeypatch.setattr(kept_keys, "_turned", counted)
    model = shared("llama")
    with torch.no_grad(), extended(model, METHODS["yarn"]), keys_kept():
        continued(model, tokens(N))
    layers = model.config.num_hidden_layers
    assert counts == [N - NEW] * layers + [1] * (NEW * layers)


def test_parts_of_a_layer_and_other_texts_are_not_mixed_up():
    layer = run(shared("llama"), tokens(N, batch=2))[-1]
    expected = rotated_keys(layer, own_positions)
    with keys_kept():
        assert torch.equal(rotated_keys(layer, torch.zeros_like), rotated_keys(layer, torch.zeros_like))
        assert torch.equal(rotated_keys(layer, own_positions), expected)
        assert torch.equal(rotated_keys(layer, lambda j: j), expected)


BLOCKS = InfLLM(sinks=2, window=6, block=4, top=2, representatives=2)
"""Of 31 tokens: five blocks of four, finished by the twelfth token and every fourth one after it."""
PARTS = ((18, *[1] * 13), (13, 5, *[1] * 13), (3, 4, 1, 20, 3), (1,) * N, (30, 1))


def in_parts(model, ids, parts):
    """Logits of all tokens, from one pass over each part of the texts."""
    cache, logits = DynamicCache(config=model.config), []
    for part in ids.split(parts, 1):
        logits.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: f"{len(parts)} parts")
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_blocks_are_those_of_the_whole_text(family, parts):
    """Grouped key heads, two texts; later tokens are one at a time."""
    (model, proof), ids = proved(family), tokens(N, batch=2)
    with torch.no_grad(), extended(model, BLOCKS, proof=proof):
        whole = model(input_ids=ids, use_cache=False).logits
        with keys_kept():
            found, _ = in_parts(model, ids, parts)
    for place in range(N):
        assert_near(found[:, place], whole[:, place])


def test_blocks_follow_the_texts_that_are_selected():
    """Some of the texts, in another order, and one of them twice."""
    (model, proof), ids, rows = proved("llama"), tokens(N, batch=3), torch.tensor([2, 0, 2])
    with torch.no_grad(), extended(model, BLOCKS, proof=proof), keys_kept() as kept:
        whole = model(input_ids=ids, use_cache=False).logits
        _, cache = in_parts(model, ids[:, : N - NEW], (12, *[1] * (N - NEW - 12)))
        cache.batch_select_indices(rows)
        kept.select(rows)
        for place in range(N - NEW, N):
            new = ids[rows, place : place + 1]
            logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
            assert_near(logits[:, 0], whole[rows, place])


def test_each_block_is_represented_once(monkeypatch):
    blocks = []
    best = InfLLM._sums_of_best

    def counted(self, attention, keys, running, window):
        assert running.shape[2] <= attention.n + BLOCKS.block + window
        blocks.append((keys.start, keys.stop))
        return best(self, attention, keys, running, window)

    monkeypatch.setattr(windows.InfLLM, "_sums_of_best", counted)
    model, proof = proved("llama")
    with torch.no_grad(), extended(model, BLOCKS, proof=proof), keys_kept():
        in_parts(model, tokens(N), (18, *[1] * 13))
    layers = model.config.num_hidden_layers
    assert blocks == [x for keys in ((2, 10), (10, 14), (14, 18), (18, 22)) for x in [keys] * layers]


def test_blocks_of_another_text_are_not_continued():
    (model, proof), ids = proved("llama"), tokens(N)
    with torch.no_grad(), extended(model, BLOCKS, proof=proof), keys_kept():
        in_parts(model, tokens(20, seed=1), (15, 5))
        whole = model(input_ids=ids, use_cache=False).logits  # a text of another length begins again
        found, _ = in_parts(model, ids[:, :-1], (N - 1,))
        assert_near(found, whole[:, :-1])
        _, cache = in_parts(model, ids[:, :-1], (N - 1,))
        with pytest.raises(MeasureError, match="needs the queries of all 31 keys and got 1"):  # one of the same length
            model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)


def test_blocks_of_two_parts_of_a_layer_are_not_mixed_up():
    layer = run(shared("llama"), tokens(N))[-1]
    with keys_kept():
        first, second = (BLOCKS.attend(layer) for _ in range(2))
        assert torch.equal(first, second)
        assert kept_keys.kept_blocks(layer, BLOCKS) is None
    with keys_kept():
        BLOCKS.attend(layer)
        kept = kept_keys._open.get()._blocks[layer.layer]
        assert kept.count == N
        assert kept.represented.shape[2] == (N - 6 - 2) // 4
