"""Identity: what a run depends on and what it does not, through the Python interface."""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.models import llama_config, save_model
from wherewhat.errors import CaptureError, StoreError, TextError
from wherewhat.measures.measurement import Text, TextMeasurement
from wherewhat.models.loaded import LoadedModel
from wherewhat.progress import Silent, duration
from wherewhat.report.result import run
from wherewhat.runs import execution
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.execution import LastModel, measure, prepare, run_together
from wherewhat.runs.execution import run as execution_run
from wherewhat.runs.jobs import estimate
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import load, memory
from wherewhat.scores import Scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on a mat and the dog ran " * 4)
    return str(path)


def request(folder, text, **changes) -> Request:
    return Request(measurement="attention", model=ModelRequest(model=folder), files=(text,), tokens=24, **changes)


def values(directory) -> dict:
    table = directory.scores().to_pydict()
    keys = zip(table["layer"], table["head"], table["metric"], strict=True)
    return dict(zip(keys, table["value"], strict=True))


@pytest.fixture(scope="module")
def measured(folder, text, tmp_path_factory):
    """A finished run of the plain request."""
    return run(request(folder, text), out=tmp_path_factory.mktemp("runs"))


def test_numbers_equal_those_measured_by_hand(folder, measured):
    loaded = load(folder)
    ids = loaded.encode("the cat sat on a mat and the dog ran " * 4, tokens=24)[None]
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = loaded.model(ids, output_attentions=True).attentions
    found = values(measured)
    for layer, pattern in enumerate(weights):
        entropy = torch.special.entr(pattern[0].double()).sum(-1)[:, 1:].mean(-1)
        sink = pattern[0, :, 1:, 0].double().mean(-1)
        for head in range(4):
            # Weights of float32 logits near 1, sums over 16 products: 16 · ε is 2e-6 of the value.
            assert found[layer, head, "entropy"] == pytest.approx(float(entropy[head]), rel=2e-5)
            assert found[layer, head, "sink_mass"] == pytest.approx(float(sink[head]), rel=2e-5)


def test_stored_documents_come_back_as_they_were_measured(measured):
    name = measured.scores().to_pydict()["document"][0]
    document = measured.directory.part(name)
    found = values(measured)
    assert [layer.layer for layer in document.layers] == [0, 1]
    for layer in document.layers:
        for metric, numbers in layer.heads.items():
            assert numbers.tolist() == [found[layer.layer, head, metric] for head in range(4)]
        assert layer.whole["entropy_uniform"] == found[layer.layer, None, "entropy_uniform"]


def test_every_choice_that_matters_has_its_own_directory(folder, text, tmp_path):
    plain = request(folder, text)
    variants = [
        plain,
        plain.with_weights("random"),
        plain.with_weights("shuffled"),
        request(folder, text, options={"sink_tokens": 2}),
        replace(plain, tokens=25),
        replace(plain, model=ModelRequest(model=folder, dtype="float64")),
        replace(plain, model=ModelRequest(model=folder, attn_implementation="eager")),
    ]
    paths = {run(variant, out=tmp_path).path for variant in variants}
    assert len(paths) == len(variants)
    assert run(plain, out=tmp_path).path in paths


def test_changed_weights_are_not_taken_for_the_old_ones(text, tmp_path):
    folder = save_model(tmp_path / "changing")
    before = run(request(folder, text), out=tmp_path / "out")
    save_model(folder, llama_config(hidden_size=32))
    assert run(request(folder, text), out=tmp_path / "out").path != before.path


