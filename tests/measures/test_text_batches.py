"""Brute force: several texts in one pass equal one text at a time, and all documents in one pass equal two passes."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.capture import TinySubject, run, tokens
from wherewhat.captures.proof import capture
from wherewhat.measures.distance import DistanceConfig
from wherewhat.measures.distance.distance_measurement import DistanceMeasurement
from wherewhat.measures.measurement import Text, measure_pass, measure_text
from wherewhat.measures.planes import PlanesConfig
from wherewhat.measures.planes import statistics as plane_statistics
from wherewhat.measures.planes.coordinates import Planes
from wherewhat.measures.planes.planes_measurement import PlanesMeasurement
from wherewhat.measures.planes.statistics import plane_stats, residual_bound
from wherewhat.measures.split import SplitConfig
from wherewhat.measures.split import logits as split_logits
from wherewhat.measures.split.logits import split_documents
from wherewhat.measures.split.split_measurement import SplitMeasurement

MEASUREMENTS = [
    (DistanceMeasurement(), DistanceConfig(queries=5, beyond=(2,))),
    (DistanceMeasurement(), DistanceConfig(queries=3, reference=3, keep_mean=True)),
    (PlanesMeasurement(), PlanesConfig()),
]


def assert_equal_scores(found, expected, *, rtol, atol):
    """Compare all numbers of two scores, layer by layer."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.layer == theirs.layer
        values = [
            (
                {name: torch.as_tensor(x) for name, x in part.heads.items()}
                | {name: torch.as_tensor(float(x)) for name, x in part.whole.items()}
                | {name: column.values for name, column in part.curves.items()}
            )
            for part in (ours, theirs)
        ]
        assert values[0].keys() == values[1].keys()
        for name, x in values[0].items():
            torch.testing.assert_close(
                x, values[1][name], rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


class Split:
    """A subject whose passes over one text show what a pass over all texts computed, so that only sums differ."""

    def __init__(self, layers, ids):
        self.layers, self.ids = layers, ids

    def run(self, ids, reducer, *, logits=False):
        rows = [next(t for t, row in enumerate(self.ids) if torch.equal(row, text)) for text in ids]
        for layer in self.layers:
            if len(rows) == layer.texts:
                reducer(layer)
            elif len(rows) == 1:
                reducer(layer.text(rows[0]))
            else:
                raise AssertionError(rows)


@functools.cache
def recorded(name):
    ids = tokens(23, batch=3)
    model = TinySubject(name).model
    return ids, run(model, ids)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "smollm3", "mistral", "gemma3_text", "llama:yarn"])
def test_texts_of_a_pass_equal_texts_alone(name):
    check_texts(*recorded(name))


def check_texts(ids, layers):
    subject = Split(layers, ids)
    together = measure_pass(subject, [Text(row[None]) for row in ids], MEASUREMENTS)
    for (measurement, config), of_texts in zip(MEASUREMENTS, together, strict=True):
        for row, scores in zip(ids, of_texts, strict=True):
            alone = measure_text(measurement, subject, Text(row[None]), config)
            # Two orders of sums in float64, relative to logits that are up to 1e4 times as large as what is left.
            assert_equal_scores(scores, alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "deepseek_v3", "smollm3"])
def test_all_documents_in_one_pass_equal_two_passes(name, monkeypatch):
    check_documents(*recorded(name), monkeypatch)


def check_documents(ids, layers, monkeypatch):
    subject, config = Split(layers, ids), SplitConfig(skip=2)
    expected = split_documents(subject, list(ids), config)
    batches = split_documents(subject, list(ids), config, together=3)
    for entries in (1, 2**20):  # one key head at a time, and all at once
        monkeypatch.setitem(split_logits._ENTRIES, "cpu", entries)
        (found,) = measure_pass(subject, [Text(row[None]) for row in ids], [(SplitMeasurement(), config)])
        assert len(found) == 1
        for scores in (found[0], batches):
            assert_equal_scores(scores, expected, rtol=1e-9, atol=1e-11)


def test_key_heads_in_parts_equal_all_at_once(monkeypatch):
    _, layers = recorded("llama")
    layer = next(layer for layer in layers if layer.rotation is not None).merged
    q, k = layer.rot_q[0], layer.rot_k[0]
    planes, groups = Planes.of(layer.rotation, q.shape[-1]), layer.heads // layer.kv_heads
    assert planes is Planes.of(layer.rotation, q.shape[-1])
    for function in (plane_stats, residual_bound):
        whole = vars(function(q, k, planes, window=9))
        for name, values in whole.items():
            if name in ("period", "slow"):
                continue
            parts = [
                vars(function(q[h * groups : (h + 1) * groups], k[h : h + 1], planes, window=9))[name]
                for h in range(len(k))
            ]
            torch.testing.assert_close(values, torch.cat(parts), rtol=1e-10, atol=1e-12, equal_nan=True, msg=name)
        monkeypatch.setitem(plane_statistics._ENTRIES, "cpu", 1)
        for name, values in vars(function(q, k, planes, window=9)).items():
            torch.testing.assert_close(values, whole[name], rtol=1e-10, atol=1e-12, equal_nan=True, msg=name)


@pytest.mark.slow
def test_texts_of_a_trained_model(smollm2, kept, monkeypatch):
    model = kept.loaded(smollm2).model
    ids = torch.randint(100, 20_000, (3, 40), generator=torch.Generator().manual_seed(0))
    layers = []

    def keep(attention):
        if attention.layer in (0, 14, 29):
            layers.append(attention.copied())

    with torch.no_grad(), capture(model, keep, proof=kept.proof(smollm2)):
        model(input_ids=ids, use_cache=False)
    check_texts(ids, layers)
    check_documents(ids, layers, monkeypatch)
