"""Model folders, GGUF and safetensors files with changes."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutations

_CONFIG_KEYS = [
    "text_config", "return_dict", "transformers_weights", "pad_token_id", "quantization_config", "head_dim",
    "rope_scaling", "rope_parameters", "auto_map", "architectures", "dtype", "torch_dtype", "layer_types",
    "sliding_window", "attn_implementation", "use_cache", "_attn_implementation", "output_attentions", "is_decoder",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size", "intermediate_size",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "is_encoder_decoder",
    "chunk_size_feed_forward", "id2label", "pruned_heads", "model_type", "name_or_path", "bos_token_id", "eos_token_id",
    "attention_bias", "attention_dropout", "initializer_range", "tp_plan", "base_model_tp_plan", "torchscript",
    "mlp_bias", "problem_type", "num_labels",
]  # fmt: skip
_TOKENIZER_KEYS = [
    "tokenizer_class", "auto_map", "model_max_length", "added_tokens_decoder", "chat_template", "backend", "bos_token",
    "extra_special_tokens", "special_tokens_map", "unk_token", "add_bos_token", "padding_side", "tokenizer_file",
    "vocab_file", "name_or_path", "clean_up_tokenization_spaces", "truncation_side", "additional_special_tokens",
    "model_input_names",
]  # fmt: skip
_CLASSES = [
    "BertModel", "LlamaModel", "PreTrainedTokenizer", "CLIPTokenizer", "LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer",
    "os", "AutoTokenizer", "PreTrainedTokenizerBase", "TokenizersBackend", "BertTokenizer", "Trainer", "pipeline",
    "WhisperTokenizer", "ByT5Tokenizer", "CanineTokenizer", "XLNetTokenizer", "LlamaConfig", "MistralCommonTokenizer",
    "PreTrainedTokenizerFast",
]  # fmt: skip
_OTHER_FILES = [
    "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "config.py",
    "chat_template.jinja", "preprocessor_config.json", "tokenizer.model", "adapter_config.json", "spiece.model",
    "pytorch_model.bin", "model.safetensors.index.json", "chat_template.json", "vocab.txt", "processor_config.json",
]  # fmt: skip
_SHARDS: list[Any] = [
    "/etc/passwd", "../tiny/model.safetensors", "x" * 300, "", ".", "pytorch_model.bin", "fifo", 5, None, [], {}, True,
    "a\0b", "\x1b[31m", "model.safetensors/x", "~nosuchuser/x", "config.json",
]  # fmt: skip
_SLICE = [{"Sequence": {"id": "A", "type_id": 0}}]
_PADDING = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
_TEN_THOUSAND = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10_000}
NATIVE: list[dict[str, Any]] = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w" + "A" * 90}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    {"normalizer": {"type": "Sequence", "normalizers": [_TEN_THOUSAND] * 3}},
    {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000_000}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(t|th|h|e)*$"}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True}},
    {"model": {"type": "BPE", "vocab": {"t": 0, "h": 1}, "merges": [["t", "h"]], "continuing_subword_prefix": "x" * 9}},
    {"model": {"type": "Unigram", "unk_id": None, "vocab": []}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", 1e308]]}},
    {"model": {"type": "WordLevel", "vocab": {"<unk>": 2**32 - 1, "the": 2**32 - 2}, "unk_token": "<unk>"}},
    {"post_processor": {"type": "TemplateProcessing", "single": _SLICE * 300_000, "pair": [], "special_tokens": {}}},
    {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}},
    {"post_processor": {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 99]}},
    {"padding": {"strategy": {"Fixed": 2**50}, **_PADDING}},
    {"padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 2**40, **_PADDING}},
    {"truncation": {"max_length": 1, "stride": 5, "strategy": "LongestFirst", "direction": "Right"}},
]
"""Parts of ``tokenizer.json`` that native code cannot cope with: it panics, aborts or does not end."""


@functools.cache
def model_types() -> list[str]:
    """All model types of transformers."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING)


