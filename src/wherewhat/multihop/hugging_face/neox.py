"""A laboratory model as Hugging Face's GPT-NeoX: RoPE on all or some dimensions or frequencies, with LayerNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wherewhat.multihop.hugging_face.common import Family, fill, split_qkv
from wherewhat.multihop.hugging_face.rope import rope_parameters
from wherewhat.multihop.model import LabModel
from wherewhat.multihop.places import find_rotation

if TYPE_CHECKING:
    from transformers import GPTNeoXForCausalLM

_FAMILY = Family(
    name="GPT-NeoX",
    encoding=("rope", "p-rope", "partial"),
    block=("parallel", "sequential"),
    biases=("inner", "none"),
    whole={
        "embedding": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
    },
    layer={
        "norm.weight": "input_layernorm.weight",
        "norm.bias": "input_layernorm.bias",
        "out.weight": "attention.dense.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.bias": "post_attention_layernorm.bias",
        "mlp_in.weight": "mlp.dense_h_to_4h.weight",
        "mlp_in.bias": "mlp.dense_h_to_4h.bias",
        "mlp_out.weight": "mlp.dense_4h_to_h.weight",
        "mlp_out.bias": "mlp.dense_4h_to_h.bias",
    },
    prefix="gpt_neox.layers.{}",
)


def to_neox(model: LabModel) -> GPTNeoXForCausalLM:
    """The same model as a ``GPTNeoXForCausalLM`` in evaluation mode, on the same device and in the same dtype.

    Raises:
        ConfigError: If GPT-NeoX has no such model.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = model.config
    parallel = config.block == "parallel"
    options = _FAMILY.options(config)
    rotation = find_rotation(config)
    assert rotation is not None
    theirs = GPTNeoXConfig(
        **options,
        hidden_size=config.width,
        intermediate_size=4 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.positions,
        hidden_act="gelu_new" if parallel else "gelu",
        layer_norm_eps=1e-5,
        use_parallel_residual=parallel,
        attention_bias=False,
        rope_parameters=rope_parameters(config),
    )
    empty = GPTNeoXForCausalLM(theirs)
    head = "lm_head" if hasattr(empty, "lm_head") else "embed_out"  # by the version of transformers
    weights = {**_FAMILY.renamed(model), f"{head}.weight": model.state_dict()["head.weight"]}
    for layer in range(config.layers):
        prefix = _FAMILY.prefix.format(layer)
        parts = split_qkv(model, layer, rotation.planes)
        # Theirs go head by head: its queries, its keys, its values.
        weights[f"{prefix}.attention.query_key_value.weight"] = torch.stack(parts, 1).flatten(0, 2)
        if parallel:  # two norms of the same input there, one here
            for kind in ("weight", "bias"):
                if (own := weights.get(f"{prefix}.input_layernorm.{kind}")) is not None:
                    weights[f"{prefix}.post_attention_layernorm.{kind}"] = own
    return fill(empty, weights, model)
