"""Identity: records do not change a training, and a killed one keeps them. Parity: they equal ordinary runs."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch

import wherewhat
from helpers.capture import tiny, tokens
from helpers.training import same_weights, train_loop, trainee
from wherewhat.errors import TextError, WherewhatError
from wherewhat.measures.heads import HeadsConfig
from wherewhat.measures.measurement import LayerMeasurement
from wherewhat.runs import training
from wherewhat.runs.execution import run as run_request
from wherewhat.runs.records import RECORDS_FILE, TrainingRun
from wherewhat.runs.request import Request
from wherewhat.runs.results import StoredRun
from wherewhat.runs.training import TrainingRecorder, choose_measurements
from wherewhat.scores import Metric

IDS = tokens(24, batch=2, seed=5)


def recorder(model, **options) -> TrainingRecorder:
    return TrainingRecorder(model, IDS, **{"every": 2, "measurements": "axes", **options})


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A finished training of six steps with all records in a run directory."""
    out = tmp_path_factory.mktemp("training")
    model = trainee()
    watch = recorder(model, measurements=["axes", "heads"], out=out, name="first")
    train_loop(model, watch)
    return watch.finish()


@pytest.mark.parametrize(
    ("kind", "steps"), [("llama", 4), *(pytest.param(kind, 48, marks=pytest.mark.slow) for kind in ("llama", "gpt2"))]
)
def test_weights_are_those_of_a_training_without_records(kind, steps, monkeypatch):
    plain, model = (trainee(kind) for _ in range(2))
    train_loop(plain, steps=steps)
    proofs, prove = [], training.prove
    monkeypatch.setattr(training, "prove", lambda model: proofs.append(1) or prove(model))
    watch = recorder(model, measurements=["axes", "heads"], every=steps // 4)
    monkeypatch.setattr("wherewhat.captures.proof.prove", lambda *_, **__: pytest.fail("verified again"))
    train_loop(model, watch, steps=steps)
    assert watch.finish().records.steps.tolist() == [steps * part // 4 for part in range(5)]
    assert same_weights(plain, model)
    assert proofs == [1]


def test_everything_that_training_depends_on_is_restored(monkeypatch):
    model = trainee()
    model.model.layers[0].mlp.eval()
    model(input_ids=IDS, labels=IDS).loss.backward()
    generators = (random.getstate, lambda: str(np.random.get_state()), lambda: torch.get_rng_state().tolist())
    before = [state() for state in generators]
    modes = [module.training for module in model.modules()]
    grads = [p.grad.clone() for p in model.parameters()]
    settings = torch.get_default_dtype(), torch.backends.mkldnn.enabled, torch.is_grad_enabled()
    watch = recorder(model, measurements=["axes", "heads"])
    watch(2)
    assert [state() for state in generators] == before
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert settings == (torch.get_default_dtype(), torch.backends.mkldnn.enabled, torch.is_grad_enabled())
    plain = recorder(model).finish()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            watch = recorder(model)
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert same_records(watch.run(), plain)
    proofs, prove = [], training.prove
    monkeypatch.setattr(training, "prove", lambda model: proofs.append(1) or prove(model))
    model.double()  # a changed model is verified again
    assert watch(2)
    assert proofs == [1]
    assert watch.active


def same_records(one: TrainingRun, other: TrainingRun) -> bool:
    assert one.records.values.keys() == other.records.values.keys()
    return all(torch.equal(v.nan_to_num(-7), other.records[n].nan_to_num(-7)) for n, v in one.records.values.items())


def test_records_equal_ordinary_runs(tmp_path):
    model = tiny("llama")
    options = {"heads": {"queries": 16, "taus": HeadsConfig().taus}}
    watch = recorder(model, measurements=["axes", "heads"], options=options)
    found = watch.finish().records
    for name in ("axes", "heads"):
        stored = StoredRun(run_request(Request(name, model=model, texts=IDS), out=tmp_path))
        for metric in stored.head_metrics:
            if metric.endswith(("together", "shared", "pooled", "separate", "low", "high", "label")):
                continue  # over all documents together
            wanted = [value for heads in stored.head_means(metric).values() for value in heads]
            got = found[f"{name}.{metric}"][0].tolist()
            assert got == pytest.approx([float("nan") if v is None else v for v in wanted], rel=1e-6, nan_ok=True)
    assert found["axes.pooled_r"].shape == (1,)
    assert found["layer"].tolist() == sorted(found["layer"].tolist())
    assert found.axes["heads.s_pos"] == ("head",)
    assert found.axes["heads.heads_positional"] == ()


def test_layer_measurements_share_a_pass(monkeypatch):
    passes = []
    run = training.ModelSubject.run
    monkeypatch.setattr(training.ModelSubject, "run", lambda *a, **k: passes.append(1) or run(*a, **k))
    watch = recorder(tiny("llama"), measurements=["axes", "attention", "planes"])
    assert len(passes) == 2  # one to count the heads, and one over all texts
    assert {name.split(".")[0] for name in watch.finish().records.values} == {"axes", "attention", "planes"}


@pytest.mark.slow
def test_measurements_of_all_documents_together():
    model = tiny("llama")
    ids = tokens(24, batch=4)
    found = TrainingRecorder(model, ids, measurements="split", documents=4).finish()
    assert any(name.startswith("split.") for name in found.records.values)
    with pytest.raises(TextError, match="split needs"):
        TrainingRecorder(model, ids, measurements="split", documents=1)


def test_due_steps_and_the_last_one(caplog):
    model = trainee()
    watch = recorder(model, every=4)
    assert watch(1) == {}
    logged = watch(4)
    assert set(logged) == {f"wherewhat/axes/{name}" for name in ("r", "pooled_r", "r_behaviour", "r_a")}
    assert logged["wherewhat/axes/r"] == pytest.approx(float(watch.run().records["axes.r"][-1].mean()), rel=1e-5)
    assert watch(4) == {}
    watch(6)
    assert watch.finish().records.steps.tolist() == [0, 4, 6]
    assert watch(8) == {}
    assert not caplog.records


@pytest.mark.slow
def test_one_seed_gives_the_same_bytes(watched, tmp_path):
    model = trainee()
    watch = recorder(model, measurements=["axes", "heads"], out=tmp_path, name="first")
    again = train_loop(model, watch) and watch.finish()
    assert again.path.name == watched.path.name
    for name in ("config.json", "profiles.safetensors"):
        assert (again.path / name).read_bytes() == (watched.path / name).read_bytes()


def test_a_killed_training_keeps_its_records(tmp_path):
    model = trainee()
    watch = recorder(model, out=tmp_path)
    train_loop(model, watch, steps=4)
    (path,) = tmp_path.glob("training-*")
    kept = TrainingRun.load(path)  # nothing was finished
    assert kept.records.steps.tolist() == [0, 2, 4]
    assert same_records(kept, watch.run())
    finished = watch.finish()
    assert not (path / RECORDS_FILE).exists()
    assert same_records(TrainingRun.load(path), finished)
    assert wherewhat.RunDirectory.load(path).provenance()["extra"]["parameters"] > 0


@pytest.mark.parametrize("finished", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resuming_drops_later_records_and_continues(tmp_path, finished):
    model = trainee()
    watch = recorder(model, out=tmp_path)
    train_loop(model, watch)
    if finished:
        watch.finish()
    before = watch.run().records
    again = recorder(model, out=tmp_path, start=4)
    assert again.run().records.steps.tolist() == [0, 2, 4]
    assert torch.equal(again.run().records["axes.r"], before["axes.r"][:3])
    again(6)
    assert TrainingRun.load(again.finish().path).records.steps.tolist() == [0, 2, 4, 6]
    anew = recorder(model, out=tmp_path)
    assert anew.finish().records.steps.tolist() == [0]
    assert recorder(model, out=tmp_path / "empty", start=5).finish().records.steps.tolist() == [5]


def test_an_error_is_one_warning_and_the_training_goes_on(monkeypatch, caplog, tmp_path):
    model = trainee()
    watch = recorder(model, out=tmp_path)

    def broken(*_, **__):
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(training, "measure_texts", broken)
    with caplog.at_level(logging.WARNING):
        train_loop(model, watch, steps=3)
    (line,) = caplog.messages
    assert line == "wherewhat records nothing from step 2 on, training goes on: no memory"
    assert all(module.training for module in model.modules())
    assert not watch.active
    assert watch.finish().records.steps.tolist() == [0]
    caplog.clear()
    monkeypatch.undo()
    watch = recorder(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    assert watch(2) == {}
    (line,) = caplog.messages
    assert "NaN" in line


@pytest.mark.slow
def test_two_trainings_in_one_directory(caplog, tmp_path):
    model = trainee()
    first, second = (recorder(model, out=tmp_path) for _ in range(2))
    assert first(2) == {}
    assert "another training writes to" in caplog.text
    assert second(2)
    assert recorder(model, out=tmp_path, name="other").active
    assert second.finish().records.steps.tolist() == [0, 2]


def test_strings_and_the_embedded_text(build, tmp_path):
    loaded = wherewhat.load(build.model(tmp_path))
    watch = TrainingRecorder(loaded.model, tokenizer=loaded.tokenizer, measurements="axes")
    assert [len(text["name"]) > 0 for text in watch.run().config["documents"]] == [True, True]
    text = "the cat sat on a mat and a dog ran . " * 3
    watch = TrainingRecorder(loaded.model, [text], tokenizer=loaded.tokenizer, measurements="axes", tokens=20)
    assert watch.run().config["tokens"] == 20


def test_wrong_arguments(subtests):
    for options, problem in (
        ({"measurements": "axis"}, "there is no measurement 'axis'"),
        ({"measurements": []}, "measurements is empty"),
        ({"measurements": "prompts"}, "prompts is measured on questions"),
        ({"options": {"axes": {"skips": 1}}}, "there is no option 'skips'"),
        ({"options": {"heads": {"queries": 1}}}, "options are given for 'heads', which is not recorded"),
        ({"every": 0}, "every is 0"),
        ({"tokens": 4}, "the shortest text has 4 tokens"),
        ({"start": -1}, "start is -1"),
        ({"evry": 5}, "TrainingRecorder has no argument 'evry': did you mean 'every'"),
        ({"every": "5"}, "every is '5'"),
        ({"texts": [[1, 2, 3]]}, "the shortest text has 3 tokens"),
        ({"texts": [[500] * 20]}, "token id 500 is not in the vocabulary"),
        ({"texts": None}, "there are no texts and no tokenizer"),
        ({"texts": ["some text"]}, "the model has no tokenizer"),
        ({"model": "smollm2"}, "model is 'smollm2': give the transformers model"),
    ):
        given = {"model": tiny("llama"), "texts": IDS, "measurements": "axes", **options}
        with subtests.test(problem=problem), pytest.raises(WherewhatError, match=problem):
            TrainingRecorder(given.pop("model"), given.pop("texts"), **given)
    (_, config) = choose_measurements("heads")["heads"]  # options for records are cheaper, and can be changed
    assert (config.queries, config.taus, config.blocks) == (4, (), ())
    (_, config) = choose_measurements(["heads"], {"heads": {"queries": 3}})["heads"]
    assert (config.queries, config.taus) == (3, ())


def test_an_own_measurement(monkeypatch):
    class KeyNorm(LayerMeasurement):
        """Norms of keys."""

        name = "key-norm"
        metrics = (Metric("norm", "norm of keys", "Mean norm of the keys."),)

        def measure(self, layer, config):
            return {"norm": layer.rot_k[0].norm(dim=-1).mean(-1)}  # of key heads

    monkeypatch.setattr("wherewhat.measures.measurement._known", {"key-norm": KeyNorm()})
    found = recorder(tiny("llama"), measurements="key-norm").finish()
    assert found.last() == {"key-norm/norm": pytest.approx(float(found.records["key-norm.norm"].mean()), rel=1e-5)}