def test_load_refuses_what_it_cannot_prove(folder, monkeypatch):
    original = torch.nn.functional.scaled_dot_product_attention

    def colder(query, *args, **kwargs):
        return original(query * 0.5, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", colder)
    with pytest.raises(CaptureError, match="attention output"):
        load(folder)


def test_summary_is_the_mean_over_heads_with_an_interval_over_documents(folder, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a dog and a cat ran on the mat . " * 4)
    both = Request(measurement="attention", model=ModelRequest(model=folder), files=(text, str(other)), tokens=24)
    directory = run(both, out=tmp_path / "out")
    entropy = StoredRun(directory).summaries[0]
    table = directory.scores().to_pydict()
    rows = [
        (document, value)
        for document, metric, value in zip(table["document"], table["metric"], table["value"], strict=True)
        if metric == "entropy"
    ]
    means = [sum(v for d, v in rows if d == name) / 8 for name in sorted({d for d, _ in rows})]
    reach = 12.706204736 * abs(means[0] - means[1]) / 2  # Student's t for two documents
    assert entropy.overall.mean == pytest.approx(sum(means) / 2, rel=1e-9)
    assert entropy.overall.high - entropy.overall.mean == pytest.approx(reach, rel=1e-6)
    assert entropy.overall.n == 2
    assert sorted(entropy.layers) == [0, 1]
    short = tmp_path / "short.txt"
    short.write_text("the dog ran on a mat and the cat sat")
    for measurement in ("axes", "heads"):
        wanted = replace(both, measurement=measurement, files=(text, str(short)))
        with pytest.raises(TextError, match="document 'short': the text has 10 tokens, but 24 were asked for"):
            run(wanted, out=tmp_path / "out")


def test_documents_together_have_one_distance_curve(folder, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("a dog and a cat ran on the mat . " * 4)
    both = Request(measurement="axes", model=ModelRequest(model=folder), files=(text, str(other)), tokens=24)
    directory = run(both, out=tmp_path / "out")
    table = directory.scores().to_pydict()
    rows = zip(table["document"], table["layer"], table["head"], table["metric"], table["value"], strict=True)
    found = {(layer, head, metric): value for document, layer, head, metric, value in rows if document is None}
    curves = directory.profiles()
    names = sorted({name.rsplit("/", 2)[0] for name in curves} - {"-"})
    for layer in range(2):
        mean = torch.stack([curves[f"{name}/{layer}/a"] for name in names]).double().mean(0)
        torch.testing.assert_close(curves[f"-/{layer}/shared_a"].double(), mean, rtol=1e-5, atol=1e-6)
        for head in range(4):
            assert found[layer, head, "r_shared"] <= found[layer, head, "r_separate"] + 1e-9
    alone = run(Request(measurement="axes", model=ModelRequest(model=folder), files=(text,), tokens=24), out=tmp_path)
    assert "r_shared" not in alone.scores().to_pydict()["metric"]


def test_a_run_that_lacked_only_its_end_still_says_the_encoding(folder, text, tmp_path, monkeypatch):
    asked = replace(request(folder, text), measurement="residual")
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "finish", lambda *_, **__: None)
        with pytest.raises(StoreError, match="not finished"):
            run(asked, out=tmp_path)
    finished = run(asked, out=tmp_path)
    assert finished.provenance()["extra"]["encoding"] == "rope"
    table = finished.scores().to_pydict()
    rows = zip(table["metric"], table["unit"], strict=True)
    assert {unit for metric, unit in rows if metric == "additive_cost_of_layer"} == {"nats"}
    made = SimpleNamespace(config={"measurement": "heads", "options": {"gamma": 0.2, "seed": 0}})  # gamma was dropped
    assert [metric.name for metric in StoredRun(made).metrics][:2] == ["s_pos_no_sink", "s_sym_no_sink"]


# What is said before long work


class Slow(TextMeasurement):
    """Moves a clock forward instead of computing, so that other work on the machine does not count."""

    def __init__(self, monkeypatch, per_token):
        self._per_token, self._now = per_token, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self._now)

    def measure(self, subject, text, config):
        self._now += self._per_token * text.ids.shape[1]
        return Scores()


def test_time_is_extrapolated_from_short_pieces_and_quick_work_is_not_announced(monkeypatch):
    def texts(length, count):
        return [Text(torch.arange(length)[None])] * count

    line = estimate(None, Slow(monkeypatch, 1e-4), None, texts(4096, 20))
    assert line == "20 documents of 4096 tokens: about 8 s"
    assert estimate(None, Slow(monkeypatch, 0), None, texts(1000, 1)) == ""
    assert estimate(None, Slow(monkeypatch, 1), None, texts(200, 50)) == ""
    assert [duration(seconds) for seconds in (3.2, 89, 240, 9000)] == ["3 s", "89 s", "4 min", "2.5 h"]


def test_memory_counts_the_weights_and_grows_with_the_text():
    model = LlamaForCausalLM(llama_config())
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert memory(model, 0) == weights
    assert memory(model, 1000) > memory(model, 10) > weights


def test_axes_without_curves_leave_out_the_scores_that_need_them(folder, text, tmp_path):
    """Identity: without curves, all scores of single documents are the same; a resumed run has the same bytes."""
    other = tmp_path / "other.txt"
    other.write_text("a dog and a cat ran on the mat . " * 4)
    plain = Request(measurement="axes", model=ModelRequest(model=folder), files=(text, str(other)), tokens=24)
    without = replace(plain, options={"curves": False})
    whole = run(plain, out=tmp_path / "whole")
    made = run(without, out=tmp_path / "made")
    shared = ("r_shared", "r_shared_pooled", "r_separate")
    kept = [row for row in whole.scores().to_pylist() if row["metric"] not in shared]
    assert made.scores().to_pylist() == kept
    assert len(made.heads()) > 0
    assert "r_shared" in whole.heads().columns
    execution_run(replace(without, files=(text,)), out=tmp_path / "one")  # a single document has no such scores anyway
    prepared = prepare(without, out=tmp_path / "resumed", progress=Silent(), models=(models := LastModel()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "finish", lambda *_, **__: None)
        measure(prepared, progress=Silent(), models=models)
    resumed = execution_run(without, out=tmp_path / "resumed")
    assert (resumed.path / "scores.parquet").read_bytes() == (made.path / "scores.parquet").read_bytes()


def test_requests_of_one_model_share_its_texts(folder, text, tmp_path, monkeypatch):
    """Identity: a document is tokenised once for several requests, which give the same files as one after another."""
    plain = Request(measurement="axes", model=ModelRequest(model=folder), files=(text,), tokens=16)
    requests = [plain, replace(plain, measurement="heads"), replace(plain, tokens=12)]
    tokenised = []
    tokenize = LoadedModel.tokenize

    def counted(loaded, given):
        tokenised.append(given)
        return tokenize(loaded, given)

    monkeypatch.setattr(LoadedModel, "tokenize", counted)
    together = run_together(requests, out=tmp_path / "together")
    assert len(tokenised) == 2  # once for each number of tokens
    for request, outcome in zip(requests, together, strict=True):
        alone = execution_run(request, out=tmp_path / "alone")
        assert (outcome.path / "scores.parquet").read_bytes() == (alone.path / "scores.parquet").read_bytes()
    assert len(tokenised) == 2 + 3


def test_a_model_is_forgotten_with_its_texts(folder, text, tmp_path):
    models = LastModel()
    request = Request(measurement="axes", model=ModelRequest(model=folder), files=(text,), tokens=16)
    prepared = prepare(request, out=tmp_path, progress=Silent(), models=models)
    models.proof()
    model, weight = (weakref.ref(x) for x in (prepared.loaded.model, next(prepared.loaded.model.parameters())))
    assert models.texts
    del prepared
    models.forget()
    assert model() is None
    assert weight() is None
    assert not models.texts


def test_a_control_model_is_loaded_after_the_others_are_released(folder, text, tmp_path, monkeypatch):
    """Texts that control models share hold no model."""
    alive, refs = [], []
    load = execution.load_model

    def observed(*args, **kwargs):
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))
        loaded = load(*args, **kwargs)
        refs.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(execution, "load_model", observed)
    models, plain = LastModel(), Request(measurement="axes", model=ModelRequest(model=folder), files=(text,), tokens=16)
    for weights, tokens in (("trained", 16), ("random", 12), ("shuffled", 16)):
        request = replace(plain, tokens=tokens).with_weights(weights)
        prepared = prepare(request, out=tmp_path, progress=Silent(), models=models)
        (item,) = prepared.inputs.values()
        assert item.text.spans.words
        del prepared, item
    assert len(models.texts) == 2
    assert alive == [0, 0, 0]


