"""Identity: models in memory are hashed by their weights, and their control models are those of the loader."""

from __future__ import annotations

import copy
import hashlib
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import wherewhat
from helpers.capture import tiny
from helpers.models import llama_config, save_model
from wherewhat.errors import WherewhatError
from wherewhat.models import memory
from wherewhat.models.loaded import evaluation
from wherewhat.models.memory import _tensor_hash, copied_in_pieces, weights_hash
from wherewhat.runs.request import MemoryModel, ModelRequest, model_request
from wherewhat.runs.subject import load, load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("memory") / "tiny", llama_config(), bos=True)


def test_the_hash_depends_on_every_weight_and_on_nothing_else():
    model = tiny("llama")
    before = weights_hash(model)
    same = copy.deepcopy(model).train()
    same.config._name_or_path = "elsewhere"
    assert weights_hash(same) == before
    with torch.no_grad():
        same.model.layers[1].mlp.down_proj.weight.view(-1)[-1] += 1e-6
    assert weights_hash(same) != before
    other = copy.deepcopy(model)
    other.config.rms_norm_eps = 0.5
    assert weights_hash(other) != before
    assert weights_hash(model.to(torch.bfloat16)) != before


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_each_tensor_is_hashed_as_its_bytes_on_the_cpu(device):
    entries = torch.arange(24.0).reshape(4, 6)
    tensors = [entries, entries.T, entries[:, ::2], entries[0, 0], entries[:0], entries.to(torch.bfloat16), entries > 3]
    large = torch.arange(5 << 20, dtype=torch.int32)  # 20 MiB: copied from a GPU in three pieces
    for tensor in (*tensors, large):
        expected = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        expected.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert _tensor_hash(tensor.to(device)) == expected.hexdigest()
    content = large[:100].view(torch.uint8).to(device)
    for most in (7, 400, 1000):
        pieces = [piece.clone() for piece in copied_in_pieces(content, most=most)]
        assert all(len(piece) <= most for piece in pieces)
        assert torch.equal(torch.cat(pieces), content.cpu())


def test_tied_weights_are_hashed_once_under_each_name(monkeypatch):
    model = AutoModelForCausalLM.from_config(llama_config(tie_word_embeddings=True))
    hashed = []

    def one(tensor):
        hashed.append(tensor)
        return _tensor_hash(tensor)

    monkeypatch.setattr(memory, "_tensor_hash", one)
    tied = weights_hash(model)
    assert [tensor.nbytes for tensor in hashed] == sorted((tensor.nbytes for tensor in hashed), reverse=True)
    assert sum(tensor is model.lm_head.weight for tensor in hashed) == 1
    assert len(hashed) == len({tensor.data_ptr() for tensor in hashed})
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert weights_hash(model) == tied  # equal weights under equal names, whether they are tied or not


def _set(name, value):
    return lambda model: setattr(model.model.layers[1].self_attn, name, value)


CHANGES = {
    "scale": _set("scaling", 7.0),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
    "a forward": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
    "an activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
}


def test_the_hash_depends_on_modules():
    for name, change in CHANGES.items():
        model = tiny("llama")
        before = weights_hash(model)
        assert weights_hash(model) == before
        change(model)
        assert weights_hash(model) != before, name
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config())
    with pytest.raises(WherewhatError, match="cannot be hashed"):
        weights_hash(model)


def test_the_hash_depends_on_adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama"), config)
    inner = model_request(model).module
    on = weights_hash(inner)
    with model.disable_adapter():
        off = weights_hash(inner)
    assert off != on == weights_hash(inner)
    model.add_adapter("two", config)
    both = weights_hash(inner)
    model.set_adapter("two")
    assert weights_hash(inner) != both


def test_two_threads_measure_one_model_in_turn():
    model = tiny("llama").train()
    expected = wherewhat.attention(model, list(range(20)))[1].pattern()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(wherewhat.attention(model, list(range(20)))[1].pattern()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.training
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


def test_control_models_are_those_of_the_loader(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = {name: value for name, value in model.state_dict().items() if "q_proj" in name}
    for weights in ("random", "shuffled"):
        made = load_model(MemoryModel(model, weights=weights, seed=3)).model
        expected = load(folder, weights=weights, seed=3, device="cpu").model
        for (name, one), other in zip(made.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        assert not any(torch.equal(value, made.state_dict()[name]) for name, value in own.items())
    assert load_model(MemoryModel(model.to(torch.bfloat16), weights="random")).dtype == "bfloat16"


def test_everything_that_holds_a_model_is_a_request(folder):
    loaded = load(folder, device="cpu")
    found = load_model(model_request(loaded))
    assert (found.model, found.spec, found.prefix, found.weights) == (
        loaded.model,
        loaded.spec,
        loaded.prefix,
        loaded.weights,
    )
    assert found.weights_hash == weights_hash(loaded.model)  # not that of its files, from which it may differ by now
    assert model_request(str(folder)) == ModelRequest(model=str(folder))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = load_model(model_request(model, tokenizer))
    assert found.name == "tiny"
    assert found.prefix == loaded.prefix
    assert found.tokenizer_hash == loaded.tokenizer_hash
    assert found.encode("the cat").tolist() == loaded.encode("the cat").tolist()
    if not torch.cuda.is_available():  # which would move the model
        assert model_request(torch.nn.DataParallel(model, device_ids=[])).module is model
    assert model_request(model) == model_request(model) != model_request(copy.deepcopy(model))


def test_a_tokenizer_of_another_model_is_refused(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(llama_config(vocab_size=7))
    with pytest.raises(WherewhatError, match="but the model embeds 7: give that of this model"):
        model_request(model, tokenizer)
    with pytest.raises(WherewhatError, match="tokenizer is str"):
        model_request(model, "gpt2")
    with pytest.raises(WherewhatError, match="which has its own: leave it out"):
        model_request("smollm2", tokenizer)


def test_evaluation_restores_the_mode_of_every_module_after_an_error():
    model = tiny("llama").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def fail():
        with evaluation(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
