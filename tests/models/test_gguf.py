"""Brute force, parity and end-to-end: GGUF files are read rightly, cached, and honour their BOS token."""

import errno
import functools
import gc
import json
import os
import struct
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import real_models
from wherewhat.errors import LoadError
from wherewhat.models.gguf import cached_conversion, check_tokenizer, convert
from wherewhat.models.gguf_file import GgufFile, StoredTensor, dequantised
from wherewhat.models.loader import load
from wherewhat.models.source import resolve


def folders(cache):
    return [entry for entry in (cache / "models").iterdir() if entry.is_dir()]


def reference_logits(tensors: dict[str, np.ndarray], ids: list[int]) -> torch.Tensor:
    """A llama forward pass written from llama.cpp's conventions: neighbouring pairs rotate together."""
    t = {name: torch.from_numpy(value.copy()).double() for name, value in tensors.items()}
    heads, kv_heads, size, n = 4, 2, 8, len(ids)

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def rotate(x):  # (n, heads, size)
        frequency = 10000.0 ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.arange(n).double()[:, None] * frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    x = t["token_embd.weight"][ids]
    mask = torch.full((n, n), float("-inf")).double().triu(1)
    for layer in range(2):
        w = {name.removeprefix(f"blk.{layer}.").removesuffix(".weight"): v for name, v in t.items()}
        h = norm(x, w["attn_norm"])
        q = rotate((h @ w["attn_q"].T).view(n, heads, size))
        k = rotate((h @ w["attn_k"].T).view(n, kv_heads, size)).repeat_interleave(heads // kv_heads, 1)
        v = (h @ w["attn_v"].T).view(n, kv_heads, size).repeat_interleave(heads // kv_heads, 1)
        pattern = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / size**0.5 + mask, -1)
        x = x + torch.einsum("hqk,khd->qhd", pattern, v).flatten(1) @ w["attn_output"].T
        h = norm(x, w["ffn_norm"])
        x = x + (torch.nn.functional.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return norm(x, t["output_norm.weight"]) @ t["token_embd.weight"].T


def test_loaded_gguf_equals_forward_pass_in_llama_cpp_conventions(build, tmp_path, no_network):
    tensors = build.gguf(tmp_path / "tiny.gguf")
    loaded = load(tmp_path / "tiny.gguf", dtype="float64", device="cpu", cache_dir=tmp_path / "cache")
    ids = [5, 77, 31, 200, 9, 9, 120, 44]
    with torch.no_grad():
        ours = loaded.model(torch.tensor([ids])).logits[0]
    assert torch.allclose(ours, reference_logits(tensors, ids), atol=2e-5)  # its rotary angles are float32
    assert no_network == []


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_bos_follows_the_file_and_else_llama_cpp(build, tmp_path, tokenizer):
    cases = [(True, None, True), (False, None, False), (None, None, False), (None, "llama-bpe", True)]
    cases = [*cases, (False, "llama-bpe", False)] if tokenizer == "gpt2" else [(None, None, True), (False, None, False)]
    for add_bos, pre, expected in cases:
        build.gguf(tmp_path / "m.gguf", tokenizer=tokenizer, add_bos=add_bos, pre=pre)
        for _ in range(2):  # the second time from the cache
            loaded = load(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "cache")
            ids = loaded.encode("the cat")
            assert loaded.adds_bos is expected, (add_bos, pre)
            assert (ids[0].item() == 1) is expected
            assert (ids == 1).sum().item() == int(expected)
            assert 2 not in ids


def test_second_load_uses_the_cache_and_gives_the_same(build, tmp_path, monkeypatch, capfd):
    build.gguf(tmp_path / "m.gguf")
    said = []
    first = load(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "c", progress=said.append)
    second = load(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "c", progress=said.append)
    assert len(said) == 1
    assert first.weights_hash == second.weights_hash
    assert first.tokenizer_hash == second.tokenizer_hash
    assert len(folders(tmp_path / "c")) == 1
    assert capfd.readouterr().err == ""
    (folder,) = folders(tmp_path / "c")
    assert not list(folder.glob("*.safetensors"))
    before = (tmp_path / "m.gguf").read_bytes()
    for weights in ("shuffled", "random"):
        load(tmp_path / "m.gguf", weights=weights, device="cpu", cache_dir=tmp_path / "c")
    assert (tmp_path / "m.gguf").read_bytes() == before
    monkeypatch.setenv("WHEREWHAT_CACHE", str(tmp_path / "elsewhere"))
    load(tmp_path / "m.gguf", device="cpu")
    assert len(folders(tmp_path / "elsewhere")) == 1


def test_damaged_cache_is_noticed_and_redone(build, tmp_path):
    build.gguf(tmp_path / "m.gguf")
    cache = tmp_path / "c"
    first = load(tmp_path / "m.gguf", device="cpu", cache_dir=cache)
    good = first.model.model.embed_tokens.weight.clone()
    (folder,) = folders(cache)
    rules, manifest = folder / "tokenizer.json", folder / "manifest.json"
    content = rules.read_bytes()
    for damage in ("no manifest", "cut", "flipped", "missing", "garbled manifest"):
        if damage == "no manifest":  # as a killed conversion leaves it, with its draft beside it
            manifest.unlink()
            (folder.parent / f".{folder.name}.12345").mkdir()
        elif damage == "cut":
            rules.write_bytes(content[:-100])
        elif damage == "flipped":
            rules.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        elif damage == "missing":
            rules.unlink()
        else:
            manifest.write_text("{")
        said = []
        again = load(tmp_path / "m.gguf", device="cpu", cache_dir=cache, progress=said.append)
        assert len(said) == 1, damage
        assert torch.equal(again.model.model.embed_tokens.weight, good)
        assert rules.read_bytes() == content
        assert set(json.loads(manifest.read_text())["files"]) <= {entry.name for entry in folder.iterdir()}
        assert [entry.name for entry in (cache / "models").iterdir() if entry.name.startswith(".")] == []


def _load_once(path, cache, queue):
    queue.put(load(path, device="cpu", cache_dir=cache).weights_hash)


@pytest.mark.slow
def test_two_processes_share_one_cache(build, tmp_path, processes):
    build.gguf(tmp_path / "m.gguf")
    queue = processes.Queue()
    both = [processes.Process(target=_load_once, args=(tmp_path / "m.gguf", tmp_path / "c", queue)) for _ in range(2)]
    for process in both:
        process.start()
    hashes = [queue.get(timeout=120) for _ in both]
    for process in both:
        process.join()
    assert hashes[0] == hashes[1]
    (folder,) = folders(tmp_path / "c")
    assert (folder / "manifest.json").is_file()


def test_truncated_and_corrupted_gguf_is_one_line(build, tmp_path):
    path = tmp_path / "m.gguf"
    build.gguf(path)
    content = path.read_bytes()
    broken = [content[: int(part)] for part in (3, 200, *(len(content) * part for part in (0.3, 0.7, 0.99)))]
    broken += [content[:start] + b"\xff" * 8 + content[start + 8 :] for start in (8, 16, 30, 60, 400)]
    for number, data in enumerate(broken):
        path.write_bytes(data)
        known = r"truncated or corrupted|not a GGUF file" if number < 5 else None
        with pytest.raises(LoadError, match=known) as caught:
            load(path, device="cpu", cache_dir=tmp_path / "c")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "c" / "models").exists() or folders(tmp_path / "c") == []


def test_gguf_that_cannot_be_read_rightly_is_refused(build, tmp_path):
    gguf = pytest.importorskip("gguf")
    bias, divisors = np.zeros(32, dtype=np.float32), np.ones(4, dtype=np.float32)
    (tmp_path / "text.gguf").write_text("hello")
    build.gguf(tmp_path / "less.gguf", drop={"blk.1.attn_q.weight"})
    build.gguf(tmp_path / "bias.gguf", extra=lambda w: w.add_tensor("blk.0.attn_q.bias", bias))
    build.gguf(tmp_path / "rope.gguf", extra=lambda w: w.add_tensor("rope_freqs.weight", divisors))
    writer = gguf.GGUFWriter(tmp_path / "space.gguf", "mamba")
    writer.add_block_count(1)
    writer.add_context_length(8)
    writer.add_embedding_length(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name, match in {
        "text": "not a GGUF file",
        "less": r"no weights for model.layers.1.self_attn.q_proj.weight",
        "bias": "weights, but transformers builds",
        "rope": "scaled rotary frequencies",
        "space": "state-space",
    }.items():
        with pytest.raises(LoadError, match=match):
            load(tmp_path / f"{name}.gguf", cache_dir=tmp_path / "c")


@pytest.fixture
def in_this_process(monkeypatch):
    """Convert in this process, in which a test can replace functions."""
    run = lambda step, *, spec, seconds, limit_memory, **arguments: step(**arguments)  # noqa: E731
    monkeypatch.setattr("wherewhat.models.gguf.attempt", run)


@pytest.mark.usefixtures("in_this_process")
def test_full_or_unwritable_disk_is_one_line_and_leaves_nothing(build, tmp_path, monkeypatch):
    build.gguf(tmp_path / "m.gguf")
    (tmp_path / "file").write_text("a file stands where the cache should be")
    with pytest.raises(LoadError, match="WHEREWHAT_CACHE"):
        load(tmp_path / "m.gguf", cache_dir=tmp_path / "file")

    def full(config, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transformers.PreTrainedConfig.save_pretrained", full)
    with pytest.raises(LoadError, match="No space left on device"):
        load(tmp_path / "m.gguf", cache_dir=tmp_path / "c")
    assert [entry.suffix for entry in (tmp_path / "c" / "models").iterdir()] == [".lock"]


def same_as_transformers(path, cache):
    """Compare weights, buffers, config and token ids of a loaded GGUF file with those of transformers' own loader."""
    gguf = pytest.importorskip("gguf")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with pytest.MonkeyPatch.context() as patch:  # transformers parses the file four times: so once
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        own = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    for _ in range(2):  # the second time from the cache
        loaded = load(path, device="cpu", cache_dir=cache)
        for kind in ("named_parameters", "named_buffers"):
            expected, tensors = dict(getattr(own, kind)()), dict(getattr(loaded.model, kind)())
            assert expected.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert tensor.dtype == expected[name].dtype, name
                assert tensor.numpy().tobytes() == expected[name].detach().numpy().tobytes(), name
        differing = {"_name_or_path", "quantization_config", "architectures", "transformers_version"}
        settings, expected = loaded.model.config.to_dict(), own.config.to_dict()
        assert {name for name in settings if settings[name] != expected.get(name)} <= differing
        text = "The cat sat on the hats, and the other one ate the moth.\n\n  Then 12 hens."
        assert loaded.tokenizer(text, add_special_tokens=False) == tokenizer(text, add_special_tokens=False)


@pytest.mark.parametrize("tokenizer", ["gpt2", "llama"])
def test_loading_equals_that_of_transformers(build, tmp_path, tokenizer):
    build.gguf(tmp_path / "m.gguf", tokenizer=tokenizer)
    same_as_transformers(tmp_path / "m.gguf", tmp_path / "c")


def test_weights_are_the_same_in_the_order_of_sizes(build, tmp_path):
    build.gguf(tmp_path / "m.gguf")
    conversion = cached_conversion(tmp_path / "m.gguf", tmp_path / "c")
    plain, ordered = dict(conversion.weights()), dict(conversion.weights(smallest_first=True))
    sizes = [weight.numel() for weight in ordered.values()]
    assert sizes == sorted(sizes)
    assert plain.keys() == ordered.keys()
    assert all(torch.equal(plain[name], weight) for name, weight in ordered.items())


def test_layers_on_disk_and_other_dtypes(build, tmp_path):
    pytest.importorskip("accelerate")
    build.gguf(tmp_path / "m.gguf")
    plain = load(tmp_path / "m.gguf", device="cpu", cache_dir=tmp_path / "c")
    ids = torch.arange(5, 25)[None]
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = load(tmp_path / "m.gguf", device_map=places, cache_dir=tmp_path / "c")
    assert spread.device == "cpu+offloaded"
    with torch.no_grad():
        assert torch.equal(spread.model(ids).logits, plain.model(ids).logits)
    coarse = load(tmp_path / "m.gguf", device="cpu", dtype="bfloat16", cache_dir=tmp_path / "c")
    for name, weights in plain.model.named_parameters():
        assert torch.equal(coarse.model.get_parameter(name), weights.bfloat16()), name
    del spread
    gc.collect()
    assert [entry.name for entry in (tmp_path / "c" / "models").iterdir() if entry.name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SmolLM2-135M", "Gemma-3-270M"])
def test_loading_real_models_equals_that_of_transformers(tmp_path, name):
    if name == "SmolLM2-135M":
        path = resolve("smollm2").gguf
    else:
        try:
            path = Path(real_models.fetch(name))
        except real_models.UnavailableError as error:
            pytest.skip(str(error))
    same_as_transformers(path, tmp_path / "c")


@pytest.mark.parametrize("rows", [1, 3, 1500])
def test_dequantised_tensors_equal_those_of_gguf_to_the_bit(rows):
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(rows)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1")]
    kinds += [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]
    tensors = []
    for kind in kinds:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (rows, 512 // block * size), dtype=np.uint8)
        if kind.name in ("F32", "F16"):
            data = data.view(kind.name.lower().replace("f32", "f4").replace("f16", "f2"))
        tensors.append(StoredTensor(kind.name, kind, rows * 512, data))
    with np.errstate(all="ignore"):
        for tensor, entries in dequantised(tensors):
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            numbers = ~np.isnan(expected)  # of which the bits are not defined
            assert (np.isnan(entries) == ~numbers).all()
            assert entries[numbers].tobytes() == expected[numbers].tobytes(), tensor.name
            assert entries.ctypes.data % 64 == 0


def test_parsed_files_equal_those_of_gguf(build, tmp_path):
    gguf = pytest.importorskip("gguf")
    build.gguf(tmp_path / "m.gguf", tokenizer="llama", extra=lambda writer: writer.add_array("a.b", [1.5, 2.5]))
    file, expected = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    own = {name: field for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert list(file.fields) == list(own)
    for name, field in own.items():
        assert file.fields[name].value() == field.contents(), name
        assert file.fields[name].types == field.types, name
    for tensor, other in zip(file.tensors, expected.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.n_elements) == (other.name, other.tensor_type, other.n_elements)
        assert tensor.data.dtype == other.data.dtype
        assert np.array_equal(tensor.data, other.data)


@pytest.mark.slow
def test_smollm2_reads_english(tmp_path):
    text = (
        "The water cycle describes how water moves between the land, the oceans and the air. Heat from the "
        "sun makes water evaporate from the surface of seas, lakes and rivers. The water vapour rises, "
        "cools, and condenses into tiny droplets that form clouds. When the droplets grow heavy enough,"
        "they fall back to the ground."
    )
    loaded = load("smollm2", device="cpu", offline=True)
    assert loaded.name == "SmolLM2-135M-Instruct"
    ids = loaded.encode(text)
    with torch.no_grad():
        loss = loaded.model(ids[None], labels=ids[None]).loss
    assert loss.exp().item() < 20


@pytest.mark.usefixtures("in_this_process")
def test_a_file_is_parsed_once_for_its_settings(build, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    build.gguf(tmp_path / "tiny.gguf")
    parsed, reader = [], gguf.GGUFReader
    monkeypatch.setattr("wherewhat.models.gguf.GgufFile", lambda path: parsed.append(path) or GgufFile(path))
    load(tmp_path / "tiny.gguf", device="cpu", cache_dir=tmp_path / "cache")
    assert len(parsed) == 3  # settings, weights in the trial, weights
    assert gguf.GGUFReader is reader
    load(tmp_path / "tiny.gguf", device="cpu", cache_dir=tmp_path / "cache")
    assert len(parsed) == 4


def test_overlapping_tensors_and_big_endian_files_are_refused(tmp_path):
    """Forty tensors on the same 32 KiB; the number of a version with its bytes reversed."""
    architecture = _string("general.architecture") + struct.pack("<I", 8) + _string("llama")
    tensors = (_string(f"x{i}") + struct.pack("<IQIQ", 1, 8192, 0, 0) for i in range(40))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 40, 1) + architecture + b"".join(tensors) + bytes(40_000))
    with pytest.raises(LoadError, match=r"corrupted \(tensors that overlap\)"):
        convert(str(path), str(tmp_path))
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(100))
    with pytest.raises(LoadError, match="cannot be read: big-endian numbers are not supported"):
        convert(str(path), str(tmp_path))


def _string(text):
    return struct.pack("<Q", len(text)) + text.encode()


def test_tokenizers_that_would_split_otherwise():
    for size, merges, refused in ((2000, [], True), (2000, [("t1", "t2")], False), (200, [], False)):
        vocab = {f"t{index}": index for index in range(size)} | {"t1t2": size}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, merges)))
        merged = "without its merges, and would split texts into single characters"
        with pytest.raises(LoadError, match=merged) if refused else nullcontext():
            check_tokenizer(tokenizer, "model.gguf", "gpt2")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(Unigram([("a", -1.0), ("b", -2.0)])))
    check_tokenizer(tokenizer, "model.gguf", "t5")
    with pytest.raises(LoadError, match="as a unigram model, and would split words otherwise"):
        check_tokenizer(tokenizer, "model.gguf", "llama")
