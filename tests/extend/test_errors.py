"""Identity: what makes no sense is refused with one line that names the value."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import run, shared, tiny, tokens
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.extend import METHODS, find_method
from wherewhat.extend.frequencies import DynamicNTK, NTKAware, YaRN
from wherewhat.extend.method import extended, generate
from wherewhat.extend.windows import InfLLM, LMInfinite, ReRoPE, SelfExtend, SlidingWindow, StreamingLLM, Untouched
from wherewhat.models.loaded import trained_length


@pytest.mark.parametrize("method", [SlidingWindow, StreamingLLM, LMInfinite, InfLLM, SelfExtend, ReRoPE])
@pytest.mark.parametrize("window", [0, -4])
def test_windows_that_hold_nothing(method, window):
    with pytest.raises(ConfigError, match=f"window={window} makes no sense"):
        method(window=window)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingLLM(sinks=0), "sinks=0"),
        (lambda: NTKAware(factor=0.5), "factor=0.5"),
        (lambda: NTKAware(factor=float("nan")), "factor=nan"),
        (lambda: YaRN(fast=1, slow=2), "fast must be above slow"),
        (lambda: SelfExtend(group=0), "group=0"),
        (lambda: SelfExtend(window=9, trained=9), "leaves no distance"),
        (lambda: InfLLM(block=2, representatives=3), "more than a block of 2"),
        (lambda: DynamicNTK(step=0), "step=0"),
        (lambda: find_method("lm-infinit"), "did you mean 'lm-infinite'"),
        (lambda: find_method("zzz"), "known: none, sliding-window"),
    ],
)
def test_parameters(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_window_above_the_text():
    with pytest.raises(MeasureError, match="window=40 sees all of a text of 31 tokens"):
        LMInfinite(window=40).check(31)
    LMInfinite(window=30).check(31)


@pytest.mark.slow
@pytest.mark.parametrize("method", [m for m in map(find_method, METHODS) if m.rotary], ids=lambda m: m.name)
@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_models_without_rotation(method, family):
    with pytest.raises(MeasureError, match="no layer of"), extended(tiny(family), method()):
        pass


def test_open_parameters():
    assert SlidingWindow().is_open
    assert not SlidingWindow(window=4).is_open
    assert not Untouched().is_open
    layer = run(shared("llama"), tokens(9))[0]
    with pytest.raises(ConfigError, match="does not know its window"):
        SlidingWindow().attend(layer)
    with pytest.raises(ConfigError, match="does not know its factor or training length"):
        NTKAware().attend(layer)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gptj", "opt", "openai-gpt", "mpt"])
def test_texts_beyond_the_table_of_positions(family):
    model = tiny(family)
    long = tokens(trained_length(model) + 1)
    with pytest.raises(MeasureError, match="longer than the table"), extended(model, SlidingWindow(window=4)):
        model(input_ids=long)
    model(input_ids=long[:, :-1])


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_padding(family):
    model, ids = tiny(family), tokens(12, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for more in ({}, {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}):
        with pytest.raises(MeasureError, match="padding"), extended(model, LMInfinite(window=4)):
            model(input_ids=ids, attention_mask=mask, use_cache=False, **more)


def test_memory_of_blocks_needs_all_queries():
    model, ids = tiny("llama"), tokens(20)
    with torch.no_grad(), extended(model, InfLLM(window=4, sinks=1, block=2, representatives=1)):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(MeasureError, match="use_cache=False"):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)


def test_nothing_to_write():
    with pytest.raises(ConfigError, match="steps=0"):
        generate(tiny("llama"), tokens(9), SlidingWindow(window=4), 0)
