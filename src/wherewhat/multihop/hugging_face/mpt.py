"""A laboratory model as Hugging Face's MPT: ALiBi, and no biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherewhat.multihop.hugging_face.common import Family, fill
from wherewhat.multihop.model import LabModel

if TYPE_CHECKING:
    from transformers import MptForCausalLM

_FAMILY = Family(
    name="MPT",
    encoding=("alibi",),
    block=("sequential",),
    biases=("none",),
    whole={
        "embedding": "transformer.wte.weight",
        "norm.weight": "transformer.norm_f.weight",
        "head.weight": "lm_head.weight",
    },
    layer={
        "norm.weight": "norm_1.weight",
        "qkv.weight": "attn.Wqkv.weight",
        "out.weight": "attn.out_proj.weight",
        "mlp_norm.weight": "norm_2.weight",
        "mlp_in.weight": "ffn.up_proj.weight",
        "mlp_out.weight": "ffn.down_proj.weight",
    },
    prefix="transformer.blocks.{}",
)


def to_mpt(model: LabModel) -> MptForCausalLM:
    """The same model as a ``MptForCausalLM`` in evaluation mode, on the same device and in the same dtype.

    Raises:
        ConfigError: If MPT has no such model.
    """
    from transformers import MptConfig, MptForCausalLM

    config = model.config
    theirs = MptConfig(
        **_FAMILY.options(config),
        d_model=config.width,
        n_layers=config.layers,
        n_heads=config.heads,
        max_seq_len=config.positions,
        resid_pdrop=config.dropout,
        emb_pdrop=config.dropout,
        layer_norm_epsilon=1e-5,
    )
    return fill(MptForCausalLM(theirs), _FAMILY.renamed(model), model)
