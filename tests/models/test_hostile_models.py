"""Adversarial: models made to hang, to abort or to fill the memory end in one line."""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest
from safetensors.torch import load_file, save_file

from wherewhat.errors import ConfigError, LoadError, TextError, WherewhatError
from wherewhat.models import suitability
from wherewhat.models.loader import load

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture
def folder(build, tmp_path, monkeypatch):
    """A model folder, and a cache without earlier trials."""
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "cache"))
    return build.model(tmp_path / "m")


def configured(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def refused(spec, match, **options):
    with pytest.raises(WherewhatError, match=match) as caught:
        load(spec, **{"device": "cpu", **options})
    assert "\n" not in str(caught.value)
    return caught.value


def test_names_that_no_system_accepts(subtests, no_network):
    for name, match in (
        ("~nosuchuser/x", "home folder of an unknown user"),
        ("a\0b", "NUL"),
        ("x" * 300, "File name too long"),
        ("/" + "y/" * 3000, "File name too long"),
        ("models--x", "neither an existing path nor a Hugging Face id"),
        ("a/" + "b" * 120, "neither an existing path nor a Hugging Face id"),
    ):
        with subtests.test(match=match):
            assert isinstance(refused(name, match, offline=True), LoadError)
    refused("nobody/nothing", "could not be fetched|cannot be reached", revision="x" * 70_000)


def test_pipes_and_devices(folder, tmp_path, monkeypatch, subtests):
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    for name in (*names, "x.json"):
        with subtests.test(name=name):
            content = (folder / name).read_bytes() if (folder / name).exists() else None
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name)
            refused(folder, f"'{name}' of .* cannot be read: it is a named pipe")
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "named pipe")
    refused("/dev/zero", "it is a device")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("tokenizer_config.json"))
    refused(folder, "'tokenizer_config.json' of .* cannot be read: permission denied")


def test_deep_nesting(folder, subtests):
    names = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json"]
    for name in names:
        with subtests.test(name=name):
            content = (folder / name).read_bytes() if (folder / name).exists() else None
            weights = (folder / "model.safetensors").read_bytes()
            if name == "adapter_config.json":
                (folder / "model.safetensors").unlink()
            (folder / name).write_text(DEEP)
            refused(folder, "nested more than 64 deep|recursion")
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
            (folder / "model.safetensors").write_bytes(weights)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
    refused(folder, "nested more than 64 deep")


def test_a_prefix_outside_the_vocabulary(folder):
    file = folder / "tokenizer.json"
    outer = {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 10**6]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": outer}))
    with pytest.raises(TextError, match="the tokenizer gave id 1000000"):
        load(folder, device="cpu").tokenize("a")


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_settings_out_of_range(folder, count, subtests):
    original = (folder / "config.json").read_text()
    cases = (
        ({"num_hidden_layers": 2**31}, "num_hidden_layers = 2147483648: at most 1,000 layers work"),
        ({"num_hidden_layers": 1e300}, "at most 1,000 layers work"),
        ({"intermediate_size": 2**40}, "describes [0-9,]{10,} weights"),
        ({"vocab_size": 2**33}, "describes [0-9,]{10,} weights"),
        ({"num_key_value_heads": 0}, "by zero"),
        ({"head_dim": 0}, "could not be loaded"),
        ({"head_dim": -8}, "negative dimension"),
        ({"num_attention_heads": 0}, "by zero"),
        ({"pad_token_id": 10**6}, "could not be loaded: Padding_idx"),
        ({"text_config": 3}, "could not be loaded"),
        ({"transformers_weights": 3}, "could not be loaded"),
        ({"hidden_act": "nosuch"}, "could not be loaded: KeyError 'nosuch'"),
    )
    for changes, match in cases[:count]:
        with subtests.test(changes=changes):
            (folder / "config.json").write_text(original)
            refused(configured(folder, **changes), match)


def test_a_model_larger_than_the_memory(folder, monkeypatch):
    monkeypatch.setattr(suitability, "free_memory", lambda: 1000)
    refused(folder, r"needs [0-9.]+ KiB for its [0-9,]+ weights, 1000 bytes of main memory are free")
    configured(folder, hidden_size=2**17, intermediate_size=2**20, vocab_size=2**21)
    refused(folder, "TiB for its .* weights", weights="random")


