"""A laboratory model's weights as Hugging Face's GPT-J, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from wherewhat.errors import ConfigError, LoadError
from wherewhat.lab.config import LabConfig
from wherewhat.lab.encodings import find_rotation
from wherewhat.lab.hugging_face.families import WRITTEN_BY_HAND
from wherewhat.lab.model import LabModel

if TYPE_CHECKING:
    from transformers import GPTJForCausalLM


_BASE = 10_000.0
"""GPT-J's base cannot be chosen there."""

_FIXED = (*WRITTEN_BY_HAND, "block", "biases")
"""Options that GPT-J has not."""

_WHOLE = {
    "embedding": "transformer.wte.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
    "head.bias": "lm_head.bias",
}
_LAYER = {
    "norm.weight": "ln_1.weight",
    "norm.bias": "ln_1.bias",
    "out.weight": "attn.out_proj.weight",
    "mlp_in.weight": "mlp.fc_in.weight",
    "mlp_in.bias": "mlp.fc_in.bias",
    "mlp_out.weight": "mlp.fc_out.weight",
    "mlp_out.bias": "mlp.fc_out.bias",
}
_QKV = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")


def to_hugging_face(model: LabModel) -> GPTJForCausalLM:
    """The same model as a ``GPTJForCausalLM`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import GPTJForCausalLM

    theirs = GPTJForCausalLM(hugging_face_config(model.config))
    theirs = theirs.to(device=model.embedding.device, dtype=model.embedding.dtype).eval()
    weights = model.state_dict()
    for ours, name in _names(model.config.layers).items():
        weights[name] = weights.pop(ours)
    for layer in range(model.config.layers):
        parts = weights.pop(f"blocks.{layer}.qkv.weight").split(model.config.width)
        weights.update({f"transformer.h.{layer}.{name}": part for name, part in zip(_QKV, parts, strict=True)})
    theirs.load_state_dict(weights)
    return theirs


def from_hugging_face(theirs: GPTJForCausalLM) -> LabModel:
    """The same model as a :class:`LabModel`, on the same device and in the same dtype."""
    config = theirs.config
    if getattr(config, "model_type", None) != "gptj":
        raise LoadError(f"a {type(theirs).__name__} is no GPT-J: give a GPTJForCausalLM")
    wide = 4 * config.n_embd
    inner = wide if config.n_inner is None else config.n_inner
    if inner != wide or config.activation_function != "gelu_new" or config.layer_norm_epsilon != 1e-5:
        raise LoadError(
            f"a GPT-J with n_inner={inner}, activation_function={config.activation_function} and layer_norm_epsilon="
            f"{config.layer_norm_epsilon} is no laboratory model: those have {wide}, gelu_new and 1e-05"
        )
    d = config.n_embd // config.n_head
    if config.rotary_dim is None or not 0 < config.rotary_dim <= d:
        raise LoadError(f"a GPT-J with rotary_dim={config.rotary_dim} for heads of {d} dimensions cannot be used")
    whole = config.rotary_dim == d
    ours = LabModel(
        LabConfig(
            vocabulary=config.vocab_size,
            layers=config.n_layer,
            heads=config.n_head,
            width=config.n_embd,
            encoding="rope" if whole else "partial",
            rotary_share=None if whole else config.rotary_dim / d,
            positions=config.n_positions,
            dropout=float(config.resid_pdrop),
        )
    ).to(device=theirs.device, dtype=theirs.dtype)
    source = theirs.state_dict()
    weights = {name: source[their_name] for name, their_name in _names(config.n_layer).items()}
    for layer in range(config.n_layer):
        weights[f"blocks.{layer}.qkv.weight"] = torch.cat([source[f"transformer.h.{layer}.{name}"] for name in _QKV])
    ours.load_state_dict(weights)
    return ours


def hugging_face_config(config: LabConfig) -> Any:
    """The ``GPTJConfig`` of a model."""
    from transformers import GPTJConfig

    plain = LabConfig()
    odd = [name for name in _FIXED if getattr(config, name) != getattr(plain, name)]
    if config.encoding not in ("rope", "partial"):
        odd.append("encoding")
    if config.base != _BASE:
        odd.append("base")
    if odd:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        raise ConfigError(f"Hugging Face's GPT-J has no {values}: it has rope and partial at base 10000, and no more")
    rotation = find_rotation(config)
    assert rotation is not None
    return GPTJConfig(
        vocab_size=config.vocabulary,
        n_positions=config.positions,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        rotary_dim=2 * rotation.planes,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def _names(layers: int) -> dict[str, str]:
    """Hugging Face's name of every weight but queries', keys' and values', by ours."""
    of_layers = {
        f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{theirs}"
        for layer in range(layers)
        for ours, theirs in _LAYER.items()
    }
    return {**_WHOLE, **of_layers}
