"""Brute force and end-to-end: attention on a prompt is that of the captured layers, for every family and wrapper."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import wherewhat
from helpers.capture import assert_near, shared, tokens
from helpers.models import llama_config, save_model
from helpers.report import HOSTILE, unpacked
from wherewhat.errors import ConfigError, TextError
from wherewhat.report.attention_view import MOST_LOGITS, MOST_TOKENS, heads_run, parse_head, shown_rows

PROMPT = "the cat sat on a mat and the dog ran and the cat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("show") / "tiny", llama_config(), bos=True)


@pytest.fixture(scope="module")
def loaded(folder):
    return wherewhat.load(folder)


def data_of(view):
    """What the page of a view stores."""
    return json.loads(re.search(r'id="data">(.*?)</script>', view.html, re.DOTALL)[1])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text", "gpt_oss"])
def test_patterns_are_those_of_the_layers(family):
    """View and page have the softmax of captured logits: with rotation, table, bias, window or sink."""
    model, ids = shared(family), tokens(20)
    view = wherewhat.show(model, ids[0])
    layers = wherewhat.attention(model, ids)
    assert view.heads == {layer.layer: layer.heads for layer in layers}
    (model_data,) = data_of(view)["models"]
    for at, layer in enumerate(layers):
        expected = layer.pattern()[0].double()
        for head in range(layer.heads):
            assert_near(view.pattern(layer.layer, head), expected[head])
            record = model_data["records"][at][head]
            stored = np.full((20, 20), -np.inf)
            stored[np.tril_indices(20)] = np.nan_to_num(unpacked(record["documents"][0]["map"]), nan=-np.inf)
            weights = np.exp(stored - stored.max(-1, keepdims=True))
            sink = 0.0 if "sink" not in record else np.exp(record["sink"] - stored.max(-1, keepdims=True))
            # Logits are stored in 65535 steps, sinks in four digits.
            np.testing.assert_allclose(
                weights / (weights.sum(-1, keepdims=True) + sink), expected[head].numpy(), atol=2e-3
            )


def test_any_model_in_memory(folder, loaded):
    """A name, what load returned, a transformers model with its tokenizer and token ids give one view."""
    expected = wherewhat.show(loaded, PROMPT).pattern(1, 2)
    module, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for view in (
        wherewhat.show(str(folder), PROMPT),
        wherewhat.show(module, PROMPT, tokenizer=tokenizer),
        wherewhat.show(module, loaded.encode(PROMPT)),
    ):
        torch.testing.assert_close(view.pattern(1, 2), expected)
    assert not module.training or module.training == AutoModelForCausalLM.from_pretrained(folder).training


def test_an_adapter_changes_the_view(folder):
    peft = pytest.importorskip("peft")
    module = AutoModelForCausalLM.from_pretrained(folder)
    before = wherewhat.show(module, tokens(12)[0] % 16).pattern(0, 0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(module, config)
    view = wherewhat.show(adapted, tokens(12)[0] % 16)
    assert float((view.pattern(0, 0) - before).abs().max()) > 1e-3
    expected = wherewhat.attention(adapted, tokens(12) % 16)[0].pattern()[0, 0].double()
    assert_near(view.pattern(0, 0), expected)


def test_without_a_prompt_prose_and_repeated_random_tokens(loaded):
    view = wherewhat.show(loaded)
    prose, repeated = view.passages.items()
    assert prose[0] == wherewhat.embedded_documents(1)[0].name
    assert repeated[0] == "repeated random tokens"
    body = repeated[1].tokens[len(loaded.prefix) :]
    assert body[: len(body) // 2] == body[len(body) // 2 :]
    assert f"the first {len(prose[1].tokens)} are shown" in view.notes[0]
    without = wherewhat.show(loaded.model)  # without a tokenizer there is no prose
    assert list(without.passages) == ["repeated random tokens"]


def test_several_prompts(loaded):
    view = wherewhat.show(loaded, [PROMPT, "a dog and a cat"])
    assert list(view.passages) == ["text-1", "text-2"]
    assert torch.equal(view.pattern(0, 1, "text-2"), wherewhat.show(loaded, "a dog and a cat").pattern(0, 1))


def test_a_notebook_shows_a_frame_with_the_page(loaded, tmp_path):
    view = wherewhat.show(loaded, HOSTILE, head="L1H2")
    frame = view._repr_html_()
    assert frame.startswith('<iframe srcdoc="')
    assert frame.count("<") == 2  # the frame's own tags: the page inside is escaped
    assert "alert(1)</script>" not in view.html
    path = view.save(tmp_path / "page.html")
    assert path.read_text("utf-8") == view.html
    data = data_of(view)
    assert data["first"] == [1, 2]
    assert "".join(data["models"][0]["texts"][0]["tokens"][len(loaded.prefix) :]).startswith("the cat <script>")
    assert "Plotly" not in re.sub(r"<script>.*?</script>", "", view.html, flags=re.DOTALL)
    assert len(view.html) < 200_000


def test_portraits_of_a_result(loaded, tmp_path):
    result = wherewhat.measure("heads", loaded, texts=[PROMPT * 2, PROMPT * 3], out=tmp_path, queries=2)
    for heads in (result, result.path):
        view = wherewhat.show(loaded, PROMPT, heads=heads)
        roles = data_of(view)["models"][0]["roles"]["heads"]["shown"]
        assert roles[1][2]["portrait"] == view.portraits.sentences[1, 2]
    assert view.portraits.source.endswith("on 2 documents of 26 tokens: text-1, text-2.")
    axes = wherewhat.measure("axes", loaded, texts=[PROMPT])
    with pytest.raises(ConfigError, match="heads is a run of axes"):
        wherewhat.show(loaded, PROMPT, heads=axes)
    other = wherewhat.measure("heads", shared("gpt2"), tokens(24), queries=2)
    with pytest.raises(ConfigError, match="heads is of another model"):
        wherewhat.show(loaded, PROMPT, heads=other)
    assert view.notes == []
    (note,) = wherewhat.show(dataclasses.replace(loaded, name="other"), PROMPT, heads=result).notes
    assert note.endswith("with trained weights, and the attention is of other.")


def test_the_largest_run_on_texts_is_found(folder, loaded, tmp_path):
    assert heads_run(tmp_path / "none", loaded) is None
    large = wherewhat.measure("heads", str(folder), texts=[PROMPT * 2], out=tmp_path, queries=2)
    wherewhat.measure("heads", str(folder), texts=[PROMPT], out=tmp_path, queries=2)
    wherewhat.measure("heads", str(folder), prompts="random", tokens=32, documents=2, out=tmp_path, queries=2)
    wherewhat.measure("axes", str(folder), texts=[PROMPT * 2], out=tmp_path)
    wherewhat.measure("heads", shared("llama"), tokens(32), out=tmp_path, queries=2)  # another model
    assert heads_run(tmp_path, loaded).directory.path == large.path


def test_long_texts_and_many_heads_are_cut(loaded):
    view = wherewhat.show(loaded, PROMPT * 9)
    assert view.notes == ["prompt has 110 tokens; the first 32 are shown."]  # the model has 32 positions
    assert len(view.pattern(0, 0)) == 32
    assert shown_rows(9, 1) == MOST_TOKENS
    for heads, texts in ((270, 1), (270, 2), (1024, 2), (5120, 1)):
        rows = shown_rows(heads, texts)
        assert heads * texts * rows * (rows + 1) // 2 <= MOST_LOGITS < heads * texts * (rows + 1) * (rows + 2) // 2
    assert shown_rows(10**9, 1) == 1
    assert wherewhat.show(loaded, PROMPT, layers=[1]).heads == {1: 4}
    assert len(wherewhat.show(loaded, "cat").pattern(0, 0)) == 2  # BOS and one word


def test_wrong_input_is_one_line(loaded):
    for call, message in (
        (lambda: wherewhat.show(loaded, ""), "prompt has only white space"),
        (lambda: wherewhat.show(loaded, PROMPT, head="17.3"), "'17.3' is not the name of a head: write layer and head"),
        (lambda: wherewhat.show(loaded, PROMPT, head="L1H4"), "no head L1H4: layer 1 has the heads L1H0 to L1H3"),
        (
            lambda: wherewhat.show(loaded, PROMPT, head="L2H0"),
            "no head L2H0: it has the layers 0 to 1, each with the heads 0 to 3",
        ),
        (lambda: wherewhat.show(loaded, PROMPT, layers=[7]), "layers holds 7: tiny has 0 to 1"),
        (lambda: wherewhat.show(loaded, PROMPT, layers=[]), "layers is empty"),
        (lambda: wherewhat.show(loaded, PROMPT, layers=[None]), "layers holds None: give whole numbers"),
        (lambda: wherewhat.show(loaded, PROMPT, layers="01"), "layers holds '0': give whole numbers"),
        (lambda: wherewhat.show(loaded, PROMPT, layers=[0], head="L1H0"), "layers does not hold 1"),
        (lambda: wherewhat.show(loaded.model, PROMPT), "the model has no tokenizer"),
        (lambda: wherewhat.show(3, PROMPT), "model is of type int"),
        (lambda: wherewhat.show(loaded, PROMPT).pattern(0, 9), "no head L0H9"),
        (lambda: wherewhat.show(loaded, PROMPT).pattern(0, 0, "prose"), "there is no text 'prose'"),
    ):
        with pytest.raises((ConfigError, TextError)) as error:
            call()
        assert message in str(error.value)
    assert parse_head(" l17h3 ") == (17, 3)


@pytest.mark.slow
def test_smollm2_shows_the_stripe_of_its_induction_head():
    """In the second copy, L17H3 attends to the token after the first occurrence; other heads hardly do."""
    view = wherewhat.show("smollm2", layers=[17])
    (repeated,) = (name for name in view.passages if name.startswith("repeated"))

    def stripe(head):
        weights = view.pattern(17, head, repeated)
        half = len(weights) // 2
        return float(weights[half:-1].diagonal(1)[: half - 1].mean())

    assert stripe(3) > 0.6
    assert min(map(stripe, range(9))) < 0.05
