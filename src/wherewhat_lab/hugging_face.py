"""Convert a small model to Hugging Face's GPT-J, GPT-2, Llama, MPT or GPT-NeoX, and save it as a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from wherewhat.errors import ConfigError
from wherewhat.files import atomic_folder, make_folder
from wherewhat.imports import quiet
from wherewhat_lab.config import LabConfig
from wherewhat_lab.encodings import find_rotation
from wherewhat_lab.language import VOCABULARY
from wherewhat_lab.model import LabModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FamilyName = Literal["gptj", "gpt2", "llama", "mpt", "gpt_neox"]

_UNSUPPORTED = ("frequencies", "norm", "mlp", "residual", "scale", "angles")
"""Options that no Hugging Face architecture has."""


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture: the options that it supports, and the names of its weights.

    Attributes:
        title: Its name in messages.
        model: Its class in transformers.
        supported: Supported values of the options that it restricts.
        options: Function that returns the arguments of its configuration.
        prefixes: What precedes the names of modules outside layers, and the index of a layer.
        halves: Whether the dimensions of a rotated plane are half of the rotated ones apart, instead of neighbours.
        by_head: Whether queries, keys and values of a head are adjacent in their common matrix.
        transposed: Whether the matrices of layers are stored transposed.
    """

    title: str
    model: str
    supported: Mapping[str, tuple[Any, ...]]
    options: Callable[[LabConfig], Mapping[str, Any]]
    prefixes: tuple[str, str]
    halves: bool = False
    by_head: bool = False
    transposed: bool = False

    def check(self, config: LabConfig) -> None:
        """Check that the architecture supports a model."""
        plain = LabConfig()
        odd = [name for name in _UNSUPPORTED if getattr(config, name) != getattr(plain, name)]
        odd += [name for name, values in self.supported.items() if getattr(config, name) not in values]
        if odd:
            values = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
            possible = ", ".join(f"{name}={' or '.join(map(str, values))}" for name, values in self.supported.items())
            raise ConfigError(f"Hugging Face's {self.title} has no {values}: it has {possible}")

    def weights(self, model: LabModel) -> dict[str, Tensor]:
        """Return the model's weights under the names of this architecture."""
        column = list(FAMILIES.values()).index(self)
        weights: dict[str, Tensor] = {}
        for name, value in model.state_dict().items():
            module, _, kind = name.rpartition(".") if "." in name else (name, "", "weight")
            block = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
            if module == "head":
                theirs = f"lm_head.{kind}"
            elif block is None:
                theirs = f"{self.prefixes[0]}.{_MODULES[module][column]}.{kind}"
            else:
                theirs = f"{self.prefixes[1]}.{block[1]}.{_MODULES[f'blocks.{block[2]}'][column]}.{kind}"
            if module.endswith("qkv"):
                weights |= self._projections(theirs, value, model.config)
            else:
                weights[theirs] = value.T if self.transposed and block and value.ndim == 2 else value
        return weights

    def _projections(self, name: str, weight: Tensor, config: LabConfig) -> dict[str, Tensor]:
        """Return the projections of queries, keys and values, of which ``weight`` ``(3 · width, width)`` is ours."""
        q, k, v = weight.view(3, config.heads, config.head_width, config.width)
        rotation = find_rotation(config)
        if self.halves and rotation is not None:
            turning = torch.arange(2 * rotation.planes).view(-1, 2).T.flatten()
            order = torch.cat([turning, torch.arange(len(turning), config.head_width)]).to(weight.device)
            q, k = q[:, order], k[:, order]
        if "{}" in name:
            return {name.format(kind): part.flatten(0, 1) for kind, part in zip("qkv", (q, k, v), strict=True)}
        joined = torch.stack([q, k, v], 1 if self.by_head else 0).flatten(0, 2)
        return {name: joined.T if self.transposed else joined}


def _gpt_options(config: LabConfig) -> dict[str, Any]:
    """Return the options that GPT-J and GPT-2 share."""
    return {
        "n_positions": config.positions,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }


def _gptj_options(config: LabConfig) -> dict[str, Any]:
    rotation = find_rotation(config)
    assert rotation is not None
    return {**_gpt_options(config), "rotary_dim": 2 * rotation.planes}


def _gpt2_options(config: LabConfig) -> dict[str, Any]:
    return {**_gpt_options(config), "activation_function": "gelu"}


def _rope_options(config: LabConfig) -> dict[str, Any]:
    """Return the options that Llama and GPT-NeoX share; p-RoPE is called proportional there."""
    rotation = find_rotation(config)
    assert rotation is not None
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.positions,
        "rope_parameters": {
            "rope_type": "proportional" if config.encoding == "p-rope" else "default",
            "rope_theta": config.base,
            "partial_rotary_factor": 2 * int(rotation.inv_freq.count_nonzero()) / config.head_width,
        },
    }