def change_folder(random: Random, materials: Path, take: Callable[..., None]) -> tuple[str, list[str]]:
    """Change a folder of a model or adapter; return its name and the changes in words."""
    folder = random.choice(["tiny", "tiny", "tiny", "gpt2", "sharded", "adapter"])
    if folder != "tiny":
        take(materials, folder)
    place = Path(folder)
    notes = []
    for _ in range(random.choice([1, 1, 1, 2])):
        kind = random.random()
        if folder == "sharded" and kind < 0.6:
            notes.append(_change_index(place / "model.safetensors.index.json", random))
        elif folder == "adapter" and kind < 0.7:
            notes += mutations.change_json(place / "adapter_config.json", random)
        elif kind < 0.45 and folder != "adapter":
            notes.append(_set_keys(place / "config.json", _CONFIG_KEYS, random))
        elif kind < 0.6 and (place / "tokenizer.json").is_file():
            notes.append(_change_tokenizer(place / "tokenizer.json", random))
        elif kind < 0.75 and (place / "tokenizer_config.json").is_file():
            notes.append(_set_keys(place / "tokenizer_config.json", _TOKENIZER_KEYS, random))
        elif kind < 0.82:
            notes.append(_add_file(place / random.choice(_OTHER_FILES), random))
            break  # which may no longer be JSON
        else:
            files = sorted(path for path in place.iterdir() if path.is_file() and not path.is_symlink())
            notes.append(mutations.change_file(random.choice(files), random))
            break
    return folder, notes


def _set_keys(path: Path, keys: list[str], random: Random) -> str:
    """Set one key of a JSON file, or change it anywhere."""
    tree = json.loads(path.read_text())
    if not isinstance(tree, dict) or random.random() < 0.3:
        return mutations.change_json(path, random)[0]
    key = random.choice(keys)
    special = {"model_type": model_types(), "tokenizer_class": _CLASSES}
    new = (
        random.choice(special[key])
        if key in special and random.random() < 0.8
        else mutations.value(random, tree.get(key))
    )
    tree[key] = new
    path.write_text(json.dumps(tree))
    return f"{path}: {key} = {repr(new)[:80]}"


def _change_tokenizer(path: Path, random: Random) -> str:
    if random.random() < 0.6:
        return mutations.change_json(path, random)[0]
    part = random.choice(NATIVE)
    if random.random() < 0.5:
        part, _ = mutations.changed(part, random)
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | part if isinstance(tree, dict) and isinstance(part, dict) else part))
    return f"{path}: {repr(part)[:200]}"


def _change_index(path: Path, random: Random) -> str:
    tree = json.loads(path.read_text())
    if random.random() < 0.3:
        return mutations.change_json(path, random)[0]
    entries = tree["weight_map"]
    name, new = random.choice(sorted(entries)), random.choice(_SHARDS)
    for key in list(entries) if random.random() < 0.3 else [name]:
        entries[key] = new
    path.write_text(json.dumps(tree))
    return f"{path}: {name} in {repr(new)[:80]}"


def _add_file(path: Path, random: Random) -> str:
    text = random.choice([json.dumps(mutations.value(random)), "[" * mutations.DEEP, "", "\0", "{{ x", '{"x": 1}'])
    path.write_text(text)
    return f"{path}: {mutations.change_file(path, random) if random.random() < 0.2 else repr(text)[:80]}"


# safetensors