def test_a_control_model_has_tokenizer_and_texts_of_the_kept_model_unless_files_changed(text, tmp_path):
    folder = save_model(tmp_path / "m")
    models, plain = LastModel(), ModelRequest(model=folder)
    request = Request(measurement="axes", model=plain, files=(text,), tokens=16)
    prepare(request, out=tmp_path / "runs", progress=Silent(), models=models)
    tokenizer, texts = models.loaded(plain).tokenizer, {**models.texts}
    control = models.loaded(replace(plain, weights="random", seed=1))
    assert control.tokenizer is tokenizer
    assert control.tokenizer_hash == LastModel().loaded(plain).tokenizer_hash
    assert texts
    assert models.texts == texts
    os.utime(tmp_path / "m" / "tokenizer.json", ns=(1, 1))
    assert models.loaded(replace(plain, weights="shuffled")).tokenizer is not tokenizer
    assert not models.texts


def test_objects_of_before_are_left_out_of_garbage_collections_while_a_run_is_measured(folder, text, tmp_path):
    counts = []

    class Counting(Silent):
        def say(self, line):
            counts.append(gc.get_freeze_count())

    models, progress = LastModel(), Counting()
    prepared = prepare(request(folder, text), out=tmp_path, progress=progress, models=models)
    gc.unfreeze()
    counts.clear()
    measure(prepared, progress=progress, models=models)
    assert min(counts) > 0
    assert gc.get_freeze_count() == 0
