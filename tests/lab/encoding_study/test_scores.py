"""Brute force: a record of all layers and documents at once against one layer and one document at a time, by the
functions every other measurement uses; identity: the first record is that of random weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.lab import RECIPE
from helpers.tolerance import rounding, worst
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.axes.solver import SUBSETS
from wherewhat.measures.heads import PatternConfig
from wherewhat.measures.heads.patterns import pattern_statistics
from wherewhat.measures.planes import PlanesConfig
from wherewhat.measures.planes.statistics import layer_scores
from wherewhat.measures.residual import ResidualConfig, measure_residual
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import effective_rank, next_token_loss
from wherewhat_lab.encoding_study.corpus import read_corpus
from wherewhat_lab.encoding_study.recipe import ENCODINGS
from wherewhat_lab.encoding_study.scores import AXES, HeldOutText, score
from wherewhat_lab.encoding_study.study import encoding_recorder
from wherewhat_lab.model import LabModel
from wherewhat_lab.subject import LabSubject, by_head, fold, unfold

CONTEXT = RECIPE.training.context
WATCH = replace(RECIPE.watch, plane_documents=2)


@pytest.fixture(scope="module")
def held_out():
    return HeldOutText.of(read_corpus(None, held_out=0.2), CONTEXT, WATCH)


def make(encoding):
    """A model with larger weights than initial ones, which hide mistakes."""
    model = LabModel(RECIPE.model_for(encoding, 0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("phase"):
                parameter.copy_(-parameter.abs())
    return model


def layers_of(subject, ids):
    found = []
    subject.run(ids, found.append)
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_record_is_what_one_layer_and_document_at_a_time_gives(encoding, held_out):
    subject = LabSubject(make(encoding), trained_length=CONTEXT)
    found = score(subject, held_out, WATCH)
    assert all(value.ndim == len(AXES[name]) for name, value in found.items())
    documents = [held_out.windows[i : i + 1] for i in range(WATCH.documents)]
    each = [layers_of(subject, ids) for ids in documents]
    queries = choose_queries(CONTEXT, count=WATCH.queries)

    def close(name, values):
        """Values by document and layer, ``(heads,)`` each."""
        expected = torch.stack([torch.stack(list(row)) for row in values]).double().nanmean(0)
        torch.testing.assert_close(found[name].double(), expected, atol=2e-5, rtol=2e-4)

    fits = [[fit_layer(layer) for layer in layers] for layers in each]
    for subset in SUBSETS:
        name = "r" if subset == "abc" else f"r_{subset}"
        close(name, ([fit.r_subset[subset] for fit in row] for row in fits))
    close("r_behaviour", ([fit.r_behaviour for fit in row] for row in fits))
    assert float(found["noise_floor"]) == pytest.approx(fits[0][0].noise_floor, rel=1e-5)
    swaps = [[layer_swaps(layer, queries) for layer in layers] for layers in each]
    for name in ("s_pos", "s_sym"):
        close(name, ([getattr(one, name).mean(1) for one in row] for row in swaps))
    patterns = [
        [pattern_statistics(layer, ids, PatternConfig()) for layer in layers]
        for ids, layers in zip(documents, each, strict=True)
    ]
    close("previous_token", ([one.slashes.by_lag[:, 1] for one in row] for row in patterns))
    if subject.model.rotation is None:
        assert "plane_share" not in found
    else:
        planes = [[layer_scores(layer, PlanesConfig())[0] for layer in layers] for layers in each]
        for name in ("slow_dominance", "q_concentration", "k_concentration"):
            close(name, ([one.heads[name] for one in row] for row in planes))
        shares = [torch.stack([one.curves["plane_share"].values.mean(0) for one in row]) for row in planes]
        torch.testing.assert_close(found["plane_share"], torch.stack(shares).mean(0), atol=2e-5, rtol=2e-4)
        torch.testing.assert_close(found["plane_share"].sum(-1), torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ["alibi", "pope"])
def test_losses_ranks_and_induction(encoding, held_out):
    subject = LabSubject(make(encoding), trained_length=CONTEXT)
    found = score(subject, held_out, WATCH)
    for index, ids in enumerate(held_out.windows):
        logits = subject.run(ids[None], lambda _: None, logits=True)
        assert float(found["loss"][index]) == pytest.approx(next_token_loss(logits, ids[None]), abs=1e-5)
    for index in range(WATCH.documents):
        measured = measure_residual(subject, held_out.windows[index : index + 1], ResidualConfig(strengths=(0.0,)))
        assert float(found["loss_additive"][index]) == pytest.approx(measured.whole["loss_additive"], abs=1e-4)
    layers = layers_of(subject, held_out.windows[: WATCH.rank_documents])
    for name in ("q", "k"):
        together = torch.stack([getattr(layer, name).transpose(0, 1).flatten(1, 2) for layer in layers])
        torch.testing.assert_close(found[f"{name}_rank"].double(), effective_rank(together), atol=1e-3, rtol=1e-4)
    ids = held_out.repeats[:1]
    for index, layer in enumerate(layers_of(subject, ids)):
        induction = pattern_statistics(layer, ids, PatternConfig()).induction
        torch.testing.assert_close(found["induction"][index].double(), induction.mass, atol=1e-5, rtol=1e-4)
        assert float(found["induction_uniform"]) == pytest.approx(induction.uniform, abs=1e-6)


@pytest.mark.parametrize("encoding", ["alibi", "pope"])
def test_folded_layers_keep_their_logits_and_outputs(encoding, held_out):
    layers = layers_of(LabSubject(make(encoding), trained_length=CONTEXT), held_out.windows)
    texts = len(held_out.windows)
    folded = fold(layers)
    scores = by_head(folded.attn_scores()[0], len(layers), texts)
    for index, layer in enumerate(layers):
        expected = layer.attn_scores()
        hidden = expected.isinf()
        assert torch.equal(scores[index].isinf(), hidden)
        # Products of 16 or 32 dimensions in float32, in batches of other sizes.
        assert worst(scores[index].masked_fill(hidden, 0), expected.masked_fill(hidden, 0)) < rounding(64)
        assert torch.equal(unfold(fold([layer]).output, texts), layer.output)


def test_step_zero_is_the_random_control(held_out, tmp_path):
    for encoding in ("nope", "pope"):
        model = LabModel(RECIPE.model_for(encoding, 3))
        recorder = encoding_recorder(held_out, WATCH, path=tmp_path / f"{encoding}.safetensors")
        recorder(0, model)
        fresh = LabModel(RECIPE.model_for(encoding, 3))
        control = score(LabSubject(fresh, trained_length=CONTEXT), held_out, WATCH)
        for name, value in control.items():
            assert torch.equal(recorder.records[name][0], value)
        assert float(control["loss"].mean()) == pytest.approx(math.log(256), abs=0.1)
        before = recorder.seconds
        recorder(0, model)
        assert recorder.seconds == before
