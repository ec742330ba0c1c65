"""A laboratory model as Hugging Face's Llama: RoPE or p-RoPE, RMSNorm, SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.multihop.hugging_face.common import Family, fill, split_qkv
from wherewhat.multihop.hugging_face.rope import rope_parameters
from wherewhat.multihop.model import LabModel

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_FAMILY = Family(
    name="Llama",
    encoding=("rope", "p-rope"),
    block=("llama",),
    biases=("inner", "none"),
    whole={
        "embedding": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    layer={
        "norm.weight": "input_layernorm.weight",
        "out.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp_in.weight": "mlp.up_proj.weight",
        "mlp_gate.weight": "mlp.gate_proj.weight",
        "mlp_out.weight": "mlp.down_proj.weight",
    },
    prefix="model.layers.{}",
)


def to_llama(model: LabModel) -> LlamaForCausalLM:
    """The same model as a ``LlamaForCausalLM`` in evaluation mode, on the same device and in the same dtype.

    Raises:
        ConfigError: If Llama has no such model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    theirs = LlamaConfig(
        **_FAMILY.options(config),
        hidden_size=config.width,
        intermediate_size=8 * config.width // 3,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.positions,
        rms_norm_eps=1e-6,
        rope_parameters=rope_parameters(config),
    )
    weights = _FAMILY.renamed(model)
    for layer in range(config.layers):
        for name, part in zip("qkv", split_qkv(model, layer, config.head_width // 2), strict=True):
            weights[f"{_FAMILY.prefix.format(layer)}.self_attn.{name}_proj.weight"] = part.flatten(0, 1)
    return fill(LlamaForCausalLM(theirs), weights, model)
