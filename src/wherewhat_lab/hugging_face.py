"""Convert a small model to Hugging Face's GPT-J, GPT-2, Llama, MPT and GPT-NeoX and save it, or convert from GPT-J."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, LoadError
from wherewhat.files import atomic_folder, make_folder
from wherewhat.imports import quiet
from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import find_rotation
from wherewhat_lab.language import VOCABULARY
from wherewhat_lab.model import LabModel

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, GPTJForCausalLM, GPTNeoXForCausalLM, LlamaForCausalLM, MptForCausalLM


_UNSUPPORTED = ("frequencies", "norm", "mlp", "residual", "scale", "angles")
"""Options that no Hugging Face architecture has."""

_Theirs = TypeVar("_Theirs")


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture: the options that it supports, and the names of its weights.

    Attributes:
        name: Its name in messages.
        encoding: Supported encodings.
        block: Supported blocks.
        biases: Supported biases.
        whole: Its names of the modules outside layers, by the names in :class:`LabModel`.
        layer: The same within layers.
        prefix: Prefix of the names of a layer's weights, with ``{}`` for the layer's index.
        base: RoPE's base, if the architecture has a fixed one.
    """

    name: str
    encoding: tuple[str, ...]
    block: tuple[str, ...]
    biases: tuple[str, ...]
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str
    base: float | None = None

    def options(self, config: LabConfig) -> dict[str, Any]:
        """Check that the architecture supports a model, and return the options that all architectures share."""
        plain = LabConfig()
        allowed = {name: getattr(self, name) for name in ("encoding", "block", "biases")}
        if self.base is not None:
            allowed["base"] = (self.base,)
        odd = [name for name in _UNSUPPORTED if getattr(config, name) != getattr(plain, name)]
        odd += [name for name, values in allowed.items() if getattr(config, name) not in values]
        if odd:
            values = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
            possible = ", ".join(f"{name}={' or '.join(map(str, values))}" for name, values in allowed.items())
            raise ConfigError(f"Hugging Face's {self.name} has no {values}: it has {possible}")
        return {
            "vocab_size": config.vocabulary,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_cache": False,
        }

    def renamed(self, model: LabModel) -> dict[str, Tensor]:
        """Return the model's weights under the names of this architecture."""
        weights = model.state_dict()
        return {theirs: weights[ours] for ours, theirs in self.names(model.config.layers).items() if ours in weights}

    def names(self, layers: int) -> dict[str, str]:
        """Return this architecture's names of all weights and biases that may exist, by those of :class:`LabModel`."""
        modules = dict(self.whole)
        for index in range(layers):
            prefix = self.prefix.format(index)
            modules.update({f"blocks.{index}.{ours}": f"{prefix}.{theirs}" for ours, theirs in self.layer.items()})
        names = {}
        for ours, theirs in modules.items():
            if ours in ("embedding", "positions"):  # parameters of the model itself
                names[ours] = f"{theirs}.weight"
            else:
                names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
        return names


def fill(theirs: _Theirs, weights: Mapping[str, Tensor], model: LabModel) -> _Theirs:
    """Return a Hugging Face model with these weights, and zeros for further biases, in evaluation mode."""
    module: Any = theirs
    module.to(device=model.embedding.device, dtype=model.embedding.dtype).eval()
    missing = {name for name in module.state_dict() if name not in weights}
    zeros = {name: torch.zeros_like(module.state_dict()[name]) for name in missing if name.endswith(".bias")}
    module.load_state_dict({**weights, **zeros})
    return theirs


def split_qkv(model: LabModel, layer: int, planes: int = 0) -> list[Tensor]:
    """Return the projections of queries, keys and values, each ``(heads, d, width)``.

    Args:
        model: The model.
        layer: Index of the layer.
        planes: Number of rotated planes whose dimensions are reordered from interleaved to halves.
    """
    config = model.config
    weight = model.state_dict()[f"blocks.{layer}.qkv.weight"].view(3, config.heads, config.head_width, config.width)
    turning = torch.arange(2 * planes).view(planes, 2).T.flatten()
    order = torch.cat([turning, torch.arange(2 * planes, config.head_width)]).to(weight.device)
    return [weight[0][:, order], weight[1][:, order], weight[2]]


def _gpt_options(config: LabConfig) -> dict[str, Any]:
    """Return the options that GPT-J and GPT-2 share."""
    return {
        "n_positions": config.positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }


def rope_parameters(config: LabConfig) -> dict[str, Any]:
    """Return Hugging Face's ``rope_parameters``, in which p-RoPE is called proportional."""
    rotation = find_rotation(config)
    assert rotation is not None
    turning = int(rotation.inv_freq.count_nonzero())
    kind = "proportional" if config.encoding == "p-rope" else "default"
    return {
        "rope_type": kind,
        "rope_theta": config.base,
        "partial_rotary_factor": 2 * turning / config.head_width,
    }


