"""End-to-end: every wrong input ends in one clear line, exit code 2, and nothing half-written."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, MambaConfig

from helpers.command_line import assert_one_line
from helpers.models import save_model, save_tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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
    ],
)
def test_wrong_words(cli, arguments, words):
    assert_one_line(cli(*arguments), *words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
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
    ],
)
def test_wrong_options(cli, model, text, options, words):
    given = () if "--text" in options else ("--text", text)
    outcome = cli("attention", model, *given, *(() if "--tokens" in options else ("--tokens", 24)), *options)
    assert_one_line(outcome, *words)
    assert not list(text.parent.glob("runs"))


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "empty"), (b"   \n", "white space"), (b"the cat\x00sat", "binary"), (b"caf\xe9 the cat", "UTF-8")],
)
def test_unreadable_text(cli, model, tmp_path, content, word):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert_one_line(cli("attention", model, "--text", path, "--tokens", 24), "bad.txt", word)


def test_config_file_mistakes(cli, model, text, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("tokns = 3\n")
    assert_one_line(cli("attention", model, "--text", text, "--config", config), "tokns", "did you mean 'tokens'")
    config.write_text("tokens = \n")
    assert_one_line(cli("attention", model, "--text", text, "--config", config), "not valid TOML")
    config.write_text('tokens = "many"\n')
    assert_one_line(cli("attention", model, "--text", text, "--config", config), "many")


def test_folder_without_weights(cli, tmp_path):
    folder = save_model(tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    assert_one_line(cli("check", folder), "bare", "weights")


def test_truncated_weights(cli, tmp_path):
    folder = save_model(tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_one_line(cli("check", folder), "model.safetensors")


def test_nan_in_weights(cli, tmp_path):
    folder = save_model(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(cli("check", folder), name)


def test_corrupted_gguf(cli, tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + os.urandom(500))
    assert_one_line(cli("check", path), "broken.gguf")


def test_encoder_only_model(cli, tmp_path):
    folder = tmp_path / "bert"
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=16, **small)).save_pretrained(folder)
    save_tokenizer(folder)
    assert_one_line(cli("check", folder), "bert")


def test_state_space_model(cli, tmp_path):
    folder = save_model(tmp_path / "mamba", MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1))
    assert_one_line(cli("check", folder), "attention")


def test_output_folder_is_a_file(cli, model, text, tmp_path):
    (tmp_path / "file").write_text("in the way")
    outcome = cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "file")
    assert_one_line(outcome, "file")
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.slow
def test_disk_full(cli, model, text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "out")
    assert_one_line(outcome, "No space left on device")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert cli("attention", model, "--text", text, "--tokens", 24, "--out", tmp_path / "out").code == 0


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_from_a_config_file_is_refused_too(cli, model, text, tmp_path, seed):
    config = tmp_path / "run.toml"
    config.write_text(f'seed = "{seed}"\n')
    assert_one_line(cli("attention", model, "--text", text, "--config", config), f"--seed is {seed}")
