"""Settings of a type beyond the one its plain name builds, each a known way for attention to differ.

A variant's values win over the type's in ``overrides``; ``...`` leaves a field at the type's own default.
"""

from __future__ import annotations

from typing import Any

from conformance.overrides import FULL, SLIDING
from conformance.tiny_config import POSITIONS

# Reached by a prompt of 23 tokens, so that `dynamic` and `longrope` recompute their frequencies.
_TRAINED_POSITIONS = 16
_FREQUENCIES = 8
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": _TRAINED_POSITIONS,
    "short_factor": [1.0 + 0.05 * i for i in range(_FREQUENCIES)],
    "long_factor": [1.0 + 0.5 * i for i in range(_FREQUENCIES)],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": _TRAINED_POSITIONS,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0} | parameters}


VARIANTS: dict[str, dict[str, Any]] = {
    "bloom:default": {},
    "cohere:default": {"use_qk_norm": False},
    "deepseek_v2:full_query": {"q_lora_rank": None},
    "deepseek_v3:half_split": {"rope_interleave": False},
    "deepseek_v3:yarn": {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "falcon:alibi": {"alibi": True},
    "falcon:multi_head": {"multi_query": False, "num_kv_heads": 4, "bias": True, "parallel_attn": False},
    "falcon:new_decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon:rotary": {"alibi": False},
    "gemma2:no_cap": {"attn_logit_softcapping": None},
    "gemma3_text:linear": {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        }
    },
    "gemma3_text:window": {
        "num_hidden_layers": 6,
        "layer_types": [SLIDING] * 5 + [FULL],
        "sliding_window": 4,
    },
    "gemma4_text:moe": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "gemma4_text:shared_key_value": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gpt2:reorder": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "gpt2:unscaled": {"scale_attn_weights": False},
    "gpt_bigcode:multi_head": {"multi_query": False},
    "gpt_neox:full": _rope(rope_type="default", partial_rotary_factor=1.0),
    "gpt_neox:partial": _rope(rope_type="default", partial_rotary_factor=0.25),
    "granitemoehybrid:nope": {"position_embedding_type": None},
    "llama:bias": {"attention_bias": True},
    "llama:dynamic": _rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": _TRAINED_POSITIONS},
    "llama:linear": _rope(rope_type="linear", factor=4.0),
    "llama:llama3": _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=_TRAINED_POSITIONS,
    ),
    "llama:longrope": {"rope_parameters": _LONG},
    "llama:multi_head": {"num_key_value_heads": 4},
    "llama:multi_query": {"num_key_value_heads": 1},
    "llama:wide_heads": {"head_dim": 32},
    "llama:yarn": {"rope_parameters": _YARN},
    "mistral:full": {"sliding_window": None},
    "mpt:clip": {"attn_config": {"clip_qkv": 1.5}},
    "mpt:default": {},
    "opt:post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "phi3:longrope": {
        "rope_parameters": _LONG | {"partial_rotary_factor": 1.0},
        "original_max_position_embeddings": _TRAINED_POSITIONS,
        "max_position_embeddings": POSITIONS,
        "sliding_window": None,
    },
    "phi:partial": {"qk_layernorm": False},
    "qwen2:window": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "reformer:local": {"attn_layers": ["local"] * 4},
    "roformer:rotary_value": {"rotary_value": True},
    "smollm3:full": {"use_sliding_window": False, "sliding_window": None},
    "stablelm:default": {"qk_layernorm": False},
    "xlm:default": {"causal": False},
    "xlnet:default": {"attn_type": "bi"},
    "zamba2:nope": {"use_mem_rope": False, "use_shared_attention_adapter": False},
}
