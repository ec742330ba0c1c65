"""Llamas and single layers with random weights, in the shapes of real ones, for the other benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention, Mask
from wherewhat.captures.rotation import Rotation

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


def passes(model: Any, n: int, reducer: Callable[[LayerAttention], object]) -> tuple[Callable[[], None], ...]:
    """Return the plain pass over ``n`` random tokens, and the same with each layer passed to ``reducer``."""
    from wherewhat.captures.proof import capture, prove

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, n), generator=generator).to(model.device)
    proof = prove(model)

    def run(context: AbstractContextManager[object]) -> None:
        with torch.no_grad(), context:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return lambda: run(nullcontext()), lambda: run(capture(model, reducer, proof=proof))


def random_layer(
    n: int, *, heads: int, kv_heads: int, d: int, device: str, dtype: torch.dtype, base: float = 10_000.0
) -> LayerAttention:
    """Return random queries, keys and values as a causal layer of a Llama would hold them."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(count: int) -> Tensor:
        shape = (1, n, count, d)  # models make them token by token and turn them around
        return torch.randn(shape, generator=generator, device=device).to(dtype).transpose(1, 2)

    q = random(heads)
    return LayerAttention(
        layer=0,
        name="attention",
        rot_q=q,
        rot_k=random(kv_heads),
        value=random(kv_heads),
        output=q.transpose(1, 2),
        scale=d**-0.5,
        mask=Mask(causal=True, device=q.device),
        rotation=Rotation("half", 0, base ** -(torch.arange(d // 2) / (d // 2)), 1.0),
        positions=torch.arange(n, device=q.device),
    )
