"""Small valid models, texts and runs, made once, from which cases are mutated."""

from __future__ import annotations

import json
import os
from pathlib import Path

RUN = ["axes", "tiny", "--text", "text.txt", "--tokens", "16", "--no-control", "--device", "cpu"]
"""The command of the finished run in ``runs``."""
PLAN = ["plan", "tiny", "--text", "text.txt", "--text", "more.txt", "--tokens", "24", "--selector", "ranks"]
PLAN += ["--choose", "1", "--documents", "0", "--window", "4", "--sinks", "1", "--device", "cpu"]
SMALL_TRAINING = {
    "layers": "2", "heads": "2", "width": "16", "steps": "3", "record_every": "2", "batch": "4", "sequences": "800",
}  # fmt: skip
TRAIN = ["multihop", "train", "number", "--out", "lab", "--device", "cpu"]
TRAIN += [word for name, value in SMALL_TRAINING.items() for word in ("--set", f"{name}={value}")]
"""The command of the finished training in ``lab``."""
_SENTENCE = "the cat sat on a mat and the dog ran "


def make(folder: Path) -> None:
    """Write all materials to a folder."""
    from transformers import AutoModelForCausalLM, GPT2Config

    from helpers.models import save_model, save_speller, write_gguf

    os.chdir(folder)
    os.environ["WHEREWHAT_CACHE"] = str(folder / "cache")
    save_model(Path("tiny"))
    save_model(Path("sharded"), max_shard_size="4KB")
    save_model(Path("gpt2"), GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    save_speller(Path("speller"))
    write_gguf(Path("tiny.gguf"))
    write_gguf(Path("pieces.gguf"), tokenizer="llama")
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained("tiny")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained("adapter")
    Path("text.txt").write_text(_SENTENCE * 3)
    Path("more.txt").write_text(" ".join(reversed(_SENTENCE.split())) + f" {_SENTENCE * 2}")
    Path("lines.jsonl").write_text("".join(json.dumps({"name": n, "text": _SENTENCE * 3}) + "\n" for n in "ab"))
    item = {"context": "the cat", "choices": ["sat on a mat", "ran"], "gold": 0}
    Path("items.jsonl").write_text(f"{json.dumps(item)}\n" * 3)
    run_directories()


def run_directories() -> None:
    """Write the finished runs, and their tables before anything is changed."""
    from wherewhat.cli.main import run_cli

    run = ""
    export, compare = ["export", "RUN", "export.csv"], ["compare", "runs", "--csv", "compare.csv"]
    for words in (RUN, export, compare, [*PLAN, "--out", "plans", "--file", "plan.json"], TRAIN):
        if code := run_cli([run if word == "RUN" else word for word in words]):
            raise RuntimeError(f"{words} ended with code {code}")
        run = str(next(entry for entry in Path("runs").iterdir() if (entry / "config.json").exists()))
