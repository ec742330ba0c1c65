"""What the generic tiny configuration cannot know about a type.

Each entry either makes sizes fit together or switches on what sets the type apart: windows, layers without
rotation, soft caps, norms of query and key. Values that decide *when* something starts (a window, a soft
cap, a temperature floor) are so small that a prompt of 23 tokens reaches them.
"""

from __future__ import annotations

from typing import Any

from conformance.tiny_config import HEAD_DIM, HIDDEN, LAYERS, VOCAB, WINDOW

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LOCAL_GLOBAL = [SLIDING, FULL] * (LAYERS // 2)
LINEAR_GLOBAL = [LINEAR, FULL] * (LAYERS // 2)
SOFT_CAP = 3.0

# Scales that are 1 by default, or that real checkpoints set far from head_dim ** -0.5.
_GRANITE = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
}
_UPPER_HALF_WINDOWED = {"use_sliding_window": True, "max_window_layers": LAYERS // 2}
_GEMMA4_TEXT = {"global_head_dim": 2 * HEAD_DIM, "num_kv_shared_layers": 2}
_QWEN4_TEXT = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2,
    "split_ngram_parts": 1,
    "make_ngram_vocab_size_divisible_by": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_LLAMA4_TEXT = {"floor_scale": 4, "layer_types": ["chunked_attention"] * 3 + [FULL], "attn_scale": 0.5}
_BLT_PART = {"num_hidden_layers": 1, "hidden_size_global": 2 * HIDDEN, "vocab_size": 260}

# For types whose logits lack 1 / sqrt(head_dim), or have a further factor.
QUERY_KEY_GAINS: dict[str, float] = {
    "gpt2:reorder": 1.8,
    "gpt2:unscaled": 0.65,
    "gpt_neo": 0.65,
    "gpt_oss": 1.0,
    "longcat_flash": 0.8,
    "nemotron": 0.65,
}
QUERY_KEY_NORM_GAINS: dict[str, float] = {
    "gemma3n": 0.6,
    "gemma3n_text": 0.6,
    "gemma4": 0.6,
    "gemma4_text": 0.6,
    "gemma4_unified": 0.6,
    "gemma4_unified_text": 0.6,
    "inkling_text": 2.0,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_topk": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": {"num_hidden_layers": 1, "vocab_size": 260},
        "encoder_config": _BLT_PART,
        "decoder_config": _BLT_PART | {"num_hidden_layers": 2},
        "global_config": {"num_hidden_layers": 2, "hidden_size": 2 * HIDDEN},
    },
    "codegen": {"rotary_dim": 8},
    "cohere": {"use_qk_norm": True},
    "cohere_compass_text": {
        "layer_types": LOCAL_GLOBAL,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
            FULL: None,
        },
    },
    "cpmant": {"prompt_length": 4, "prompt_types": 4, "segment_types": 4, "position_bias_max_distance": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.5},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v4": {
        "head_dim": 2 * HEAD_DIM,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "index_topk": 2,
        "hc_mult": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "layer_types": [
            SLIDING,
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    },
    "doge": {"keep_window_size": 6, "sliding_window": 12},
    "dots1": {"max_window_layers": LAYERS // 2},
    "falcon_h1": {
        "mamba_d_ssm": 2 * HIDDEN,
        "key_multiplier": 1.3,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 1.1,
    },
    "gemma2": {"attn_logit_softcapping": SOFT_CAP},
    "gemma3": {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    "gemma3n": {
        "text_config": {"num_kv_shared_layers": 2},
        "audio_config": {
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 4,
            "vocab_size": 8,
            "vocab_offset": VOCAB,
            "sscp_conv_channel_size": [8, 4],
        },
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4": {"text_config": _GEMMA4_TEXT},
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified": {"text_config": _GEMMA4_TEXT},
    "gemma4_unified_text": _GEMMA4_TEXT,
    "glm4_moe": {"use_qk_norm": True},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gptj": {"rotary_dim": 8},
    "granite": _GRANITE,
    "granite_swa": _GRANITE | {"layer_rope_theta": [0.0, 10000.0, 10000.0, 0.0]},
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE | {"layer_rope_theta": [0.0, 10000.0, 10000.0, 0.0]},
    "granitemoehybrid": _GRANITE | {"layer_types": LINEAR_GLOBAL, "position_embedding_type": "rope"},
    "granitemoeshared": _GRANITE,
    "hrm_text": {
        "num_layers_per_stack": 1,
        "H_cycles": 2,
        "L_cycles": 2,
        "num_hidden_layers": 6,
        "embedding_scale": 2.0,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "inkling_text": {
        "rel_extent": 12,
        "d_rel": 4,
        "log_scaling_n_floor": 4,
        "logits_mup_width_multiplier": 2.0,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": LOCAL_GLOBAL, "num_attention_heads_per_layer": [4, 2, 4, 2]},
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "llama4": {"text_config": _LLAMA4_TEXT},
    "llama4_text": _LLAMA4_TEXT,
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mellum": {"layer_types": LOCAL_GLOBAL},
    "mimo_v2_flash": {"head_dim": 24},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "rotary_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "ministral": {"layer_types": LOCAL_GLOBAL},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "nemotron_h": {"n_groups": 2},
    "olmo": {"clip_qkv": 1.5},
    "olmoe": {"clip_qkv": 1.5},
    "phi": {"qk_layernorm": True},
    "prophetnet": {"num_buckets": 8, "relative_max_distance": 16},
    "qwen2": {"sliding_window": ...},
    "qwen2_moe": _UPPER_HALF_WINDOWED,
    "qwen3": _UPPER_HALF_WINDOWED,
    "qwen3_moe": {"use_sliding_window": True},
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "qwen4_exp_text": _QWEN4_TEXT,
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [HIDDEN // 2, HIDDEN // 2],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "smollm3": {"use_sliding_window": True},
    "stablelm": {"qk_layernorm": True},
    "vaultgemma": {"attn_logit_softcapping": SOFT_CAP},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_head_dim": 32,
        "attention_hidden_size": 2 * HIDDEN,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "num_mem_blocks": 1,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "router_hidden_size": 16,
    },
}
