"""Identity: a proof prints as a short table, escaped in HTML, and its values are JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import wherewhat
from conformance.tiny_models import build
from helpers.models import llama_config
from wherewhat.captures.layer_proofs import ProofTable
from wherewhat.captures.proof import capture, prove
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.scores import Column, Scores


@pytest.fixture(scope="module")
def gemma():
    return build("gemma4_text").model


@pytest.fixture(scope="module")
def proof(gemma):
    return prove(gemma)


def test_equal_layers_share_a_line(proof):
    first, header, *lines = repr(proof).splitlines()
    assert first == (
        "Proof of Gemma4ForCausalLM (gemma4_text, float32 on cpu), model.layers.*.self_attn: interface route, "
        "sdpa attention, errors up to 5e-05 are allowed"
    )
    assert header.split() == ["layer", "heads", "rotation", "also", "error"]
    assert [line[: header.index("error")].rstrip() for line in lines] == [
        "0, 2   4 / 2 kv  half, 8 planes             window 8, base 10,000",
        "1, 3   4 / 2 kv  half, 4 of 16 planes turn  full, base 1,000,000",
    ]
    assert all(float(line[header.index("error") :]) <= proof.tolerance for line in lines)


def test_many_layers_do_not_make_it_longer():
    model = AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=12)).eval()
    proof = prove(model)
    assert len(repr(proof)) < 400
    assert len(proof.table(each=True).rows) == len(proof.as_dict()["layers"]) == 12


def test_layers_without_attention_are_listed_with_their_reason():
    proof = prove(build("jamba").model)
    assert repr(proof).splitlines()[-2:] == [
        "0, 2             not measured",
        "Layers 0, 2: no softmax self-attention: mamba (JambaMambaMixer).",
    ]
    assert proof.as_dict()["unmeasured"] == [
        {"layer": layer, "name": f"model.layers.{layer}", "reason": "mamba (JambaMambaMixer)"} for layer in (0, 2)
    ]


def test_html_is_escaped(proof):
    hostile = "<img src=x onerror=alert(1)>"
    layers = tuple(replace(layer, features=(hostile,)) for layer in proof.layers)
    shown = replace(proof, name=hostile, implementation=hostile, layers=layers)._repr_html_()
    assert "<img" not in shown
    assert shown.count("&lt;img src=x") == 2 + 2
    assert shown.count("<tr>") == 1 + 2


def test_text_and_html_have_the_same_cells():
    table = ProofTable("title", ("layer", "error"), (("0-3", "1e-07"), ("4", "")), ("A remark.",))
    assert table.text() == "title\nlayer  error\n0-3    1e-07\n4\nA remark."
    cells = "".join(f"<tr><td>{layer}</td><td>{error}</td></tr>" for layer, error in table.rows)
    header = "<thead><tr><th>layer</th><th>error</th></tr></thead>"
    assert table.html() == (f"<table><caption>title</caption>{header}<tbody>{cells}</tbody></table><p>A remark.</p>")


def test_values_are_json_and_complete(proof):
    values = proof.as_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["proved"] is True
    assert (values["name"], values["model_type"]) == ("Gemma4ForCausalLM", "gemma4_text")
    assert (values["route"], values["implementation"]) == ("interface", "sdpa")
    assert (values["dtype"], values["device"], values["tolerance"]) == ("float32", "cpu", 5e-5)
    assert (values["tokens"], values["output_change"]) == (23, 0)
    assert values["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert values["versions"]["transformers"] == transformers.__version__
    assert values["versions"]["wherewhat"]
    for layer, found in zip(proof.layers, values["layers"], strict=True):
        assert found["name"] == f"model.layers.{found['layer']}.self_attn" == layer.layout.name
        assert (found["heads"], found["kv_heads"], found["head_dim"]) == (4, 2, layer.head_dim)
        assert found["errors"]["output"] == layer.output_error
        assert max(found["errors"].values()) <= 0.1
    local, full = values["layers"][:2]
    assert (local["rotation"], local["window"]) == ({"pairing": "half", "planes": 8, "turning": 8}, 8)
    assert (full["rotation"], full["window"]) == ({"pairing": "half", "planes": 16, "turning": 4}, None)
    assert (local["kind"], full["kind"]) == ("window 8, RoPE base 10,000", "full, RoPE base 1,000,000")


def test_a_layer_without_rotation_has_none():
    values = prove(build("hunyuan_v1_dense").model).as_dict()
    assert values["layers"][0]["rotation"] is None
    assert values["layers"][0]["note"].startswith("a norm with weights follows the rotation")


def test_objects_with_tensors_print_in_a_line(gemma, proof):
    layers = []
    with torch.no_grad(), capture(gemma, layers.append):
        gemma(torch.arange(20)[None])
    window = ", window 8"
    assert [repr(layer) for layer in layers[:2]] == [
        f"LayerAttention(layer 0, 4 heads / 2 kv, 20 tokens, d 16, RoPE half{window}, float32 on cpu)",
        "LayerAttention(layer 1, 4 heads / 2 kv, 20 tokens, d 32, RoPE half, float32 on cpu)",
    ]
    assert repr(proof.layout) == "CaptureLayout(interface route, 4 layers)"
    assert repr(proof.layers[1]).startswith(
        "LayerProof(layer 1, 4 heads / 2 kv, d 32, RoPE half, 4 of 16 planes turn, error "
    )
    assert repr(layers[1].rotation) == "Rotation(pairing='half', offset=0, inv_freq=float32[16], scaling=1)"
    assert "\n" not in repr(layers[0].mask)
    fit = fit_axes(layers[1].rot_q[0], layers[1].rot_q[0])
    assert repr(fit).startswith("AxesFit(r=float64[4], r_subset={a, b, c, ab, ac, bc, abc: float64[4] each}, ")
    assert len(repr(fit)) < 500


def test_models_and_texts_print_in_a_line(model):
    loaded = wherewhat.load(model, device="cpu")
    assert repr(loaded) == "LoadedModel('tiny', LlamaForCausalLM, trained weights, float32 on cpu)"
    (document,) = wherewhat.embedded_documents(1)
    size = f"{len(document.text):,} characters"
    assert repr(document) == f"Document({document.name!r}, {size}, source='embedded')"
    assert repr(wherewhat.Document("ids", "", ids=(1, 2))) == "Document('ids', 2 token ids, source='memory')"


def test_long_sequences_are_shortened():
    layer = Scores(
        layer=3,
        heads={"r": torch.ones(9)},
        whole={"floor": 0.123456},
        curves={"a": Column(torch.ones(9, 5), ("head", "lag"))},
    )
    shown = (
        "Scores(layer=3, heads={r: float32[9]}, whole={floor: 0.1235}, "
        "curves={a: Column(values=float32[9, 5], axes=['head', 'lag'])}, layers=[])"
    )
    assert repr(layer) == shown
    assert repr(Scores(layers=[layer] * 30)) == (
        f"Scores(layer=-1, heads={{}}, whole={{}}, curves={{}}, layers=[{', '.join([shown] * 4)}, … 30 in all])"
    )
