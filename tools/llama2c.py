"""A llama2.c checkpoint as a Hugging Face folder.

The file holds the checkpoint (Karpathy's llama2.c, version 0: seven sizes, then float32 weights) and behind it the
tokenizer (pieces with scores). Queries and keys are interleaved there and half-split in Hugging Face's Llama.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from wherewhat.imports import quiet


def convert(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer in ``source`` to ``folder``."""
    data = source.read_bytes()
    model, end = load(data)
    with quiet():
        model.save_pretrained(folder)
    read_tokenizer(data[end:], model.config.vocab_size).save_pretrained(folder)


def load(data: bytes) -> tuple[LlamaForCausalLM, int]:
    """The model, and where its checkpoint ends."""
    width, inner, layers, heads, kv_heads, vocabulary, positions = struct.unpack_from("7i", data)
    shared = vocabulary > 0
    vocabulary = abs(vocabulary)
    place = 28

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = int(np.prod(shape))
        values = np.frombuffer(data, "<f4", count, place).reshape(shape)
        place += 4 * count
        return torch.from_numpy(values.copy())

    d = width // heads
    weights = {"model.embed_tokens.weight": take(vocabulary, width)}
    named = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (kv_heads * d, width)),
        ("self_attn.v_proj", (kv_heads * d, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (inner, width)),
        ("mlp.down_proj", (width, inner)),
        ("mlp.up_proj", (inner, width)),
    )
    for name, shape in named:
        for layer, values in enumerate(take(layers, *shape)):
            half_split = name.endswith(("q_proj", "k_proj"))
            weights[f"model.layers.{layer}.{name}.weight"] = _half_split(values, d) if half_split else values
    weights["model.norm.weight"] = take(width)
    take(2, positions, d // 2)  # tables of cosines and sines
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if shared else take(vocabulary, width)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=shared,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model, place


def _half_split(rows: Tensor, d: int) -> Tensor:
    """Rows of a projection to heads of interleaved planes, as heads of half-split ones."""
    return rows.view(-1, d // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def read_tokenizer(data: bytes, vocabulary: int) -> PreTrainedTokenizerFast:
    """The tokenizer: pieces that are merged in the order of their scores."""
    pieces, place = [], 4  # first comes the length of the longest piece
    for _ in range(vocabulary):
        score, length = struct.unpack_from("<fi", data, place)
        pieces.append((data[place + 8 : place + 8 + length].decode("utf-8", "replace"), score))
        place += 8 + length
    # The file spells the word boundary as a space, and special and byte tokens plainly.
    names = [f"<0x{i - 3:02X}>" if 3 <= i < 259 else p.replace(" ", "\u2581") for i, (p, _) in enumerate(pieces)]
    names[:3] = ["<unk>", "<s>", "</s>"]
    ids: dict[str, int] = {}
    for index, name in enumerate(names):
        ids.setdefault(name, index)
    merges = []
    for index in sorted(range(259, vocabulary), key=lambda i: -pieces[i][1]):
        name = names[index]
        merges += [(name[:cut], name[cut:]) for cut in range(1, len(name)) if name[:cut] in ids and name[cut:] in ids]
    rules = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rules.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    rules.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