_GPTJ = Family(
    name="GPT-J",
    encoding=("rope", "partial"),
    block=("parallel",),
    biases=("all",),
    whole={
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer={
        "norm": "ln_1",
        "out": "attn.out_proj",
        "mlp_in": "mlp.fc_in",
        "mlp_out": "mlp.fc_out",
    },
    prefix="transformer.h.{}",
    base=10_000.0,
)


def to_gptj(model: LabModel) -> GPTJForCausalLM:
    """Return the model as a ``GPTJForCausalLM`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import GPTJForCausalLM

    weights = _GPTJ.renamed(model)
    for layer in range(model.config.layers):
        parts = model.state_dict()[f"blocks.{layer}.qkv.weight"].split(model.config.width)
        weights.update(zip(_gptj_projections(layer), parts, strict=True))
    return fill(GPTJForCausalLM(gptj_config(model.config)), weights, model)


def gptj_config(config: LabConfig) -> Any:
    """Return the ``GPTJConfig`` of a model."""
    from transformers import GPTJConfig

    options = _GPTJ.options(config)
    rotation = find_rotation(config)
    assert rotation is not None
    return GPTJConfig(**options, **_gpt_options(config), rotary_dim=2 * rotation.planes)


def from_gptj(theirs: GPTJForCausalLM) -> LabModel:
    """Return a ``GPTJForCausalLM`` as a :class:`LabModel`, on the same device and in the same dtype."""
    config = theirs.config
    if getattr(config, "model_type", None) != "gptj":
        raise LoadError(f"a {type(theirs).__name__} is not a GPT-J: give a GPTJForCausalLM")
    wide = 4 * config.n_embd
    inner = wide if config.n_inner is None else config.n_inner
    if inner != wide or config.activation_function != "gelu_new" or config.layer_norm_epsilon != 1e-5:
        raise LoadError(
            f"a GPT-J with n_inner={inner}, activation_function={config.activation_function} and layer_norm_epsilon="
            f"{config.layer_norm_epsilon} is not a laboratory model: those have {wide}, gelu_new and 1e-05"
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
    names = _GPTJ.names(config.n_layer)
    weights = {name: source[their_name] for name, their_name in names.items() if their_name in source}
    for layer in range(config.n_layer):
        weights[f"blocks.{layer}.qkv.weight"] = torch.cat([source[name] for name in _gptj_projections(layer)])
    ours.load_state_dict(weights)
    return ours


def _gptj_projections(layer: int) -> list[str]:
    return [f"{_GPTJ.prefix.format(layer)}.attn.{name}_proj.weight" for name in "qkv"]


_TRANSPOSED = {
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
"""Modules whose matrices GPT-2 stores transposed."""
_GPT2 = Family(
    name="GPT-2",
    encoding=("learned", "nope"),
    block=("sequential",),
    biases=("inner", "none"),
    whole={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer={
        "norm": "ln_1",
        "mlp_norm": "ln_2",
        **_TRANSPOSED,
    },
    prefix="transformer.h.{}",
)


def to_gpt2(model: LabModel) -> GPT2LMHeadModel:
    """Return the model as a ``GPT2LMHeadModel`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    theirs = GPT2Config(**_GPT2.options(config), **_gpt_options(config), activation_function="gelu")
    weights = _GPT2.renamed(model)
    for layer in range(config.layers):
        for name in _TRANSPOSED.values():
            key = f"{_GPT2.prefix.format(layer)}.{name}.weight"
            weights[key] = weights[key].T
    weights.setdefault("transformer.wpe.weight", torch.zeros(config.positions, config.width))
    return fill(GPT2LMHeadModel(theirs), weights, model)


_LLAMA = Family(
    name="Llama",
    encoding=("rope", "p-rope"),
    block=("llama",),
    biases=("inner", "none"),
    whole={
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
    },
    layer={
        "norm": "input_layernorm",
        "out": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp_in": "mlp.up_proj",
        "mlp_gate": "mlp.gate_proj",
        "mlp_out": "mlp.down_proj",
    },
    prefix="model.layers.{}",
)


def to_llama(model: LabModel) -> LlamaForCausalLM:
    """Return the model as a ``LlamaForCausalLM`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    theirs = LlamaConfig(
        **_LLAMA.options(config),
        hidden_size=config.width,
        intermediate_size=8 * config.width // 3,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.positions,
        rms_norm_eps=1e-6,
        rope_parameters=rope_parameters(config),
    )
    weights = _LLAMA.renamed(model)
    for layer in range(config.layers):
        for name, part in zip("qkv", split_qkv(model, layer, config.head_width // 2), strict=True):
            weights[f"{_LLAMA.prefix.format(layer)}.self_attn.{name}_proj.weight"] = part.flatten(0, 1)
    return fill(LlamaForCausalLM(theirs), weights, model)


_MPT = Family(
    name="MPT",
    encoding=("alibi",),
    block=("sequential",),
    biases=("none",),
    whole={
        "embedding": "transformer.wte",
        "norm": "transformer.norm_f",
        "head": "lm_head",
    },
    layer={
        "norm": "norm_1",
        "qkv": "attn.Wqkv",
        "out": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp_in": "ffn.up_proj",
        "mlp_out": "ffn.down_proj",
    },
    prefix="transformer.blocks.{}",
)


def to_mpt(model: LabModel) -> MptForCausalLM:
    """Return the model as a ``MptForCausalLM`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import MptConfig, MptForCausalLM

    config = model.config
    theirs = MptConfig(
        **_MPT.options(config),
        d_model=config.width,
        n_layers=config.layers,
        n_heads=config.heads,
        max_seq_len=config.positions,
        resid_pdrop=config.dropout,
        emb_pdrop=config.dropout,
        layer_norm_epsilon=1e-5,
    )
    return fill(MptForCausalLM(theirs), _MPT.renamed(model), model)


_NEOX = Family(
    name="GPT-NeoX",
    encoding=("rope", "p-rope", "partial"),
    block=("parallel", "sequential"),
    biases=("inner", "none"),
    whole={
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
    },
    layer={
        "norm": "input_layernorm",
        "out": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp_in": "mlp.dense_h_to_4h",
        "mlp_out": "mlp.dense_4h_to_h",
    },
    prefix="gpt_neox.layers.{}",
)


def to_neox(model: LabModel) -> GPTNeoXForCausalLM:
    """Return the model as a ``GPTNeoXForCausalLM`` in evaluation mode, on the same device and in the same dtype."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = model.config
    parallel = config.block == "parallel"
    options = _NEOX.options(config)
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
    head = "lm_head" if hasattr(empty, "lm_head") else "embed_out"  # depends on the version of transformers
    weights = {**_NEOX.renamed(model), f"{head}.weight": model.state_dict()["head.weight"]}
    for layer in range(config.layers):
        prefix = _NEOX.prefix.format(layer)
        parts = split_qkv(model, layer, rotation.planes)
        # GPT-NeoX stores queries, keys and values head by head.
        weights[f"{prefix}.attention.query_key_value.weight"] = torch.stack(parts, 1).flatten(0, 2)
        if parallel:  # GPT-NeoX has two norms of the same input
            for kind in ("weight", "bias"):
                if (own := weights.get(f"{prefix}.input_layernorm.{kind}")) is not None:
                    weights[f"{prefix}.post_attention_layernorm.{kind}"] = own
    return fill(empty, weights, model)


_BY_ENCODING = {
    **dict.fromkeys(("rope", "p-rope", "partial"), to_neox),
    "alibi": to_mpt,
    **dict.fromkeys(("learned", "nope"), to_gpt2),
}


def save_hugging_face(model: LabModel, folder: Path) -> None:
    """Save a model trained on text as a folder that ``wherewhat axes FOLDER`` and transformers can load.

    Args:
        model: The model, with the vocabulary of bytes.
        folder: The folder, which must not exist.
    """
    config = model.config
    if config.vocabulary != VOCABULARY:
        raise ConfigError(f"a vocabulary of {config.vocabulary} is not that of bytes: only models of text can be saved")
    export: Any = _BY_ENCODING.get(config.encoding)
    if config.block == "llama":
        export = to_llama
    elif config.biases == "all":
        export = to_gptj
    if export is None:
        raise ConfigError(f"no Hugging Face architecture has encoding={config.encoding!r}: choose another encoding")
    theirs = export(model)
    make_folder(folder.parent)
    with atomic_folder(folder) as temporary, quiet():
        theirs.save_pretrained(temporary)
        byte_tokenizer(config.positions).save_pretrained(temporary)


def byte_tokenizer(positions: int) -> Any:
    """Return a tokenizer whose ids are the bytes of the text in UTF-8.

    Args:
        positions: Largest number of tokens without a warning.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions)


def _letter(byte: int) -> str:
    """Return the character of a byte in byte-level vocabularies: its own if printable, another one if not."""
    unseen = [b for b in range(VOCABULARY) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(VOCABULARY + unseen.index(byte)) if byte in unseen else chr(byte)
