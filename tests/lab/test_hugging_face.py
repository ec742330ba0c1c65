"""Parity: laboratory models exported to Hugging Face's families give the same logits there, also out of a folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wherewhat
from helpers.lab import draw, spread
from helpers.tolerance import rounding, worst
from wherewhat.errors import ConfigError, StoreError
from wherewhat_lab.config import LabConfig
from wherewhat_lab.hugging_face import save_hugging_face, to_gpt2, to_llama, to_mpt, to_neox
from wherewhat_lab.model import LabModel

SMALL = LabConfig(vocabulary=40, layers=2, heads=3, width=48, biases="inner", positions=64, dropout=0.0)
SEQUENTIAL = replace(SMALL, block="sequential")
BARE = replace(SEQUENTIAL, biases="none")

LLAMA = replace(SMALL, block="llama")
ALIBI = replace(BARE, encoding="alibi")
NOPE = replace(SEQUENTIAL, encoding="nope")

CASES = {
    to_llama: [LLAMA, replace(LLAMA, encoding="p-rope", heads=2), replace(LLAMA, base=500.0)],
    to_neox: [
        SMALL,
        SEQUENTIAL,
        BARE,
        replace(SEQUENTIAL, encoding="partial"),
        replace(SMALL, encoding="partial", rotary_share=0.5),
        replace(SEQUENTIAL, encoding="p-rope"),
    ],
    to_mpt: [ALIBI, replace(ALIBI, heads=4), replace(ALIBI, heads=6)],
    to_gpt2: [replace(SEQUENTIAL, encoding="learned"), NOPE, replace(BARE, encoding="nope")],
}
LIMITS = {to_llama: rounding(256), to_mpt: rounding(256), to_neox: 1e-12, to_gpt2: 1e-12}
"""All is float64, but Llama's norms and MPT's softmax, whose float32 two layers amplify."""


@pytest.mark.parametrize("export", CASES, ids=lambda export: export.__name__)
@torch.no_grad()
def test_same_logits(export):
    for config in CASES[export]:
        model = spread(LabModel(config))
        theirs = export(model)
        assert not theirs.training
        tokens = draw(n=64)
        expected = theirs.double()(tokens).logits
        assert expected.shape == (4, 64, 40)
        assert worst(model.double()(tokens, all_tokens=True), expected) < LIMITS[export], config


def test_what_a_family_has_not_is_refused(subtests):
    for export, options in (
        (to_llama, {"block": "sequential"}),
        (to_llama, {"encoding": "alibi", "block": "llama"}),
        (to_neox, {"biases": "all"}),
        (to_neox, {"encoding": "pope"}),
        (to_mpt, {"encoding": "alibi", "block": "sequential"}),
        (to_gpt2, {"encoding": "rope", "block": "sequential"}),
        (to_gpt2, {"encoding": "nope", "block": "sequential", "scale": 1.0}),
    ):
        with subtests.test(export=export.__name__, options=options):
            with pytest.raises(ConfigError, match="Hugging Face's") as error:
                export(LabModel(replace(SMALL, **options)))
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"biases": "all"}, marks=pytest.mark.slow),
        {"block": "llama"},
        pytest.param({"block": "sequential"}, marks=pytest.mark.slow),
        pytest.param({"block": "sequential", "encoding": "alibi"}, marks=pytest.mark.slow),
        pytest.param({"block": "sequential", "encoding": "nope"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_folders_are_loaded_and_proved(tmp_path, options):
    model = spread(LabModel(replace(BARE, vocabulary=256, layers=1, **{"block": "parallel", **options})))
    save_hugging_face(model, tmp_path / "model")
    loaded = wherewhat.load(str(tmp_path / "model"))
    text = "Call me Ishmael. Some years ago\n— never mind how long"
    ids = loaded.encode(text)
    assert ids.tolist() == list(text.encode())
    assert loaded.tokenizer.decode(ids) == text
    # Sums of 48 and 192 terms in float32.
    assert worst(model(ids[None], all_tokens=True), loaded.model(ids[None]).logits) < rounding(256)
    with pytest.raises(StoreError):
        save_hugging_face(model, tmp_path / "model")


def test_folders_of_what_nobody_has_are_refused(tmp_path):
    for options, message in (({"vocabulary": 40}, "not that of bytes"), ({"encoding": "pope"}, "encoding='pope'")):
        with pytest.raises(ConfigError, match=message):
            save_hugging_face(LabModel(replace(BARE, **{"vocabulary": 256, **options})), tmp_path / "model")
        assert not list(tmp_path.iterdir())
