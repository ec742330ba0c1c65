"""End-to-end: every unusable model ends in one clear line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

import wherewhat
from wherewhat.errors import ConfigError, LoadError
from wherewhat.models.loader import load


def refused(spec, match, **options):
    with pytest.raises(LoadError, match=match) as caught:
        load(spec, device="cpu", **options)
    assert "\n" not in str(caught.value)


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_names_that_stand_for_nothing(tmp_path, no_network):
    refused("", "name is empty")
    refused("   ", "name is empty")
    refused("no such/model name", "neither a path that exists nor a Hugging Face id")
    refused("smolm2", r"did you mean 'smollm2'\?", offline=True)
    refused("smolm2", r"did you mean 'smollm2'\?")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(str(tmp_path / "modle.gguf"), r"no such file or folder.*did you mean '.*model.gguf'")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "notes.txt", "not a GGUF one")


def test_folder_lacks_something(build, tmp_path):
    folder = build.model(tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    refused(folder, "no config.json")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json of .* is not valid JSON")
    (folder / "config.json").write_text("{}")
    refused(folder, "no 'model_type'")
    (folder / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    refused(folder, "model type 'nonsense' .* not known")
    (folder / "config.json").write_text(json.dumps({**json.loads(config), "num_attention_heads": "many"}))
    refused(folder, "not a valid 'llama' config")
    (folder / "config.json").write_text(config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    without = load(str(folder), device="cpu")
    assert without.encode([1, 2, 3]).tolist() == [1, 2, 3]  # token ids need none
    with pytest.raises(
        ConfigError, match=r"no tokenizer in .*: add tokenizer.json beside the weights, or give token ids"
    ):
        without.encode("a text")
    ids = [[1 + (7 * i) % 11 for i in range(16)], [1 + (5 * i) % 11 for i in range(16)]]
    measured = wherewhat.measure("attention", str(folder), texts=ids, out=tmp_path / "runs")
    assert len(measured.heads()) > 0
    with pytest.raises(ConfigError, match="no tokenizer"):
        wherewhat.measure("attention", str(folder), texts=["a text"], out=tmp_path / "runs")
    build.tokenizer(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    refused(folder, "one with the id 2,147,483,648: ids below 16,777,216")
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "tokenizer of .* cannot be read")
    build.tokenizer(folder)
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors is missing")
    (folder / "some.gguf").write_bytes(b"")
    refused(folder, "give the file itself")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "only pickled weights")


def test_truncated_and_corrupted_safetensors(build, tmp_path):
    folder = build.model(tmp_path / "m")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for broken in (b"", content[:5], content[:100], content[:-1], content + b"x", b"\xff" * 8 + content[8:]):
        file.write_bytes(broken)
        refused(folder, "truncated or corrupted")
    file.write_bytes(content[:8] + b"#" + content[9:])
    refused(folder, "truncated or corrupted")


def test_missing_shards_and_broken_index(build, tmp_path):
    folder = build.model(tmp_path / "m", max_shard_size="4KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    shards[1].unlink()
    refused(folder, rf"misses 1 of {len(shards)} weight files, first {shards[1].name}")
    (folder / "model.safetensors.index.json").write_text("[]")
    refused(folder, "index .* corrupted")


def test_weights_that_transformers_would_make_up(build, tmp_path):
    folder = build.model(tmp_path / "m")
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(folder, r"no weights for model\.layers\.1\.self_attn\.k_proj\.weight")
    build.model(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    change_weights(folder, lambda tensors: tensors.update({name: torch.zeros(8, 16)}))
    refused(folder, r"another shape for model\.layers\.0\.self_attn\.q_proj\.weight")


def test_nan_and_infinity(build, tmp_path):
    for value, word in ((float("nan"), "NaN"), (float("inf"), "infinite")):
        folder = build.model(tmp_path / word)
        change_weights(folder, lambda tensors, x=value: tensors["model.layers.1.mlp.up_proj.weight"][3, 4:5].fill_(x))
        for weights in ("trained", "shuffled"):
            refused(folder, rf"{word} values in weight model\.layers\.1\.mlp\.up_proj\.weight", weights=weights)
        load(folder, weights="random", device="cpu")
    build.model(folder)
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load(folder, device="cpu")
    refused(folder, r"infinite values in weight model\.norm\.weight \(as float16\)", dtype="float16")


def test_nan_in_a_layer_that_accelerate_offloads(build, tmp_path):
    pytest.importorskip("accelerate")
    folder = build.model(tmp_path / "m")
    layers = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    spread = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", **layers}
    name = "model.layers.1.mlp.up_proj.weight"
    load(folder, device_map=spread)
    change_weights(folder, lambda tensors: tensors[name][3, 4:5].fill_(float("nan")))
    with pytest.raises(LoadError, match=f"NaN values in weight {name}"):
        load(folder, device_map=spread)


def test_models_that_are_not_causal_attention(build, tmp_path, subtests):
    many = "only causal language models|only those work|no attention"
    kinds = {"bert": r"encoder-only model \(bert\)", "t5": "seq2seq", "mamba": "no attention to measure"}
    kinds |= dict.fromkeys(("falcon_mamba", "rwkv", "mamba2", "distilbert", "bart", "vit"), many)
    for kind, match in kinds.items():
        with subtests.test(kind=kind):
            config = CONFIG_MAPPING[kind]()
            config.is_encoder_decoder = kind in ("t5", "bart")
            config.save_pretrained(tmp_path / kind)
            build.tokenizer(tmp_path / kind)
            refused(tmp_path / kind, match, weights="random")
            save_file({"x": torch.zeros(1)}, tmp_path / kind / "model.safetensors")
            if match != many:
                refused(tmp_path / kind, match)


def test_remote_code_is_off_unless_allowed(build, tmp_path, monkeypatch):
    folder = build.model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own"
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    refused(folder, "trust_remote_code=True")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    loaded = load(folder, trust_remote_code=True, device="cpu")
    assert type(loaded.model).__name__ == "OwnModel"
    with (folder / "own.py").open("a") as file:
        file.write("# changed\n")
    changed = load(folder, trust_remote_code=True, device="cpu")
    assert changed.weights_hash != loaded.weights_hash, "what a model computes is its code's too"