def change_safetensors(files: list[Path], random: Random) -> list[str]:
    """Change the header or the values of one of some weight files."""
    path = random.choice(files)
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = data[8 : 8 + size], data[8 + size :]
    kind = random.random()
    if kind < 0.5:
        tree, note = mutations.changed(json.loads(header), random)
        text = json.dumps(tree).encode()
    elif kind < 0.6:
        deep = b"[" * mutations.DEEP + b"]" * mutations.DEEP
        text, note = (
            random.choice([deep, b'{"__metadata__":' + deep + b"}", b"{" * 100, b"null", b"[]", b"{}"]),
            "another header",
        )
    elif kind < 0.75:
        text, note = mutations.change_bytes(header, random)
    elif kind < 0.85:
        length = random.choice([0, 1, 2**31, 2**62, 2**64 - 1, len(data), len(data) - 8, 100_000_001])
        path.write_bytes(struct.pack("<Q", length) + header + body)
        return [f"{path}: length of the header is {length}"]
    else:
        pattern = random.choice(
            [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\xff\xff\x7f\x7f", b"\1\0\0\0"]
        )
        path.write_bytes(data[: 8 + size] + pattern * (len(body) // 4))
        return [f"{path}: all values are {pattern!r}"]
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return [f"{path}: {note}"]


# GGUF

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass
class Field:
    """Place of a key and its value in a GGUF file."""

    name: str
    start: int
    kind: int
    value: int
    end: int


def gguf_fields(data: bytes) -> list[Field]:
    """Return the keys of a valid GGUF file."""
    count = struct.unpack_from("<Q", data, 16)[0]
    at, found = 24, []
    for _ in range(count):
        start = at
        length = struct.unpack_from("<Q", data, at)[0]
        name = data[at + 8 : at + 8 + length].decode()
        at += 8 + length
        kind = struct.unpack_from("<I", data, at)[0]
        end = _after(data, at + 4, kind)
        found.append(Field(name, start, kind, at + 4, end))
        at = end
    return found


def _after(data: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind == _ARRAY:
        inner, length = struct.unpack_from("<IQ", data, at)
        at += 12
        for _ in range(length):
            at = _after(data, at, inner)
        return at
    return at + _SIZES[kind]


def change_gguf(path: Path, random: Random) -> list[str]:
    """Change a key, a count or a tensor of a GGUF file, or its bytes."""
    data = path.read_bytes()
    fields = gguf_fields(data)
    chosen = random.choice(fields)
    kind = random.random()
    if kind < 0.35:
        note, data = with_value(data, chosen, random)
    elif kind < 0.45:
        new = random.randrange(15)
        data = data[: chosen.value - 4] + struct.pack("<I", new) + data[chosen.value :]
        note = f"{chosen.name} has type {new}"
    elif kind < 0.55:
        levels = random.choice([3, 500, mutations.DEEP])
        nested = struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * levels + struct.pack("<IQ", 0, 0)
        data = data[: chosen.value - 4] + nested + data[chosen.end :]
        note = f"{chosen.name} is nested {levels} times"
    elif kind < 0.65:
        at, name = random.choice([(4, "version"), (8, "number of tensors"), (16, "number of keys")])
        new = random.choice([0, 1, 2**31, 10**9, 2**63 - 1, 2**64 - 1])
        size = 4 if at == 4 else 8
        data = data[:at] + (new % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
        note = f"{name} is {new}"
    elif kind < 0.75:
        data = data[:16] + struct.pack("<Q", len(fields) - 1) + data[24 : chosen.start] + data[chosen.end :]
        note = f"{chosen.name} removed"
    elif kind < 0.9:
        end = fields[-1].end
        tensors, note = mutations.change_bytes(data[end : end + 900], random)
        data, note = data[:end] + tensors + data[end + 900 :], f"list of tensors: {note}"
    else:
        data, note = mutations.change_bytes(data, random)
    path.write_bytes(data)
    return [f"{path}: {note}"]


def with_value(data: bytes, chosen: Field, random: Random, new: int | None = None) -> tuple[str, bytes]:
    """Return what was changed, and the file with another number, length or text for a key."""
    at = chosen.value
    if chosen.kind == _STRING and new is None and random.random() < 0.6:
        text = random.choice(mutations.WORDS).encode("utf-8", "surrogatepass")
        return f"{chosen.name} is {text[:40]!r}", data[:at] + struct.pack("<Q", len(text)) + text + data[chosen.end :]
    size = 8 if chosen.kind in (_STRING, _ARRAY) else _SIZES[chosen.kind]
    at += 4 * (chosen.kind == _ARRAY)
    number = random.choice([0, 1, 3, 10**6, 10**9, 2**31, 2**32 - 1, 2**62, 2**64 - 1]) if new is None else new
    changed = data[:at] + (number % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]
    return f"number in {chosen.name} is {number}", changed
