"""Parity: laboratory models exported to Hugging Face's families give the same logits there, also out of a folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wherewhat
from helpers.lab import draw, spread
from wherewhat.errors import ConfigError, StoreError
from wherewhat.lab.config import LabConfig
from wherewhat.lab.hugging_face import save_hugging_face, to_gpt2, to_llama, to_mpt, to_neox
from wherewhat.lab.model import LabModel

SMALL = LabConfig(vocabulary=40, layers=2, heads=3, width=48, biases="inner", positions=64, dropout=0.0)
SEQUENTIAL = replace(SMALL, block="sequential")
BARE = replace(SEQUENTIAL, biases="none")

CASES = {
    "llama": (to_llama, replace(SMALL, block="llama")),
    "llama, p-rope": (to_llama, replace(SMALL, block="llama", encoding="p-rope", heads=2)),
    "llama, another base": (to_llama, replace(SMALL, block="llama", base=500.0)),
    "neox, parallel": (to_neox, SMALL),
    "neox, sequential": (to_neox, SEQUENTIAL),
    "neox, no biases": (to_neox, BARE),
    "neox, partial": (to_neox, replace(SEQUENTIAL, encoding="partial")),
    "neox, half": (to_neox, replace(SMALL, encoding="partial", rotary_share=0.5)),
    "neox, p-rope": (to_neox, replace(SEQUENTIAL, encoding="p-rope")),
    "mpt": (to_mpt, replace(BARE, encoding="alibi")),
    "mpt, 4 heads": (to_mpt, replace(BARE, encoding="alibi", heads=4)),
    "mpt, 6 heads": (to_mpt, replace(BARE, encoding="alibi", heads=6)),
    "gpt2": (to_gpt2, replace(SEQUENTIAL, encoding="learned")),
    "gpt2, nope": (to_gpt2, replace(SEQUENTIAL, encoding="nope")),
    "gpt2, no biases": (to_gpt2, replace(BARE, encoding="nope")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_same_logits(case):
    export, config = CASES[case]
    model = spread(LabModel(config))
    theirs = export(model)
    tokens = draw(n=64)
    expected = theirs(tokens).logits
    assert expected.shape == (4, 64, 40)
    scale = max(1.0, float(expected.abs().max()))
    assert float((model(tokens, all_tokens=True) - expected).abs().max()) < 1e-5 * scale
    assert not theirs.training


@pytest.mark.parametrize(
    ("export", "options"),
    [
        (to_llama, {"block": "sequential"}),
        (to_llama, {"encoding": "alibi", "block": "llama"}),
        (to_neox, {"biases": "all"}),
        (to_neox, {"encoding": "pope"}),
        (to_mpt, {"encoding": "alibi", "block": "sequential"}),
        (to_gpt2, {"encoding": "rope", "block": "sequential"}),
        (to_gpt2, {"encoding": "nope", "block": "sequential", "scale": 1.0}),
    ],
)
def test_what_a_family_has_not_is_refused(export, options):
    with pytest.raises(ConfigError, match="Hugging Face's") as error:
        export(LabModel(replace(SMALL, **options)))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"biases": "all"},
        {"block": "llama"},
        {"block": "sequential"},
        {"block": "sequential", "encoding": "alibi"},
        {"block": "sequential", "encoding": "nope"},
    ],
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
    expected = loaded.model(ids[None]).logits
    scale = max(1.0, float(expected.abs().max()))
    assert float((model(ids[None], all_tokens=True) - expected).abs().max()) < 1e-5 * scale
    with pytest.raises(StoreError):
        save_hugging_face(model, tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"), [({"vocabulary": 40}, "not that of bytes"), ({"encoding": "pope"}, "encoding='pope'")]
)
def test_folders_of_what_nobody_has_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        save_hugging_face(LabModel(replace(BARE, **{"vocabulary": 256, **options})), tmp_path / "model")
    assert not list(tmp_path.iterdir())
