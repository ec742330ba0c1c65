"""Inputs that broke a promise once, of every class; they are always run first."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz.cases import Case, finished_run, take
from fuzz.materials import PLAN
from fuzz.models import NATIVE, gguf_fields, with_value
from fuzz.mutations import DEEP

_SMALL = ["--text", "text.txt", "--tokens", "16", "--no-control", "--device", "cpu"]
_CHECK = ["check", "tiny", "--device", "cpu"]
_DEEP = "[" * DEEP + "]" * DEEP
Known = Callable[[Path], Case]


def _command(*words: str) -> Known:
    return lambda folder: Case([["wherewhat", *words]])


def _call(*words: str) -> Known:
    return lambda folder: Case([["python", *words]])


def _with(material: str, *words: str) -> Known:
    def build(folder: Path) -> Case:
        take(folder, material)
        return Case([["wherewhat", *words]])

    return build


def _with_runs(*words: str) -> Known:
    def build(folder: Path) -> Case:
        take(folder, "runs")
        run = str(finished_run())
        return Case([["wherewhat", *(run if word == "RUN" else word for word in words)]])

    return build


def _changed(
    name: str, change: Callable[[Any], None], note: str, *words: str, model: str = "tiny", taken: bool = False
) -> Known:
    """A model folder with a changed JSON file."""

    def build(folder: Path) -> Case:
        if model != "tiny" and not taken:
            take(folder, model)
        path = Path(model) / name
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))
        return Case([["wherewhat", *(words or ["check", model, "--device", "cpu"])]], [f"{path}: {note}"])

    return build


def _config(*words: str, **values: Any) -> Known:
    return _changed("config.json", lambda tree: tree.update(values), str(values), *words)


def _tokenizer(**values: Any) -> Known:
    return _changed("tokenizer.json", lambda tree: tree.update(values), str(values))


def _tokenizer_config(**values: Any) -> Known:
    return _changed("tokenizer_config.json", lambda tree: tree.update(values), str(values))


def _shard(name: Any, *, taken: bool = False) -> Known:
    def change(tree: Any) -> None:
        tree["weight_map"] = dict.fromkeys(tree["weight_map"], name)

    return _changed("model.safetensors.index.json", change, f"all weights in {name!r}", model="sharded", taken=taken)


def _pickled(folder: Path) -> Case:
    take(folder, "sharded")
    Path("sharded/pytorch_model.bin").write_bytes(b"no pickle")
    return _shard("pytorch_model.bin", taken=True)(folder)


def _special(name: str, make: Callable[[Path], None], *words: str) -> Known:
    """A model folder in which a file is of an unusual kind."""

    def build(folder: Path) -> Case:
        path = Path("tiny") / name
        path.unlink(missing_ok=True)
        make(path)
        return Case([["wherewhat", *(words or _CHECK)]], [f"{path} is unusual"])

    return build


_fifo = os.mkfifo


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _header(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(64)) and None


def _zero_weights(path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _gguf(key: str, number: int) -> Known:
    def build(folder: Path) -> Case:
        take(folder, "tiny.gguf")
        path = Path("tiny.gguf")
        data = path.read_bytes()
        chosen = next(field for field in gguf_fields(data) if field.name == key)
        note, data = with_value(data, chosen, Random(0), number)
        path.write_bytes(data)
        return Case([["wherewhat", "check", "tiny.gguf", "--device", "cpu"]], [note])

    return build


def _nested_gguf(folder: Path) -> Case:
    take(folder, "tiny.gguf")
    path = Path("tiny.gguf")
    data = path.read_bytes()
    chosen = gguf_fields(data)[-1]
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * DEEP + struct.pack("<IQ", 0, 0)
    path.write_bytes(data[: chosen.value - 4] + nested + data[chosen.end :])
    return Case([["wherewhat", "check", "tiny.gguf", "--device", "cpu"]], [f"{chosen.name} is a nested array"])


def _red_folder(*words: str) -> Known:
    def build(folder: Path) -> Case:
        Path("tiny").rename("\x1b[31mtiny")
        return Case([["wherewhat", *words]])

    return build


def _text_lines(line: str, *words: str) -> Known:
    def build(folder: Path) -> Case:
        Path("lines.jsonl").write_text(line)
        return Case([["wherewhat", *words]], ["lines.jsonl holds one line"])

    return build


_HUGE = "99999999999999999999"
_LONG = "x" * 300
_MEASURED = ("axes", "frequencies", "heads", "perturb", "planes", "residual")
_measured = partial(_command, "attention", "tiny")

KNOWN: list[Known] = [
    # Names as paths.
    _command("check", "~nosuchuser/x"),
    _call("load", "~nosuchuser/x"),
    _command("check", _LONG),
    _call("load", f"./{_LONG}"),
    _call("load", "x\0y"),
    _command("check", "models--x"),
    _command("check", "models--x", "--offline"),
    _command("check", f"nobody/{'x' * 120}", "--offline"),
    _command("check", "locked/x"),
    _command("check", "locked"),
    _command("check", "a/" * 3000),
    _measured(*_SMALL, "--out", _LONG),
    _measured(*_SMALL, "--out", "locked/x"),
    _measured(*_SMALL, "--config", "~nosuchuser/x"),
    _command("attention", "tiny", "--text", _LONG, "--tokens", "16"),
    _command("attention", "tiny", "--text", "locked/x", "--tokens", "16"),
    _command("choices", "tiny", "--items", _LONG),
    _with_runs("compare", "runs", "--csv", ""),
    _with_runs("compare", "runs", "--html", "locked/x"),
    _with_runs("compare", "~nosuchuser/x"),
    _with_runs("compare", _LONG),
    _with_runs("export", "RUN", f"{_LONG}.csv"),
    _with_runs("export", _LONG, "x.csv"),
    _with_runs("export", "locked/x", "x.csv"),
    # FIFOs and endless files.
    *(_command("check", name, "--device", "cpu") for name in ("fifo", "endless", "oversize")),
    *(_measured(*_SMALL, "--config", name) for name in ("fifo", "endless", "oversize")),
    *(_command("attention", "tiny", "--text", name, "--tokens", "16") for name in ("fifo", "endless", "oversize")),
    *(_command("choices", "tiny", "--items", name, "--device", "cpu") for name in ("fifo", "endless", "oversize")),
    *(_command("sweep", name) for name in ("fifo", "endless")),
    *(_command("extend", "tiny", *_SMALL, "--set", f"plan={name}") for name in ("fifo", "endless")),
    *(
        _special(name, make)
        for name in (
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "generation_config.json",
            "chat_template.jinja",
        )
        for make in (_fifo, _endless)
    ),
    # Deep nesting.
    _special("config.json", lambda path: path.write_text(f'{{"model_type": "llama", "x": {_DEEP}}}') and None),
    _special("tokenizer.json", lambda path: path.write_text(f'{{"x": {_DEEP}}}') and None),
    _special("tokenizer_config.json", lambda path: path.write_text(f'{{"x": {_DEEP}}}') and None),
    _special("generation_config.json", lambda path: path.write_text(f'{{"x": {_DEEP}}}') and None),
    _special("model.safetensors.index.json", lambda path: path.write_text(f'{{"weight_map": {_DEEP}}}') and None),
    _special("model.safetensors", _header(_DEEP)),
    _special("model.safetensors", _header(f'{{"__metadata__": {_DEEP}}}')),
    _measured(*_SMALL, "--config", "deep.toml"),
    _measured(*_SMALL, "--config", "deep.json"),
    _command("sweep", "deep.toml"),
    _command("multihop", "run", "deep.toml"),
    _command("extend", "tiny", *_SMALL, "--set", "plan=deep.json"),
    _command("choices", "tiny", "--items", "deep.jsonl", "--device", "cpu"),
    _command("attention", "tiny", "--text", "deep.jsonl", "--tokens", "16"),
    _nested_gguf,
    # Huge numbers.
    *(_with("speller", "prompts", "speller", *_SMALL[4:], "--set", f"{name}={_HUGE}") for name in ("count", "sizes")),
    _command("multihop", "train", "--set", "layers=99999999"),
    _command("multihop", "train", "--set", "width=99999999"),
    _command("multihop", "train", "--set", f"steps={_HUGE}"),
    _command("multihop", "train", "--seeds", _HUGE),
    _command("multihop", "construct", "--longest", _HUGE),
    _command("perturb", "tiny", *_SMALL, "--set", f"reach={_HUGE}"),
    _command("perturb", "tiny", *_SMALL, "--set", "layers=99999999"),
    _command("perturb", "tiny", *_SMALL, "--set", f"seeds={_HUGE}"),
    _command("distance", "tiny", *_SMALL, "--set", f"beyond={_HUGE}"),
    _command("distance", "tiny", *_SMALL, "--set", f"queries={_HUGE}"),
    _command("heads", "tiny", *_SMALL, "--set", f"max_lag={_HUGE}"),
    _command("heads", "tiny", *_SMALL, "--set", f"positions={_HUGE}"),
    _command("extend", "tiny", *_SMALL, "--set", f"window={_HUGE}"),
    _command("extend", "tiny", *_SMALL, "--set", f"trained={_HUGE}"),
    _command("residual", "tiny", *_SMALL, "--set", "strengths=1e308"),
    _measured(*_SMALL, "--set", f"block_mib={_HUGE}"),
    _measured(*_SMALL, "--chunk", _HUGE),
    _measured("--text", "text.txt", "--device", "cpu", "--tokens", _HUGE),
    _measured(*_SMALL, "--documents", _HUGE),
    _config(num_hidden_layers=2**31),
    _config("check", "tiny", "--weights", "random", "--device", "cpu", num_hidden_layers=2**31),
    _config("check", "tiny", "--weights", "random", "--device", "cpu", vocab_size=2**31, hidden_size=1024),
    _config(hidden_size=2**40),
    _config(max_position_embeddings=2**62),
    _gguf("tokenizer.ggml.tokens", 10**9),
    _gguf("tokenizer.ggml.token_type", 10**9),
    _gguf("llama.block_count", 2**31),
    # Zeros.
    _special("model.safetensors", _zero_weights),
    *(_special("model.safetensors", _zero_weights, name, "tiny", *_SMALL) for name in _MEASURED),
    _special("model.safetensors", _zero_weights, *PLAN),
    _config(num_key_value_heads=0),
    _config(num_attention_heads=0),
    _config(head_dim=0),
    _config(num_hidden_layers=0),
    _config(vocab_size=0),
    _config(hidden_size=0),
    _config("check", "tiny", "--weights", "random", "--device", "cpu", head_dim=0),
    _gguf("llama.embedding_length", 0),
    _gguf("llama.attention.head_count", 0),
    _gguf("llama.attention.head_count_kv", 0),
    # Config values of the wrong type.
    _config(pad_token_id=99),
    _config(pad_token_id="x"),
    _config(text_config=5),
    _config(return_dict=False),
    _config(transformers_weights=5),
    _config(quantization_config=5),
    _config(rope_parameters=5),
    _config(architectures=5),
    _config(auto_map=5),
    _config(layer_types=["x"]),
    _config(dtype="x"),
    *(_tokenizer_config(tokenizer_class=name) for name in ("BertModel", "Trainer", "LlamaConfig", "AutoTokenizer", 5)),
    *(_tokenizer(**part) for part in NATIVE),
    _tokenizer(added_tokens=5),
    # Shard indexes.
    *(
        _shard(name)
        for name in ("/etc/passwd", 5, None, _LONG, "pytorch_model.bin", "../tiny/model.safetensors", "a\0b")
    ),
    _pickled,
    # Options.
    _measured(*_SMALL, "--attn-implementation", "flex_attention"),
    _command(*_CHECK, "--attn-implementation", "flex_attention"),
    _command("check", "tiny", "--device-map", "cuda:0"),
    _command("check", "tiny", "--device-map", "x"),
    _command("check", "tiny", "--device", "cuda:0"),
    # Control characters.
    _command("attention", "tiny", "--text", "\x1b[31mred.txt", *_SMALL[2:]),
    _red_folder("check", "\x1b[31mtiny", "--device", "cpu"),
    _red_folder("attention", "\x1b[31mtiny", *_SMALL),
    _red_folder("report", "\x1b[31mtiny", "--text", "text.txt", "--tokens", "16", "--device", "cpu"),
    _measured(*_SMALL, "--out", "\x1b[31mruns"),
    _with_runs("export", "RUN", "\x1b[31mx.csv"),
    _with_runs("compare", "runs", "--csv", "\x1b[31mx.csv"),
    _command("check", "\x1b[31mx"),
    _command("\x1b[31mx"),
    _measured("--\x1b[31mx"),
    _text_lines('{"name": "\\u001b[31mx", "text": "the cat"}', "attention", "tiny", "--text", "lines.jsonl"),
]
