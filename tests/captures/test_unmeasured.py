"""End-to-end: a proof says which layers of a hybrid model have no attention, and which planes do not turn."""

from __future__ import annotations

import pytest
import torch

from helpers.capture import tiny
from wherewhat.captures.proof import prove

# What the blocks of tiny models have in place of softmax self-attention, by index.
HYBRIDS = {
    "jamba": {0: "mamba (JambaMambaMixer)", 2: "mamba (JambaMambaMixer)"},
    "bamba": dict.fromkeys((0, 2), "linear_attention (BambaMixer)"),
    "granitemoehybrid": dict.fromkeys((0, 2), "linear_attention (GraniteMoeHybridMambaLayer)"),
    "qwen3_next": dict.fromkeys((0, 2), "linear_attention (Qwen3NextGatedDeltaNet)"),
    "lfm2": dict.fromkeys((0, 2), "conv (Lfm2ShortConv)"),
    "minimax": dict.fromkeys((1, 3), "linear_attention (MiniMaxLightningAttention)"),
    "nemotron_h": {
        0: "linear_attention (NemotronHMamba2Mixer)",
        1: "moe (NemotronHMoE)",
        3: "mlp (NemotronHMLP)",
    },
    "recurrent_gemma": dict.fromkeys((0, 1, 3), "recurrent (RecurrentGemmaRecurrentBlock)"),
    "zamba2": dict.fromkeys((0, 1, 3), "linear_attention (Zamba2MambaMixer)"),  # the others share one attention
    "mllama": {1: "MllamaTextCrossAttention"},  # its config does not name kinds
    "falcon_h1": {},  # every layer has both
    "llama": {},
    "gpt2": {},
}


QUICK = ["jamba", "nemotron_h", "mllama", "falcon_h1", "llama"]


@pytest.mark.parametrize(
    "model_type", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS if name not in QUICK)]
)
def test_layers_without_attention_are_named(model_type):
    proof = prove(tiny(model_type))
    assert {layer.layer: layer.reason for layer in proof.unmeasured} == HYBRIDS[model_type]
    measured = {layer.layout.layer for layer in proof.layers}
    assert measured.isdisjoint(HYBRIDS[model_type])
    assert measured | set(HYBRIDS[model_type]) == set(range(len(measured) + len(HYBRIDS[model_type])))


def test_planes_that_do_not_turn_are_counted():
    rotations = [layer.layout.rotation for layer in prove(tiny("gemma4_text")).layers]
    assert [(r.turning, r.planes) for r in rotations] == [(8, 8), (4, 16), (8, 8), (4, 16)]
    assert all(bool(torch.all(r.inv_freq[r.turning :] == 0)) for r in rotations)