@pytest.mark.slow
def test_outputs_without_names_are_named(folder):
    loaded = load(configured(folder, return_dict=False), device="cpu")
    assert loaded.model(loaded.encode("the cat")[None]).logits.ndim == 3


def test_weight_indexes_that_leave_the_folder(folder, subtests):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    for entry, match in (
        ("/etc/passwd", "names '/etc/passwd'"),
        ("../m/model.safetensors", "names '../m"),
        ("pytorch_model.bin", "only .safetensors files"),
        ("x" * 5000, "only .safetensors files"),
        ("", "names ''"),
        (5, "corrupted"),
        (None, "corrupted"),
        (["a"], "corrupted"),
    ):
        with subtests.test(entry=str(entry)[:40]):
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
            refused(folder, match)


@pytest.mark.slow
def test_tokenizer_classes_that_are_none(folder, subtests):
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for name in ("LlamaForCausalLM", "PreTrainedTokenizerBase", "AutoTokenizer", "pipeline", 5):
        with subtests.test(name=name):
            file.write_text(json.dumps({**settings, "tokenizer_class": name}))
            refused(folder, "the tokenizer of .* cannot be read")


@pytest.mark.slow
def test_a_tokenizer_that_aborts_the_process(speller, tmp_path):
    """Four bytes as the character map of a normalizer are the length of an allocation inside native code."""
    folder = tmp_path / "m"
    shutil.copytree(speller, folder)
    file = folder / "tokenizer.json"
    original = json.loads(file.read_text())
    aborting = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
    panicking = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    for normalizer, match in ((aborting, "was stopped by signal 6"), (panicking, "PanicException: index out of")):
        file.write_text(json.dumps({**original, "normalizer": normalizer}))
        refused(folder, match, cache_dir=tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 1.0, 3e38])
def test_weights_that_are_all_equal_can_be_measured_or_are_refused(cli, folder, text, value):
    file = folder / "model.safetensors"
    equal = {name: tensor * 0 + value for name, tensor in load_file(file).items()}
    save_file(equal, file, metadata={"format": "pt"})
    for command in ("check", "axes", "heads", "planes", "frequencies", "residual"):
        given = () if command == "check" else ("--text", text, "--tokens", 16, "--out", "runs")
        outcome = cli(command, folder, *given)
        assert outcome.code in (0, 2)
        assert "Traceback" not in outcome.err


def test_options_that_libraries_refuse(folder, subtests):
    pytest.importorskip("accelerate")
    for options, match in (
        ({"attn_implementation": "flex_attention"}, "its masks are functions: use sdpa or eager"),
        ({"attn_implementation": "nosuch"}, "could not be loaded"),
        ({"device_map": "nosuch", "device": "auto"}, "unknown device_map 'nosuch'"),
        ({"device_map": "cuda:99", "device": "auto"}, "cuda:99"),
    ):
        with subtests.test(options=options):
            error = refused(folder, match, **options)
            assert isinstance(error, ConfigError) or "flex" not in str(options)


def gguf_header(*settings, tensors=0, count=None):
    """Return a GGUF header of settings, each a name, the number of a type, and bytes."""
    found = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(settings) if count is None else count)
    for name, kind, data in settings:
        found += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data
    return found


def test_gguf_headers_that_claim_more_than_the_file(tmp_path, subtests):
    for data, match in (
        (gguf_header(("a", 9, struct.pack("<IQ", 0, 10**9))), "a setting ends at byte"),
        (gguf_header(("a", 9, struct.pack("<IQ", 8, 10**9) + b"\0" * 64)), "a setting ends|unpack"),
        (gguf_header(("a", 9, struct.pack("<IQIQ", 9, 1, 9, 1) * 100)), "a setting of type 9"),
        (gguf_header(("a", 8, struct.pack("<Q", 2**62))), "a setting ends at byte"),
        (gguf_header(count=2**62), "settings in 24 bytes"),
        (gguf_header(tensors=2**62), "tensors and 0 settings"),
        (gguf_header(("a", 77, b"")), "a setting of type 77"),
        (b"GGUF", "truncated or corrupted"),
    ):
        with subtests.test(match=match):
            (tmp_path / "m.gguf").write_bytes(data)
            refused(tmp_path / "m.gguf", match)
