"""Identity: keys that are rotated once give the logits of keys that are rotated for every token, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from helpers.capture import run, shared, tokens
from helpers.methods import SMALL
from wherewhat.caches import kept_keys
from wherewhat.caches.kept_keys import keys_kept, own_positions, rotated_keys
from wherewhat.lengths.method import extended

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
