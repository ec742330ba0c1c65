"""End-to-end: every wrong input ends in one clear line, exit code 2, and nothing half-written."""

from __future__ import annotations

import errno
import os
import random

import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, MambaConfig

from helpers.command_line import assert_one_line
from helpers.models import save_model, save_tokenizer


def test_wrong_words(cli, subtests):
    for arguments, words in (
        (("atention",), ["atention"]),
        (("attention", "--tokens", "many"), ["--tokens", "many"]),
        (("attention", "--nonsense"), ["--nonsense"]),
        (("attention", "--tokens", "1"), ["at least 2 tokens"]),
        (("attention", "smolm2", "--offline"), ["smolm2"]),
        (("attention", "nobody/nothing", "--offline"), ["nobody/nothing"]),
        (("check", "no-such-folder/"), ["no-such-folder"]),
        (("check", ""), ["empty"]),
        (("check", "--revision", "main"), ["--revision 'main'", "only Hugging Face ids"]),
        (("check", "--seed", "-1"), ["--seed is -1", "2^63 - 1"]),
        (("report", "--seed", str(2**63)), [f"--seed is {2**63}", "2^63 - 1"]),
        (("heads", "nobody/nothing", "--set", "tau=nan"), ["tau='nan' is not a finite number"]),
        (("compare", "runs", "--where", "model"), ["--where 'model'", "key=value"]),
    ):
        with subtests.test(arguments=arguments):
            assert_one_line(cli(*arguments), *words)


def test_wrong_options(cli, model, text, subtests):
    for options, words in (
        (("--dtype", "float7"), ["float7"]),
        (("--device", "abacus"), ["abacus"]),
        (("--weights", "gold"), ["gold"]),
        (("--set", "sink=1"), ["sink", "did you mean 'sink_tokens'"]),
        (("--set", "sink_tokens=0"), ["sink_tokens is 0"]),
        (("--set", "sink_tokens"), ["key=value"]),
        (("--config", "missing.toml"), ["missing.toml"]),
        (("--tokens", "31"), ["30 tokens", "31"]),
        (("--tokens", "33"), ["33", "32 positions", "--beyond"]),
        (("--seed", "99999999999999999999999", "--weights", "random"), ["--seed is 99999999999999999999999"]),
        (("--revision", "step1"), ["--revision 'step1'", "tiny"]),
        (("--text", "missing.txt"), ["missing.txt"]),
        (("--documents", "9"), ["9"]),
    ):
        with subtests.test(options=options):
            given = () if "--text" in options else ("--text", text)
            outcome = cli("attention", model, *given, *(() if "--tokens" in options else ("--tokens", 24)), *options)
            assert_one_line(outcome, *words)
            assert not list(text.parent.glob("runs"))


def test_unreadable_text(cli, model, tmp_path, subtests):
    path = tmp_path / "bad.txt"
    contents = {b"": "empty", b"   \n": "white space", b"the cat\x00sat": "binary", b"caf\xe9 the cat": "UTF-8"}
    for content, word in contents.items():
        with subtests.test(content=content):
            path.write_bytes(content)
            assert_one_line(cli("attention", model, "--text", path, "--tokens", 24), "bad.txt", word)


def test_config_file_mistakes(cli, model, text, tmp_path, subtests):
    config = tmp_path / "run.toml"
    for content, words in {
        "tokns = 3\n": ("tokns", "did you mean 'tokens'"),
        "tokens = \n": ("not valid TOML",),
        'tokens = "many"\n': ("many",),
        'seed = "-1"\n': ("--seed is -1",),
        f'seed = "{2**63}"\n': (f"--seed is {2**63}",),
    }.items():
        with subtests.test(content=content):
            config.write_text(content)
            assert_one_line(cli("attention", model, "--text", text, "--config", config), *words)


def without_weights(folder):
    (save_model(folder) / "model.safetensors").unlink()


def truncated_weights(folder):
    path = save_model(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def nan_in_weights(folder):
    weights = load_file(save_model(folder) / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def corrupted_gguf(path):
    path.write_bytes(b"GGUF" + random.Random(0).randbytes(500))


def encoder_only(folder):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=16, **small)).save_pretrained(folder)
    save_tokenizer(folder)


def state_space(folder):
    save_model(folder, MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1))


def test_models_that_cannot_be_checked(cli, tmp_path, subtests):
    for name, make, words in (
        ("bare", without_weights, ("bare", "weights")),
        ("cut", truncated_weights, ("model.safetensors",)),
        ("nan", nan_in_weights, ("model.norm.weight",)),
        ("broken.gguf", corrupted_gguf, ("broken.gguf",)),
        ("bert", encoder_only, ("bert",)),
        ("mamba", state_space, ("attention",)),
    ):
        with subtests.test(model=name):
            make(tmp_path / name)
            assert_one_line(cli("check", tmp_path / name), *words)


def test_output_folder_is_a_file(cli, model, text, tmp_path):
    (tmp_path / "file").write_text("in the way")
    outcome = cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "file")
    assert_one_line(outcome, "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_disk_full(cli, model, text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "out")
    assert_one_line(outcome, "No space left on device")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "out").code == 0
