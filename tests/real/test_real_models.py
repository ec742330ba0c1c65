"""End-to-end: trained models, with all that random weights do not have, pass the proof and every measurement."""

from __future__ import annotations

import pytest
import torch

import wherewhat
from wherewhat.captures.layer_proofs import layer_kinds
from wherewhat.cli.main import run_cli
from wherewhat.measures.removal import RemovalConfig, measure_removals
from wherewhat.measures.tensors import next_token_loss
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import ModelSubject

pytestmark = pytest.mark.slow

SHAPES = {"smollm2": (30, 9), "gemma": (18, 4)}
LOCAL, GLOBAL = "window 512, RoPE base 10,000", "full, RoPE base 1,000,000"
MEASUREMENTS = {
    "axes": (64, {}),
    "heads": (48, {"queries": 4}),
    "planes": (64, {}),
    "frequencies": (24, {"bands": 2}),
    "residual": (48, {"strengths": (0.0, 1.0), "axes": False, "layers": False}),
}
"""Tokens and options of each: what is measured does not matter here, that it is measured does."""


@pytest.fixture(params=list(SHAPES), scope="session")
def model(request) -> tuple[str, int, int]:
    """What to load, its number of layers and of heads."""
    return request.getfixturevalue(request.param), *SHAPES[request.param]


def test_every_layer_is_proved(model, kept):
    name, layers, heads = model
    proof = kept.proof(name)
    assert proof.ok
    assert [layer.layout.layer for layer in proof.layers] == list(range(layers))
    assert {layer.heads for layer in proof.layers} == {heads}
    assert all(layer.layout.rotation is not None for layer in proof.layers)


def test_every_measurement_delivers(model, kept, subtests):
    name, layers, heads = model
    for measurement, (tokens, options) in MEASUREMENTS.items():
        with subtests.test(measurement=measurement):
            result = kept.run(name, measurement, tokens=tokens, **options)
            first = result.summary()[0]
            assert torch.tensor([summary.overall.mean for summary in result.summary()]).isfinite().all()
            if measurement != "residual":  # its numbers are of the model as a whole
                assert list(first.layers) == list(range(layers))
                scores = result.scores().to_pandas()
                assert (scores[scores.metric == first.metric.name].groupby("layer")["head"].nunique() == heads).all()


def test_the_command_proves_the_embedded_model(smollm2, capfd):
    assert run_cli(["check", smollm2, "--device", "cpu"]) == 0
    assert "proved. Capturing changes the model's output by 0." in capfd.readouterr().out


def test_residual_of_full_strength_is_the_model(model, kept):
    """Identity: the attention that is put in place of the model's at λ = 1 gives its loss."""
    tokens, options = MEASUREMENTS["residual"]
    result = kept.run(model[0], "residual", tokens=tokens, **options)
    found = {summary.metric.name: summary.overall.mean for summary in result.summary()}
    assert found["loss_strength_1"] == pytest.approx(found["loss"], abs=1e-4)
    assert found["loss"] < 6  # nats; a guess among its 49,152 or 262,144 tokens would cost 10.8 or 12.5


def test_heads_removed_in_batches_equal_one_at_a_time_by_hooks(model, kept):
    """Brute force: first, middle and last layer. Identity: the parts of every logit sum to it, or it is refused."""
    name, layers, heads = model
    loaded, subject = kept.loaded(name), ModelSubject(kept.loaded(name), kept.proof(name))
    ids = loaded.encode("Call me Ishmael. Some years ago, never mind how long precisely, I went to sea.", tokens=16)[
        None
    ]
    chosen = (0, layers // 2, layers - 1)
    (scores,) = measure_removals(subject, ids, RemovalConfig(layers=chosen, mean=False, control=False))
    assert all("direct_logit" in layer.heads for layer in scores.layers)
    for layer in scores.layers:
        for head in (0, heads - 1):
            projection = loaded.model.get_submodule(kept.proof(name).layers[layer.layer].layout.name).o_proj
            width = projection.in_features // heads
            span = slice(head * width, (head + 1) * width)

            def remove(_, args, span=span):
                z = args[0].clone()
                z[..., span] = 0
                return (z,)

            handle = projection.register_forward_pre_hook(remove)
            with torch.no_grad():
                loss = next_token_loss(loaded.model(ids, use_cache=False).logits, ids)
            handle.remove()
            assert float(layer.heads["removal_loss"][head]) == pytest.approx(loss - scores.whole["loss"], abs=1e-5)


def test_gemma_has_planes_without_energy(gemma, kept):
    """Norm weights of exactly zero leave nothing of queries or keys in some planes, which no pass can see turn."""
    loaded, proof = kept.loaded(gemma), kept.proof(gemma)
    dead: dict[int, int] = {}

    def count(attention: wherewhat.LayerAttention) -> None:
        assert attention.rotation is not None
        pairs = attention.rotation.pairs
        empty = [(x[..., pairs].square().sum(-1) == 0).all((0, 1, 2)) for x in (attention.q, attention.k)]
        if together := int((empty[0] & empty[1]).sum()):
            dead[attention.layer] = together

    ids = loaded.encode("Call me Ishmael. Some years ago, never mind how long precisely.", tokens=12)
    with torch.no_grad(), wherewhat.capture(loaded.model, count, proof=proof):
        loaded.model(ids[None], logits_to_keep=1)
    assert dead == {5: 2, 12: 7, 14: 4, 17: 3}


def test_gemma_is_additive_in_local_and_in_global_layers(gemma, kept):
    local = [layer for layer in range(18) if layer % 6 != 5]
    assert layer_kinds(kept.proof(gemma).layers) == {LOCAL: local, GLOBAL: [5, 11, 17]}
    result = kept.run(gemma, "axes", tokens=512)
    assert list(StoredRun(result).kinds) == [LOCAL, GLOBAL]
    found = {summary.metric.name: summary for summary in result.summary()}
    assert found["r"].overall.mean == pytest.approx(0.8984, abs=0.01)
    assert found["pooled_r"].overall.mean == pytest.approx(0.9746, abs=0.01)
    for name in ("r", "pooled_r"):
        low, high = sorted(found[name].kinds.values(), key=lambda kind: kind.mean)
        assert low.mean < high.mean
        if name == "r":
            weighted = (15 * found[name].kinds[LOCAL].mean + 3 * found[name].kinds[GLOBAL].mean) / 18
            assert weighted == pytest.approx(found[name].overall.mean, abs=1e-9)
