"""Llamas with random weights, in the shapes of real ones, for the other benchmarks."""

from __future__ import annotations

from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "1.1B": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "8B": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Configurations by number of weights."""


def random_llama(shape: str, *, tokens: int, device: str, dtype: str) -> Any:
    """Return a model of one of the shapes for texts of up to ``tokens`` tokens, in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=tokens)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
