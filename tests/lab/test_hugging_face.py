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
from wherewhat_lab.hugging_face import save_hugging_face, to_hugging_face
from wherewhat_lab.model import LabModel

SMALL = LabConfig(vocabulary=40, layers=2, heads=3, width=48, biases="inner", positions=64, dropout=0.0)
SEQUENTIAL = replace(SMALL, block="sequential")
BARE = replace(SEQUENTIAL, biases="none")

LLAMA = replace(SMALL, block="llama")
ALIBI = replace(BARE, encoding="alibi")
NOPE = replace(SEQUENTIAL, encoding="nope")

CASES = {
    "llama": [LLAMA, replace(LLAMA, encoding="p-rope", heads=2), replace(LLAMA, base=500.0)],
    "gpt_neox": [
        SMALL,
        SEQUENTIAL,
        BARE,
        replace(SEQUENTIAL, encoding="partial"),
        replace(SMALL, encoding="partial", rotary_share=0.5),
        replace(SEQUENTIAL, encoding="p-rope"),
    ],
    "mpt": [ALIBI, replace(ALIBI, heads=4), replace(ALIBI, heads=6)],
    "gpt2": [replace(SEQUENTIAL, encoding="learned"), NOPE, replace(BARE, encoding="nope")],
}
LIMITS = {"llama": rounding(256), "mpt": rounding(256), "gpt_neox": 1e-12, "gpt2": 1e-12}
"""All is float64, but Llama's norms and MPT's softmax, whose float32 two layers amplify."""


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_same_logits(family):
    for config in CASES[family]:
        model = spread(LabModel(config))
        theirs = to_hugging_face(model)
        assert theirs.config.model_type == family
        assert not theirs.training
        tokens = draw(n=64)
        expected = theirs.double()(tokens).logits
        assert expected.shape == (4, 64, 40)
        assert worst(model.double()(tokens, all_tokens=True), expected) < LIMITS[family], config


def test_what_a_family_has_not_is_refused(subtests):
    for family, options in (
        ("llama", {"block": "sequential"}),
        ("llama", {"encoding": "alibi", "block": "llama"}),
        ("gpt_neox", {"biases": "all"}),
        ("gpt_neox", {"encoding": "pope"}),
        ("mpt", {"encoding": "alibi", "block": "sequential"}),
        ("gpt2", {"encoding": "rope", "block": "sequential"}),
        ("gpt2", {"encoding": "nope", "block": "sequential", "scale": 1.0}),
    ):
        with subtests.test(family=family, options=options):
            with pytest.raises(ConfigError, match="Hugging Face's") as error:
                to_hugging_face(LabModel(replace(SMALL, **options)), family)
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
