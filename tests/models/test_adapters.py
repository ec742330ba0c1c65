"""End-to-end: a PEFT adapter folder is loaded onto the base model that it names, or refused in one line."""

import json
import resource
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from wherewhat.errors import LoadError
from wherewhat.models.loader import load

peft = pytest.importorskip("peft", reason="adapters need the extra 'peft'")
IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
# (W + BA) x in place of W x + B(A x): sums over 16 to 24 products in two layers, at worst 64 ε (8e-6) of logits near 1.
MERGED = {"rtol": 0, "atol": 2e-5}


def save_adapter(folder, base, config=None, *, named=None):
    """An adapter that was trained a little, on the model of a folder; returns the logits of the two together."""
    from transformers import AutoModelForCausalLM

    config = config or peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)
    rename(folder, named or str(base))
    with torch.no_grad():
        return adapted(input_ids=IDS).logits


def rename(folder, base, **changes):
    """Name another base model in an adapter's configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base, **changes}))


def logits(loaded):
    with torch.no_grad():
        return loaded.model(input_ids=IDS).logits


def refused(spec, match, **options):
    with pytest.raises(LoadError, match=match) as caught:
        load(spec, device="cpu", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="lora"),
        *(
            pytest.param({"kind": kind, **options}, id=f"{kind} {len(options)}", marks=pytest.mark.slow)
            for kind, options in (
                ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "k_proj"], "use_dora": True}),
                ("LoHaConfig", {"r": 2, "target_modules": ["q_proj"]}),
                ("LoKrConfig", {"r": 2, "target_modules": ["q_proj"]}),
                ("IA3Config", {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}),
            )
        ),
    ],
)
def test_an_adapter_folder_is_its_base_model_with_the_adapter(build, tmp_path, no_network, capfd, config):
    base = build.model(tmp_path / "base", bos=True)
    config = getattr(peft, config.pop("kind"))(**config) if config else None
    expected = save_adapter(tmp_path / "adapter", base, config)
    capfd.readouterr()
    loaded = load(tmp_path / "adapter", device="cpu", offline=True)
    assert no_network == []
    assert capfd.readouterr() == ("", "")
    assert (loaded.name, loaded.spec, loaded.adds_bos) == ("adapter", str(tmp_path / "adapter"), True)
    torch.testing.assert_close(logits(loaded), expected, **MERGED)
    assert (logits(loaded) - logits(load(base, device="cpu"))).abs().max() > 1e-3
    assert not any("lora" in name for name, _ in loaded.model.named_modules())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_controls_of_an_adapter(build, tmp_path):
    base = build.model(tmp_path / "base")
    save_adapter(tmp_path / "adapter", base)
    random, of_base = (load(tmp_path / name, weights="random", device="cpu") for name in ("adapter", "base"))
    assert random.weights_hash == of_base.weights_hash
    assert torch.equal(logits(random), logits(of_base))
    trained, shuffled = (load(tmp_path / "adapter", weights=w, device="cpu").model for w in ("trained", "shuffled"))
    one, other = (m.model.layers[0].self_attn.q_proj.weight.flatten() for m in (trained, shuffled))
    assert not torch.equal(one, other)
    assert torch.equal(one.sort().values, other.sort().values)


def test_the_identity_of_an_adapter_is_that_of_both_models_and_not_of_their_place(build, tmp_path):
    base = build.model(tmp_path / "base")
    save_adapter(tmp_path / "adapter", base)
    first = load(tmp_path / "adapter", device="cpu").weights_hash
    rename(tmp_path / "adapter", str(build.model(tmp_path / "copy")))
    assert load(tmp_path / "adapter", device="cpu").weights_hash == first
    rename(tmp_path / "adapter", str(base), lora_alpha=16)
    scaled = load(tmp_path / "adapter", device="cpu").weights_hash
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file)
    larger = load(tmp_path / "adapter", device="cpu").weights_hash
    assert len({first, scaled, larger, load(base, device="cpu").weights_hash}) == 4


@pytest.mark.slow
def test_an_adapter_from_the_hub_cache(build, tmp_path, monkeypatch, no_network):
    from huggingface_hub import constants

    commit = "b" * 40
    entry = tmp_path / "hub" / "models--owner--adapter"
    expected = save_adapter(entry / "snapshots" / commit, build.model(tmp_path / "base"))
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    loaded = load("owner/adapter", offline=True, device="cpu")
    assert (loaded.name, loaded.revision) == ("adapter", commit)
    torch.testing.assert_close(logits(loaded), expected, **MERGED)
    rename(entry / "snapshots" / commit, "owner/base")
    refused("owner/adapter", r"base model of the adapter .*'owner/base' is not in the local", offline=True)
    assert no_network == []


@pytest.mark.slow
def test_an_adapter_on_the_command_line(build, tmp_path, monkeypatch, capsys):
    from wherewhat.__main__ import main

    save_adapter(tmp_path / "adapter", build.model(tmp_path / "base"))
    for base, code, said in (("base", 0, "adapter: proved"), ("gone", 2, "the base model of the adapter")):
        rename(tmp_path / "adapter", str(tmp_path / base))
        monkeypatch.setattr("sys.argv", ["wherewhat", "check", str(tmp_path / "adapter"), "--offline"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert said in " ".join("".join(capsys.readouterr()).split())


def test_adapters_that_are_refused(build, tmp_path, monkeypatch):
    base = build.model(tmp_path / "base")
    folder = tmp_path / "adapter"
    save_adapter(folder, base)
    for named, match in [
        (str(tmp_path / "gone"), "cannot be found: no such file or folder"),
        (None, "names no base model"),
        (str(folder), "is an adapter itself"),
    ]:
        rename(folder, named)
        refused(folder, match)
    rename(folder, str(base), peft_type="XLORA")
    refused(folder, "adapter of type 'XLORA'")
    rename(folder, str(base), peft_type="LORA")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        refused(folder, r"pip install 'wherewhat\[peft\]'")
    for rank in (2**31, 2**70):  # allocates nothing
        rename(folder, str(base), r=rank)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(folder, "could not be loaded")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB
    rename(folder, str(base), r=2)
    rename(folder, str(build.model(tmp_path / "other", build.config(num_hidden_layers=3))), peft_type="LORA")
    refused(folder, "has no weights for .*layers.2.* and 5 more: it does not fit its base model")
    rename(folder, str(build.model(tmp_path / "smaller", build.config(num_hidden_layers=1))))
    refused(folder, "has weights for .*layers.1.*: it does not fit its base model")
    rename(folder, str(build.model(tmp_path / "wider", build.config(hidden_size=32))))
    refused(folder, "could not be loaded: .*size mismatch")
    rename(folder, str(base))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, "pickled weights")
    (folder / "adapter_model.bin").unlink()
    refused(folder, "no weights: adapter_model.safetensors is missing")
    (folder / "adapter_config.json").write_text("{")
    refused(folder, "adapter_config.json of .* is not valid JSON")
    save_adapter(base, base)
    refused(base, "both a model and an adapter")


@pytest.mark.slow
def test_virtual_tokens_are_refused(build, tmp_path):
    base = build.model(tmp_path / "base")
    for kind in ("PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"):
        save_adapter(tmp_path / kind, base, getattr(peft, kind)(num_virtual_tokens=2, task_type="CAUSAL_LM"))
        refused(tmp_path / kind, "adds virtual tokens or keys")


@pytest.mark.slow
def test_an_adapter_of_the_embedded_model(tmp_path):
    model = load(device="cpu", dtype="float64").model  # in float32 merging rounds the logits by 4e-4
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    rename(tmp_path / "adapter", "smollm2")
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
    loaded = load(tmp_path / "adapter", device="cpu", dtype="float64")
    assert loaded.weights_hash != load(device="cpu").weights_hash
    assert float((logits(loaded) - expected).abs().max()) < 1e-6
