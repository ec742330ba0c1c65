"""Identity: softmax of a method's logits times the values is what it attends to."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.capture import run, tiny, tokens
from helpers.methods import BY_NAME
from wherewhat.errors import ConfigError
from wherewhat.extend.windows import SlidingWindow

N = 31


@functools.cache
def layers(family):
    more = {"attn_implementation": "eager"} if family == "gpt_oss" else {}
    return run(tiny(family, **more), tokens(N, batch=2))


@BY_NAME
@pytest.mark.parametrize("family", ["llama", "gptj", "gpt_neox", "gemma3_text", "gemma2", "gpt_oss"])
def test_logits_give_the_output(family, method):
    for layer in layers(family):
        output = method.attend(layer)
        want = layer.output if output is None else output
        value = layer.value.repeat_interleave(layer.heads // layer.kv_heads, 1)
        for rows in (slice(0, N), slice(3, 5), slice(13, 29)):
            scores = method.scores(layer, rows)
            assert scores.shape == (2, layer.heads, rows.stop - rows.start, N)
            if layer.sinks is not None:
                sink = layer.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat([scores, sink.to(scores.dtype)], -1)
            got = (scores.softmax(-1)[..., :N] @ value).transpose(1, 2)
            torch.testing.assert_close(got, want[:, rows], atol=2e-5, rtol=0)


def test_open_parameters():
    layer = run(tiny("llama"), tokens(9))[0]
    with pytest.raises(ConfigError, match="does not know its window"):
        SlidingWindow().scores(layer, slice(0, 9))