def _llama_options(config: LabConfig) -> dict[str, Any]:
    return {**_rope_options(config), "intermediate_size": 8 * config.width // 3, "rms_norm_eps": 1e-6}


def _neox_options(config: LabConfig) -> dict[str, Any]:
    parallel = config.block == "parallel"
    return {
        **_rope_options(config),
        "intermediate_size": 4 * config.width,
        "hidden_act": "gelu_new" if parallel else "gelu",
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": parallel,
        "attention_bias": False,
    }


def _mpt_options(config: LabConfig) -> dict[str, Any]:
    return {
        "d_model": config.width,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "max_seq_len": config.positions,
        "resid_pdrop": config.dropout,
        "emb_pdrop": config.dropout,
        "layer_norm_epsilon": 1e-5,
    }


FAMILIES: Mapping[FamilyName, Family] = {
    "gptj": Family(
        "GPT-J",
        "GPTJForCausalLM",
        {"encoding": ("rope", "partial"), "block": ("parallel",), "biases": ("all",), "base": (10_000.0,)},
        _gptj_options,
        ("transformer", "transformer.h"),
    ),
    "gpt2": Family(
        "GPT-2",
        "GPT2LMHeadModel",
        {"encoding": ("learned", "nope"), "block": ("sequential",), "biases": ("inner", "none")},
        _gpt2_options,
        ("transformer", "transformer.h"),
        transposed=True,
    ),
    "llama": Family(
        "Llama",
        "LlamaForCausalLM",
        {"encoding": ("rope", "p-rope"), "block": ("llama",), "biases": ("inner", "none")},
        _llama_options,
        ("model", "model.layers"),
        halves=True,
    ),
    "mpt": Family(
        "MPT",
        "MptForCausalLM",
        {"encoding": ("alibi",), "block": ("sequential",), "biases": ("none",)},
        _mpt_options,
        ("transformer", "transformer.blocks"),
    ),
    "gpt_neox": Family(
        "GPT-NeoX",
        "GPTNeoXForCausalLM",
        {"encoding": ("rope", "p-rope", "partial"), "block": ("parallel", "sequential"), "biases": ("inner", "none")},
        _neox_options,
        ("gpt_neox", "gpt_neox.layers"),
        halves=True,
        by_head=True,
    ),
}
"""The architectures by their model type in transformers."""

_MODULES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("wte", "wte", "embed_tokens", "wte", "embed_in"),
    "positions": ("", "wpe", "", "", ""),
    "norm": ("ln_f", "ln_f", "norm", "norm_f", "final_layer_norm"),
    "blocks.norm": ("ln_1", "ln_1", "input_layernorm", "norm_1", "input_layernorm"),
    "blocks.qkv": ("attn.{}_proj", "attn.c_attn", "self_attn.{}_proj", "attn.Wqkv", "attention.query_key_value"),
    "blocks.out": ("attn.out_proj", "attn.c_proj", "self_attn.o_proj", "attn.out_proj", "attention.dense"),
    "blocks.mlp_norm": ("", "ln_2", "post_attention_layernorm", "norm_2", "post_attention_layernorm"),
    "blocks.mlp_in": ("mlp.fc_in", "mlp.c_fc", "mlp.up_proj", "ffn.up_proj", "mlp.dense_h_to_4h"),
    "blocks.mlp_gate": ("", "", "mlp.gate_proj", "", ""),
    "blocks.mlp_out": ("mlp.fc_out", "mlp.c_proj", "mlp.down_proj", "ffn.down_proj", "mlp.dense_4h_to_h"),
}
"""Names of modules in each of :data:`FAMILIES` by those in :class:`LabModel`, without a layer's index.

``{}`` stands for q, k and v where these have one matrix each.
"""


def find_family(config: LabConfig) -> FamilyName:
    """Return the architecture that has a model's block, biases and encoding."""
    if config.block == "llama":
        return "llama"
    if config.biases == "all":
        return "gptj"
    for name in ("gpt_neox", "mpt", "gpt2"):
        if config.encoding in FAMILIES[name].supported["encoding"]:
            return name
    raise ConfigError(f"no Hugging Face architecture has encoding={config.encoding!r}: choose another encoding")


def to_hugging_face(model: LabModel, family: FamilyName | None = None) -> PreTrainedModel:
    """Return the model as one of transformers in evaluation mode, on the same device and in the same dtype.

    Args:
        model: The model.
        family: The architecture; by default the one that has the model's block, biases and encoding.
    """
    import transformers

    architecture = FAMILIES[family or find_family(model.config)]
    architecture.check(model.config)
    kind: Any = getattr(transformers, architecture.model)
    config = kind.config_class(
        vocab_size=model.config.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        **architecture.options(model.config),
    )
    theirs: PreTrainedModel = kind(config).to(device=model.embedding.device, dtype=model.embedding.dtype).eval()
    weights = architecture.weights(model)
    if "embed_out.weight" in theirs.state_dict():  # GPT-NeoX in earlier versions of transformers
        weights["embed_out.weight"] = weights.pop("lm_head.weight")
    for name, value in theirs.state_dict().items():
        # Parallel blocks of GPT-NeoX have two norms of the same input.
        same = name.replace("post_attention_layernorm", "input_layernorm")
        if name not in weights and same in weights:
            weights[name] = weights[same]
        elif name not in weights and name.endswith((".bias", ".wpe.weight")):
            weights[name] = torch.zeros_like(value)
    theirs.load_state_dict(weights)
    return theirs


def save_hugging_face(model: LabModel, folder: Path) -> None:
    """Save a model trained on text as a folder that ``wherewhat axes FOLDER`` and transformers can load.

    Args:
        model: The model, with the vocabulary of bytes.
        folder: The folder, which must not exist.
    """
    config = model.config
    if config.vocabulary != VOCABULARY:
        raise ConfigError(f"a vocabulary of {config.vocabulary} is not that of bytes: only models of text can be saved")
    theirs = to_hugging_face(model)
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
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=positions)
