"""Tiny models, tokenizers and GGUF files, built in code."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "."]


def save_tokenizer(folder: Path, *, bos: bool = False, eos: bool = False) -> None:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    rules = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos or eos:
        template = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
        rules.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    PreTrainedTokenizerFast(
        tokenizer_object=rules, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def llama_config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaConfig(**{**settings, **changes})


def save_model(folder: Path, config=None, *, bos: bool = False, eos: bool = False, seed: int = 7, **save) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or llama_config())
        model.save_pretrained(folder, **save)
    save_tokenizer(folder, bos=bos, eos=eos)
    return folder


def save_speller(folder: Path, *, seed: int = 7) -> Path:
    """A tiny Llama with 512 positions and a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = llama_config(vocab_size=256, intermediate_size=32, max_position_embeddings=512)
    save_model(folder, config, seed=seed)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_gguf(
    path: Path,
    *,
    tokenizer: str = "gpt2",
    add_bos: bool | None = None,
    pre: str | None = None,
    extra=None,
    drop=(),
) -> dict[str, np.ndarray]:
    """A llama GGUF of two layers in llama.cpp's own row order; returns its float32 tensors."""
    gguf = pytest.importorskip("gguf")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    special = ["<unk>", "<s>", "</s>"]
    if tokenizer == "gpt2":
        tokens = [*special, *bytes_to_unicode().values(), "th", "he"]
    else:
        tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehnorst."]
    width, feed, heads, kv_heads, head = 32, 64, 4, 2, 8
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(tokenizer)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    if tokenizer == "gpt2":
        writer.add_token_merges(["t h", "h e"])
    else:
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if extra is not None:
        extra(writer)

    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(tokens), width), "output_norm.weight": (width,)}
    for layer in range(2):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (width,),
            block + "attn_q.weight": (heads * head, width),
            block + "attn_k.weight": (kv_heads * head, width),
            block + "attn_v.weight": (kv_heads * head, width),
            block + "attn_output.weight": (width, heads * head),
            block + "ffn_norm.weight": (width,),
            block + "ffn_gate.weight": (feed, width),
            block + "ffn_up.weight": (feed, width),
            block + "ffn_down.weight": (width, feed),
        }
    tensors = {}
    for name, shape in shapes.items():
        if name in drop:
            continue
        values = random.standard_normal(shape).astype(np.float32) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        if "ffn" in name and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            tensors[name] = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(name, values)
            tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def on_disk(folder, tmp_path):
    """The model with its first layer in memory and the others on disk, fetched by accelerate when they are run."""
    from wherewhat.runs.subject import load

    plain = load(folder, device="cpu")
    names = [name for name, _ in plain.model.named_modules() if name.count(".") == 2 and name.split(".")[-1].isdigit()]
    places = {name: "cpu" if index == 0 else "disk" for index, name in enumerate(names)}
    places |= {"model.embed_tokens": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=str(tmp_path / "offload"), use_safetensors=True
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    return plain, replace(plain, model=model.eval())


def sharp_llama(vocabulary: int) -> LlamaForCausalLM:
    """A tiny Llama of two layers whose attention depends on its queries and keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 10
    return model
