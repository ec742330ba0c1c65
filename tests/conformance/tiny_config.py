"""A tiny configuration of any model type, found by asking its configuration class which fields it has."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
HIDDEN = HEADS * HEAD_DIM
VOCAB = 160
POSITIONS = 128
WINDOW = 8

_SIZES_BY_VALUE: tuple[tuple[Any, str], ...] = (
    (VOCAB, "vocab_size audio_vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    (VOCAB, "pronunciation_vocab_size shape_vocab_size"),
    (HIDDEN, "hidden_size n_embd d_model emb_dim embedding_size embedding_dim word_embed_proj_dim lru_width"),
    (HIDDEN, "attention_hidden_size pronunciation_embed_dim shape_embed_dim backbone_hidden_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks"),
    (1, "encoder_layers num_encoder_layers depth n_group topk_group num_mtp_layers num_nextn_predict_layers"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads"),
    (HEADS, "encoder_attention_heads decoder_attention_heads"),
    (HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    (HEADS, "linear_num_value_heads linear_num_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads index_n_heads linear_num_key_heads"),
    (HEAD_DIM, "head_dim kv_channels d_head dim_head attention_head_size swa_head_dim index_head_dim"),
    (HEAD_DIM, "linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
    (HEAD_DIM, "kv_lora_rank qk_nope_head_dim v_head_dim o_lora_rank"),
    (HEAD_DIM, "laurel_rank hidden_size_per_layer_input"),
    (8, "qk_rope_head_dim mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads"),
    (8, "time_step_rank mamba_dt_rank mamba_chunk_size chunk_size index_topk"),
    (24, "q_lora_rank query_pre_attn_scalar"),
    (96, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_inner dff dim_ff n_inner"),
    (96, "ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size"),
    (48, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (48, "shared_intermediate_size expert_ffn_hidden_size prefix_dense_intermediate_size"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    (POSITIONS, "max_target_positions max_source_positions"),
    (WINDOW, "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    (True, "is_decoder"),
    (False, "add_cross_attention is_encoder_decoder"),
)
SIZES: dict[str, Any] = {name: value for value, names in _SIZES_BY_VALUE for name in names.split()}


def tiny_config(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """A tiny configuration: generic sizes for the fields the class has, then what the table says.

    Args:
        config_class: The configuration class of the type.
        overrides: Values that win over the generic ones. A dict under the name of a sub-configuration
            overrides that one's fields; a value of ``...`` leaves a field at the type's own default.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {name: value for name, value in SIZES.items() if name in fields}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        values["num_key_value_heads"] = HEADS
    own = dict(overrides)
    for name, sub_class in sub_config_classes(config_class).items():
        values[name] = tiny_config(sub_class, own.pop(name, {}))
    values |= own
    if "layer_types" in fields and "layer_types" not in own:
        kinds = default_layer_kinds(config_class)
        if len(kinds) > 1:
            layers = values.get("num_hidden_layers", LAYERS)
            values["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return config_class(**{name: value for name, value in values.items() if value is not ...})


def default_layer_kinds(config_class: type[PreTrainedConfig]) -> list[str]:
    """The different kinds of layer a type's own default has, in order of first appearance."""
    return list(dict.fromkeys(getattr(config_class(), "layer_types", None) or []))


def sub_config_classes(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Classes of the sub-configurations a type's own default has."""
    names = getattr(config_class, "sub_configs", {})
    if not names:
        return {}
    bare = config_class()
    subs = {name: getattr(bare, name, None) for name in names}
    return {name: type(sub) for name, sub in subs.items() if isinstance(sub, PreTrainedConfig)}
