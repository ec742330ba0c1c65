"""End-to-end: quantised models are proved in the dtype they compute in; packages that are not installed are named.

Errors of a proof are relative to the largest output of a layer, a sum over 8 keys of sums over 16 dimensions: 32 ε is
4e-6 in float32. In float16 the output itself is rounded, to one ε or 1e-3, on both sides.
"""

import importlib.util
import json

import pytest
import torch

from wherewhat.captures.proof import prove
from wherewhat.errors import LoadError
from wherewhat.models.loader import load

ERROR = 4e-6


@pytest.fixture
def plain(build, tmp_path):
    """A folder with a model that is large enough for 4-bit blocks."""
    return build.model(tmp_path / "plain", build.config(hidden_size=64, intermediate_size=128))


def quantised(plain, folder, build, config, dtype=torch.float32):
    """The model of a folder, quantised; also saved to another one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=dtype, device_map="cpu")
    model.save_pretrained(folder)
    build.tokenizer(folder)
    return model.eval()


def check_folder(folder, dtype, error):
    """A quantised folder is loaded as it was saved and proved; it has a random control, and no shuffled one."""
    loaded = load(folder, device="cpu")
    proof = prove(loaded.model)
    assert loaded.dtype == dtype
    assert max(layer.output_error for layer in proof.layers) < error
    assert load(folder, device="cpu").weights_hash == loaded.weights_hash
    for options in ({"device": "cpu"}, {"device_map": "cpu"}):
        random = load(folder, weights="random", dtype="float16", **options)
        assert {parameter.dtype for parameter in random.model.parameters()} == {torch.float16}
    with pytest.raises(LoadError, match=r"cannot shuffle .* quantised"):
        load(folder, weights="shuffled", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(plain, tmp_path, build, bits, dtype):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = quantised(plain, tmp_path / "saved", build, config, dtype)
    assert not model.model.layers[0].self_attn.q_proj.weight.is_floating_point()
    proof = prove(model)
    # Saved weights keep their dtype whatever is asked for, and so do the limits of the proof.
    error = ERROR if dtype == torch.float32 else 4e-3
    assert proof.tolerance == (5e-5 if dtype == torch.float32 else 1e-2)
    assert max(layer.output_error for layer in proof.layers) < error
    check_folder(tmp_path / "saved", str(dtype).removeprefix("torch."), error)


@pytest.mark.slow
def test_bitsandbytes_that_computes_in_another_dtype_than_its_weights(plain, tmp_path, build):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    before = torch.backends.mkldnn.enabled
    proof = prove(quantised(plain, tmp_path / "saved", build, config))
    assert max(layer.output_error for layer in proof.layers) < ERROR
    assert torch.backends.mkldnn.enabled == before


@pytest.mark.slow
def test_an_adapter_on_a_quantised_model_stays_beside_it(plain, tmp_path, build):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    peft = pytest.importorskip("peft", reason="adapters need the extra 'peft'")
    from transformers import BitsAndBytesConfig

    model = quantised(plain, tmp_path / "base", build, BitsAndBytesConfig(load_in_4bit=True))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(tmp_path / "base")}))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])
    loaded = load(tmp_path / "adapter", device="cpu")
    with torch.no_grad():
        assert torch.allclose(loaded.model(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5)
    assert max(layer.output_error for layer in prove(loaded.model).layers) < ERROR
    assert max(layer.output_error for layer in prove(adapted).layers) < ERROR
    with pytest.raises(LoadError, match="cannot shuffle"):
        load(tmp_path / "adapter", weights="shuffled", device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao(plain, tmp_path, build, name):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from transformers import TorchAoConfig

    model = quantised(plain, tmp_path / "saved", build, TorchAoConfig(getattr(quantization, name)()))
    assert max(layer.output_error for layer in prove(model).layers) < ERROR
    check_folder(tmp_path / "saved", "float32", ERROR)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors(plain, tmp_path, build):
    compressed = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.data.unflatten(1, (-1, 32)).abs().amax(-1) / 7
    compressor = compressed.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "saved")
    compressor.update_config(tmp_path / "saved")
    build.tokenizer(tmp_path / "saved")
    check_folder(tmp_path / "saved", "float32", ERROR)
    # Weights are rounded to 15 values, and no further.
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        change = load(tmp_path / "saved", device="cpu").model(ids).logits - load(plain, device="cpu").model(ids).logits
    assert 0 < change.abs().max() < 0.2


def packed(numbers, order=range(8)):
    """Numbers of 4 bits ``(n, m)``, eight in an int32 ``(n, m / 8)``, the first one of an order in the lowest bits."""
    eight = numbers.unflatten(1, (-1, 8)).long()[..., list(order)]
    whole = (eight << 4 * torch.arange(8)).sum(-1)
    return torch.where(whole < 2**31, whole, whole - 2**32).int()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptq_and_awq(tmp_path, build, method):
    """4 bits in groups of 32 inputs, written by the rules of both formats; compared with the rounded weights."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    pytest.importorskip("optimum", reason="optimum is not installed")
    from safetensors.torch import load_file, save_file

    size, heads = {"hidden_size": 128, "intermediate_size": 256}, {"num_attention_heads": 4, "num_key_value_heads": 4}
    plain = build.model(tmp_path / "plain", build.config(**size, **heads))
    saved, rounded = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        rounded[name] = saved[name] = weight
        if "_proj" not in name:
            continue
        inputs = saved.pop(name).T.unflatten(0, (-1, 32))  # (groups, 32, outputs)
        scales = (inputs.abs().amax(1, keepdim=True) / 7).half().float()
        numbers = (inputs / scales).round().clamp(-8, 7)
        rounded[name] = (numbers * scales).flatten(0, 1).T.contiguous()
        numbers, scales, module = (numbers + 8).flatten(0, 1), scales[:, 0], name.removesuffix("weight")
        if method == "gptq":
            saved[f"{module}qweight"] = packed(numbers.T).T.contiguous()
            saved[f"{module}qzeros"] = packed(torch.full_like(scales, 7))  # one less than the zero
            saved[f"{module}g_idx"] = torch.arange(len(numbers), dtype=torch.int32) // 32
        else:
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            saved[f"{module}qweight"] = packed(numbers, order)
            saved[f"{module}qzeros"] = packed(torch.full_like(scales, 8), order)
        saved[f"{module}scales"] = scales.half()
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    settings |= {"desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    config = json.loads((plain / "config.json").read_text())
    for folder, weights, more in (("saved", saved, {"quantization_config": settings}), ("rounded", rounded, {})):
        build.tokenizer(tmp_path / folder)
        save_file(weights, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    check_folder(tmp_path / "saved", "float32", ERROR)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        found, expected = (load(tmp_path / name, device="cpu").model(ids).logits for name in ("saved", "rounded"))
    # Products in float16, 8 ε of logits below 1; numbers in a wrong order change them by 0.1.
    torch.testing.assert_close(found, expected, rtol=0, atol=8e-3)


@pytest.mark.slow
def test_hqq(plain):
    pytest.importorskip("hqq", reason="hqq is not installed")
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain)
    options = {"quant_config": BaseQuantizeConfig(nbits=4, group_size=32), "compute_dtype": torch.float32}
    AutoHQQHFModel.quantize_model(model, **options, device="cpu")
    assert max(layer.output_error for layer in prove(model.eval()).layers) < ERROR


@pytest.mark.slow
def test_quanto(plain):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    from transformers import AutoModelForCausalLM, QuantoConfig

    options = {"quantization_config": QuantoConfig(weights="int8"), "dtype": torch.float32, "device_map": "cpu"}
    proof = prove(AutoModelForCausalLM.from_pretrained(plain, **options).eval())
    assert max(layer.output_error for layer in proof.layers) < ERROR


def test_a_format_whose_package_is_missing_is_one_line(plain):
    file = plain / "config.json"
    config = json.loads(file.read_text())
    for method, package in (("gptq", "gptqmodel"), ("awq", "gptqmodel"), ("hqq", "hqq")):
        if importlib.util.find_spec(package) is not None:
            continue
        settings = {"quant_method": method, "bits": 4, "group_size": 32}
        file.write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(LoadError) as caught:
            load(plain, device="cpu")
        assert "\n" not in str(caught.value)
        assert load(plain, weights="random", device="cpu").weights == "random"
