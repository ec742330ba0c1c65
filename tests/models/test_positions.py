"""Brute force: the limit is where the model itself stops working."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    CTRLConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    MptConfig,
    OpenAIGPTConfig,
    OPTConfig,
    RobertaConfig,
)

from helpers.capture import tiny, tokens
from wherewhat.errors import ConfigError
from wherewhat.lengths.method import extended
from wherewhat.lengths.windows import SlidingWindow
from wherewhat.models.loaded import max_positions, trained_length

GPT = {"vocab_size": 16, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 20}
HARD = {
    "gpt2": GPT2Config(**GPT),
    "openai-gpt": OpenAIGPTConfig(**GPT),
    "gptj": GPTJConfig(**GPT, rotary_dim=4),
    "codegen": CodeGenConfig(**GPT, rotary_dim=4),
    "ctrl": CTRLConfig(vocab_size=16, n_embd=32, dff=32, n_layer=1, n_head=4, n_positions=20),
    "opt": OPTConfig(
        vocab_size=16, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=20, word_embed_proj_dim=32,
    ),
    "gpt_neo": GPTNeoConfig(
        vocab_size=16, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]],
        max_position_embeddings=20,
    ),
    "mpt": MptConfig(vocab_size=16, d_model=32, n_heads=4, n_layers=1, max_seq_len=20),
    "roberta": RobertaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=20, is_decoder=True,
    ),
}  # fmt: skip


def works(model, count):
    try:
        with torch.no_grad():
            model(torch.full((1, count), 3))
    except (IndexError, RuntimeError):
        return False
    return True


def test_hard_limit_is_where_the_model_breaks(subtests):
    for kind, config in HARD.items():
        with subtests.test(kind=kind):
            model = AutoModelForCausalLM.from_config(config).eval()
            limit, hard = max_positions(model)
            assert hard
            assert limit == (18 if kind == "roberta" else 20)
            assert trained_length(model) == limit
            assert works(model, limit)
            assert not works(model, limit + 1)


def test_rope_limit_is_soft_and_alibi_has_none(build):
    rope = AutoModelForCausalLM.from_config(build.config()).eval()
    assert max_positions(rope) == (32, False)
    assert works(rope, 40)
    alibi = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=16, hidden_size=32, n_layer=1, n_head=4)).eval()
    assert max_positions(alibi) == (None, False)


def test_tables_of_pictures_are_no_limit_on_texts():
    model = tiny("gemma3")
    limit, hard = max_positions(model)
    assert not hard
    with torch.no_grad(), extended(model, SlidingWindow(window=8)):
        model(input_ids=tokens(limit + 80), use_cache=False)


def test_names_of_the_length_in_configurations():
    for name in ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length"):
        model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=16, hidden_size=32, n_layer=1, n_head=4))
        with pytest.raises(ConfigError, match="BloomForCausalLM does not state its training length"):
            trained_length(model)
        setattr(model.config, name, 48)
        assert trained_length(model) == 48, name
