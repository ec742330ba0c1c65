"""Identity: texts in batches, and measurements in shared passes, give the numbers of each text and measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wherewhat
from helpers.capture import tiny, tokens
from wherewhat.errors import ConfigError, MeasureError, WherewhatError
from wherewhat.measures.measurement import (
    LayerMeasurement,
    Text,
    find_measurement,
    measure_pass,
    measure_text,
    measurements,
)
from wherewhat.models.loader import load
from wherewhat.options import build_config
from wherewhat.runs import jobs
from wherewhat.runs.execution import run, run_together
from wherewhat.runs.request import Request
from wherewhat.runs.subject import ModelSubject
from wherewhat.scores import Scores, copied_at_once, on_cpu

LAYERED = [name for name, measurement in measurements().items() if isinstance(measurement, LayerMeasurement)]


def in_memory(model):
    from wherewhat.models.memory import load_memory

    return load_memory(model, None, name="tiny", weights="trained", seed=0, hashed=False)


def wanted(names):
    return [(find_measurement(name), build_config(find_measurement(name).config, {})) for name in names]


def assert_same(scores: Scores, other: Scores, *, digits: float) -> None:
    """Every number of two scores agrees relative to the largest of its metric in the layer."""
    for one, two in zip(scores, other, strict=True):
        assert one.layer == two.layer
        assert (*one.heads, *one.whole, *one.curves) == (*two.heads, *two.whole, *two.curves)
        columns = {name: (column.values, two.curves[name].values) for name, column in one.curves.items()}
        heads = {name: (values, two.heads[name]) for name, values in one.heads.items()}
        whole = {name: (value, two.whole[name]) for name, value in one.whole.items()}
        for name, pair in (columns | heads | whole).items():
            x, y = (torch.as_tensor(values).double() for values in pair)
            assert torch.equal(x.isnan(), y.isnan()), name
            size = float(y[~y.isnan()].abs().max()) if bool((~y.isnan()).any()) else 0.0
            assert float((x - y).nan_to_num().abs().max()) <= digits * max(size, 1e-6), name


def test_tensors_are_copied_at_once_with_their_shape_and_memory():
    whole, other = torch.randn(3, 4, 5), torch.randn(100)
    tensors = [*whole.unbind(0), whole.transpose(1, 2)[1], other[7:9], torch.randn(()), whole[:, 2], torch.zeros(0)]
    for copy, tensor in zip(copied_at_once(tensors), tensors, strict=True):
        assert copy.shape == tensor.shape
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_texts_of_a_batch_have_the_scores_of_each_alone(family):
    """Windows, soft-cap, sinks and bias; in float64 where the model allows it, so that rounding hides nothing."""
    model, digits = tiny(family, dtype=torch.float64), 1e-6
    if family == "gpt_oss":  # its experts do not compute in float64
        model, digits = tiny(family), 1e-3
    subject = ModelSubject(in_memory(model))
    texts = [Text(tokens(40, seed=seed)) for seed in range(3)]
    chosen = wanted(LAYERED)
    together = measure_pass(subject, texts, chosen)
    for (measurement, config), outcome in zip(chosen, together, strict=True):
        if isinstance(outcome, WherewhatError):
            with pytest.raises(type(outcome)):
                measure_text(measurement, subject, texts[0], config)
            continue
        for text, scores in zip(texts, outcome, strict=True):
            (alone,) = on_cpu([measure_text(measurement, subject, text, config)])
            assert_same(scores, alone, digits=digits)


@pytest.mark.slow
def test_texts_of_a_batch_on_a_real_model():
    loaded = load("smollm2", dtype="float32")
    subject = ModelSubject(loaded)
    ids = torch.randint(0, 40_000, (3, 48), generator=torch.Generator().manual_seed(0))
    texts = [Text(row[None]) for row in ids]
    chosen = wanted(LAYERED)
    for (measurement, config), outcome in zip(chosen, measure_pass(subject, texts, chosen), strict=True):
        assert not isinstance(outcome, WherewhatError)
        for text, scores in zip(texts, outcome, strict=True):
            # A few digits of float32 are lost in 30 layers; scores of another text differ in the first.
            assert_same(scores, measure_text(measurement, subject, text, config), digits=2e-3)


def count_passes(monkeypatch):
    passes = []
    plain = ModelSubject.run
    monkeypatch.setattr(
        ModelSubject, "run", lambda self, ids, *a, **k: passes.append(len(ids)) or plain(self, ids, *a, **k)
    )
    return passes


def files(directory):
    return {
        name: (directory.path / name).read_bytes() for name in ("scores.parquet", "profiles.safetensors", "config.json")
    }


def test_measurements_share_passes_and_leave_the_same_files(tmp_path, monkeypatch):
    model, ids = tiny("llama"), tokens(30, batch=3)
    requests = [Request(name, model=model, texts=ids) for name in ("axes", "attention", "planes")]
    apart = [run(request, out=tmp_path / "apart") for request in requests]
    passes = count_passes(monkeypatch)
    together = run_together(requests, out=tmp_path / "together")
    assert passes == [3]
    for one, other in zip(apart, together, strict=True):
        assert one.path.name == other.path.name
        assert files(one) == files(other)


def test_what_is_finished_is_left_out_of_the_pass(tmp_path, monkeypatch):
    model, ids = tiny("llama"), tokens(30, batch=2)
    requests = [Request(name, model=model, texts=ids) for name in ("axes", "attention")]
    run(requests[0], out=tmp_path)
    monkeypatch.setattr("wherewhat.measures.axes.fit.fit_layer", lambda *_, **__: pytest.fail("measured twice"))
    assert all(outcome.is_complete for outcome in run_together(requests, out=tmp_path))


def test_an_error_of_one_measurement_does_not_stop_the_others(tmp_path):
    model, ids = tiny("llama"), tokens(30, batch=2)
    wrong = Request("axes", model=model, texts=ids, options={"skip": 28})
    outcomes = run_together([wrong, Request("attention", model=model, texts=ids)], out=tmp_path)
    assert isinstance(outcomes[0], MeasureError)
    assert outcomes[1].is_complete
    with pytest.raises(MeasureError, match="too few"):
        run(wrong, out=tmp_path)


def test_requests_of_one_run_are_measured_once(tmp_path, monkeypatch):
    plain = Request("axes", model=tiny("llama"), texts=tokens(30, batch=2))
    passes = count_passes(monkeypatch)
    first, second = run_together([plain, replace(plain, tokens=30)], out=tmp_path)
    assert first.is_complete
    assert first.path == second.path
    assert passes == [2]


def test_a_batch_that_was_interrupted_gives_the_same_bytes(tmp_path, monkeypatch):
    request = Request("axes", model=tiny("llama"), texts=tokens(30, batch=3))
    whole = run(request, out=tmp_path / "whole")
    save = jobs.Job.save

    def killed(job, key, scores, **options):
        save(job, key, scores, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Job, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(request, out=tmp_path / "parts")
    passes = count_passes(monkeypatch)
    assert files(run(request, out=tmp_path / "parts")) == files(whole)
    assert passes == [3]  # the same batch again, of which one text was stored


def test_texts_that_do_not_fit_are_measured_one_after_another(tmp_path, monkeypatch):
    request = Request("axes", model=tiny("llama"), texts=tokens(30, batch=2))
    plain = ModelSubject.run

    def small(self, ids, *args, **options):
        if len(ids) > 1:
            raise torch.OutOfMemoryError
        return plain(self, ids, *args, **options)

    monkeypatch.setattr(ModelSubject, "run", small)
    assert run(request, out=tmp_path).is_complete


def test_several_measurements_from_python(tmp_path):
    model, ids = tiny("llama"), tokens(30, batch=2)
    results = wherewhat.measure(["axes", "attention"], model, ids, axes={"curves": False}, controls=("random",))
    assert [*results] == ["axes", "attention"]
    assert all(set(result.controls) == {"random"} for result in results.values())
    assert wherewhat.measure("attention", model, ids).scores().equals(results["attention"].scores())
    with pytest.raises(ConfigError, match="the option skip is not of one of axes, attention: give their options as"):
        wherewhat.measure(["axes", "attention"], model, ids, skip=1)
    with pytest.raises(ConfigError, match="each once"):
        wherewhat.measure(["axes", "axes"], model, ids)
