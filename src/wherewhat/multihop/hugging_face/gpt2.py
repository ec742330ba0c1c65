"""A laboratory model as Hugging Face's GPT-2: learned positions, or none, which are learned ones of zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wherewhat.multihop.hugging_face.common import Family, fill
from wherewhat.multihop.model import LabModel

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

_TURNED = {
    "qkv.weight": "attn.c_attn.weight",
    "out.weight": "attn.c_proj.weight",
    "mlp_in.weight": "mlp.c_fc.weight",
    "mlp_out.weight": "mlp.c_proj.weight",
}
"""Matrices that GPT-2 keeps the other way round."""
_FAMILY = Family(
    name="GPT-2",
    encoding=("learned", "nope"),
    block=("sequential",),
    biases=("inner", "none"),
    whole={
        "embedding": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
    },
    layer={
        "norm.weight": "ln_1.weight",
        "norm.bias": "ln_1.bias",
        "mlp_norm.weight": "ln_2.weight",
        "mlp_norm.bias": "ln_2.bias",
        "mlp_in.bias": "mlp.c_fc.bias",
        "mlp_out.bias": "mlp.c_proj.bias",
        **_TURNED,
    },
    prefix="transformer.h.{}",
)


def to_gpt2(model: LabModel) -> GPT2LMHeadModel:
    """The same model as a ``GPT2LMHeadModel`` in evaluation mode, on the same device and in the same dtype.

    Raises:
        ConfigError: If GPT-2 has no such model.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    theirs = GPT2Config(
        **_FAMILY.options(config),
        n_positions=config.positions,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        activation_function="gelu",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
    )
    weights = _FAMILY.renamed(model)
    for layer in range(config.layers):
        for name in _TURNED.values():
            key = f"{_FAMILY.prefix.format(layer)}.{name}"
            weights[key] = weights[key].T
    weights.setdefault("transformer.wpe.weight", torch.zeros(config.positions, config.width))
    return fill(GPT2LMHeadModel(theirs), weights, model)
