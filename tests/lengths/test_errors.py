"""Identity: what makes no sense is refused with one line that names the value."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.capture import proved, run, shared, tiny, tokens
from wherewhat.caches.kept_keys import keys_kept
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.lengths import METHODS, find_method
from wherewhat.lengths.frequencies import DynamicNTK, NTKAware, YaRN
from wherewhat.lengths.method import extended, generate
from wherewhat.lengths.near_far import NearFar
from wherewhat.lengths.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM, Untouched
from wherewhat.models.loaded import trained_length

WITH_WINDOW = (SlidingWindow, StreamingLLM, LMInfinite, InfLLM, SelfExtend, ReRoPE)
WRONG = [
    *((method, {"window": window}, f"window={window} makes no sense") for method in WITH_WINDOW for window in (0, -4)),
    (StreamingLLM, {"sinks": 0}, "sinks=0"),
    (NTKAware, {"factor": 0.5}, "factor=0.5"),
    (NTKAware, {"factor": math.nan}, "factor=nan"),
    (YaRN, {"fast": 1, "slow": 2}, "fast must be above slow"),
    (SelfExtend, {"group": 0}, "group=0"),
    (SelfExtend, {"window": 9, "trained": 9}, "leaves no distance"),
    (InfLLM, {"block": 2, "representatives": 3}, "more than a block of 2"),
    (DynamicNTK, {"step": 0}, "step=0"),
    *(
        (NearFar, {name: 0}, f"near-far with {name}=0")
        for name in ("top", "window", "sinks", "distance", "sink_distance")
    ),
    (NearFar, {"chosen": "nearest"}, "near-far with chosen='nearest'"),
    (NearFar, {"top": 2.5}, "near-far with top=2.5"),
    (NearFar, {"window": 16.0}, "near-far with window=16.0"),
    (NearFar, {"top": True}, "near-far with top=True"),
    (NearFar, {"margin": math.nan}, "near-far with margin=nan"),
    (NearFar, {"margin": -1.0}, "near-far with margin=-1.0"),
    (NearFar, {"sink_distance": 2}, "near-far with sink_distance=2 and sinks=4 puts first keys after the query"),
    (NearFar, {"plan": "a.json"}, "near-far with plan='a.json'"),
    (find_method, {"name": "lm-infinit"}, "did you mean 'lm-infinite'"),
    (find_method, {"name": "zzz"}, "known: none, sliding-window"),
]


def test_parameters(subtests):
    for make, options, message in WRONG:
        with subtests.test(make=make.__name__, **options), pytest.raises(ConfigError, match=message) as error:
            make(**options)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="steps=0"):
        generate(tiny("llama"), tokens(9), SlidingWindow(window=4), 0)


def test_window_above_the_text():
    with pytest.raises(MeasureError, match="window=40 sees all of a text of 31 tokens"):
        LMInfinite(window=40).check(31)
    LMInfinite(window=30).check(31)


def test_models_without_rotation():
    for family in ("gpt2", "bloom"):
        model, proof = proved(family)
        rotary = [method for method in map(find_method, METHODS) if method.rotary]
        assert len(rotary) > 1
        for method in rotary:
            with pytest.raises(MeasureError, match="no layer of"), extended(model, method(), proof=proof):
                pass


def test_open_parameters():
    assert SlidingWindow().is_open
    assert not SlidingWindow(window=4).is_open
    assert not Untouched().is_open
    layer = run(shared("llama"), tokens(9))[0]
    with pytest.raises(ConfigError, match="does not know its window"):
        SlidingWindow().attend(layer)
    with pytest.raises(ConfigError, match="does not know its window"):
        SlidingWindow().scores(layer, slice(0, 9))
    with pytest.raises(ConfigError, match="does not know its factor or training length"):
        NTKAware().attend(layer)


def test_texts_beyond_the_table_of_positions(subtests):
    for family in ("gpt2", "gptj", "opt", "openai-gpt", "mpt"):
        with subtests.test(family=family):
            model = shared(family)
            long = tokens(trained_length(model) + 1)
            with pytest.raises(MeasureError, match="longer than the table"), extended(model, SlidingWindow(window=4)):
                model(input_ids=long)
            model(input_ids=long[:, :-1])


def test_padding():
    ids = tokens(12, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for family in ("llama", "gptj"):
        for more in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
            model = shared(family)
            with pytest.raises(MeasureError, match="padding"), extended(model, LMInfinite(window=4)):
                model(input_ids=ids, attention_mask=mask, use_cache=False, **more)


def test_blocks_need_all_queries():
    model, ids = shared("llama"), tokens(20)
    with torch.no_grad(), extended(model, InfLLM(window=4, sinks=1, block=2, representatives=1)):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(MeasureError, match=r"lengths\.keys_kept\(\) of their own, .*, or with use_cache=False"):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        with keys_kept(), pytest.raises(MeasureError, match="needs the queries of all 22 keys and got 1"):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)  # the text was read outside
