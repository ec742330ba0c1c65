"""End-to-end: any measurement on a model in memory, its tables, and what becomes of its run."""

from __future__ import annotations

import gc
import json
import re

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import wherewhat
from helpers.capture import tiny, tokens
from helpers.models import llama_config, save_model
from helpers.tolerance import rounding
from wherewhat.errors import LoadError, WherewhatError
from wherewhat.measures import measurement as registry
from wherewhat.measures.measurement import measurements
from wherewhat.runs.comparison import compare, within_ranges
from wherewhat.runs.request import model_request

WORDS = "the cat sat on the mat and the dog ran after the cat into the house by the river "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("result") / "tiny", llama_config(), bos=True)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def result(model):
    return wherewhat.measure("axes", model, tokens(30, batch=2) % 16, controls=("random",))


def by_place(result):
    table = result.scores().to_pydict()
    keys = zip(table["document"], table["layer"], table["head"], table["metric"], strict=True)
    return dict(zip(keys, table["value"], strict=True))


@pytest.mark.parametrize(
    "measurement",
    [
        "axes",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("heads", "planes", "frequencies", "attention", "residual")),
        "distance",
    ],
)
def test_scores_are_those_of_the_command(cli, folder, model, tokenizer, tmp_path, measurement):
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 4)
    options = {"bands": 2} if measurement == "frequencies" else {}
    given = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    done = cli(measurement, folder, "--text", text, "--tokens", 32, "--no-control", "--device", "cpu", *given)
    assert (done.code, done.err) == (0, "")
    command = wherewhat.Result.load(tmp_path / done.out.strip().splitlines()[-1])
    ids = wherewhat.load(folder, device="cpu").encode(WORDS * 4, tokens=32)
    documents = [wherewhat.Document("text", "", ids=tuple(ids.tolist()))]
    for given in ({"texts": documents}, {"texts": wherewhat.read_documents(text), "tokenizer": tokenizer}):
        memory = wherewhat.measure(measurement, model, tokens=32, **given, **options)
        assert by_place(memory) == by_place(command)
    assert command.config["weights_hash"] != memory.config["weights_hash"]


def test_a_head_is_a_row(result, model):
    heads = result.heads()
    assert isinstance(heads, pd.DataFrame)
    layers, count = model.config.num_hidden_layers, model.config.num_attention_heads
    assert len(heads) == 2 * layers * count
    assert list(heads.columns[:3]) == ["weights", "layer", "head"]
    assert heads["layer"].dtype == heads["head"].dtype == np.int32
    assert not heads.isna().all().any()
    tidy = result.heads(tidy=True)
    assert list(tidy.columns) == ["weights", "document", "layer", "head", "metric", "value"]
    chosen = tidy[(tidy.weights == "trained") & (tidy.metric == "r")]
    means = chosen.groupby(["layer", "head"]).value.mean()
    expected = heads[heads.weights == "trained"].set_index(["layer", "head"]).r
    assert np.allclose(means, expected, rtol=1e-12, atol=0)


def test_tables_come_in_three_libraries(result):
    for table in (result.heads, result.layers, result.curves):
        assert isinstance(table(), pd.DataFrame)
        assert isinstance(table(frame="polars"), pl.DataFrame)
        assert isinstance(table(frame="pyarrow"), pa.Table)
        assert table(frame="polars").shape == table().shape
    with pytest.raises(WherewhatError, match="frame is 'excel'"):
        result.heads(frame="excel")


def test_layers_have_intervals(result):
    tidy = result.layers(tidy=True)
    summary = {one.metric.name: one for one in result.summary()}
    row = tidy[(tidy.weights == "trained") & (tidy.layer == 1) & (tidy.metric == "r")].iloc[0]
    assert (row["mean"], row.low, row.high) == (
        summary["r"].layers[1].mean,
        summary["r"].layers[1].low,
        summary["r"].layers[1].high,
    )
    assert result.layers().shape[0] == 2 * len(summary["r"].layers)


def test_curves_have_a_column_for_each_dimension(result):
    curve = result.curves("a")
    assert list(curve.columns) == ["weights", "document", "layer", "curve", "head", "distance", "value"]
    one = curve[(curve.weights == "trained") & (curve.document == "ids-1") & (curve.layer == 1) & (curve["head"] == 2)]
    expected = result.profiles()["ids-1/1/a"][2]
    assert np.array_equal(one.sort_values("distance").value.to_numpy(), expected.double().numpy(), equal_nan=True)
    with pytest.raises(WherewhatError, match="there is no curve 'aa'"):
        result.curves("aa")


def test_it_prints_as_a_table_with_controls(result):
    lines = repr(result).splitlines()
    assert lines[0] == "axes: tiny, 2 × 30 tokens"
    assert "random control" in lines[1]
    assert re.match(r"r +0\.\d+ (\(|±)", lines[2])
    assert "noise floor" in lines[2]
    assert lines[-1] == "in memory"
    assert "random control" in result._repr_html_()
    assert max(map(len, lines)) < 140


def test_hostile_names_are_escaped(model, tmp_path, monkeypatch):
    monkeypatch.setattr(model.config, "_name_or_path", "<script>alert(1)</script>")
    hostile = wherewhat.measure("attention", model, [wherewhat.Document("</script><b>", "", ids=tuple(range(16)))])
    assert "<script>" not in hostile._repr_html_()
    page = hostile.report(tmp_path / "page.html").read_text("utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data)["models"][0]["others"][0]["name"] == "attention"


def test_a_run_in_memory_can_be_saved_compared_and_is_removed_with_its_result(model, tmp_path, cli):
    result = wherewhat.measure("attention", model, tokens(24) % 16, controls=("shuffled",))
    path = result.path
    saved = result.save(tmp_path / "runs")
    assert saved.path.parent == tmp_path / "runs"
    assert saved.save(tmp_path / "runs").path == saved.path
    assert by_place(saved) == by_place(result)
    assert by_place(saved.controls["shuffled"]) == by_place(result.controls["shuffled"])
    control = result.controls["shuffled"]
    del result
    gc.collect()
    assert path.is_dir()  # the control model's run is beside it
    del control
    gc.collect()
    assert not path.exists()
    assert not saved.in_memory
    compared = cli("compare", tmp_path / "runs")
    assert compared.code == 0, compared.err
    assert "entropy" in compared.out


def test_the_run_of_other_weights_or_other_code_is_another(model, monkeypatch, tmp_path):
    ids = tokens(24) % 16
    first = wherewhat.measure("attention", model, ids, out=tmp_path)
    again = AutoModelForCausalLM.from_config(model.config)
    again.load_state_dict(model.state_dict())
    assert wherewhat.measure("attention", again, ids, out=tmp_path).path == first.path
    with torch.no_grad():
        again.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    assert wherewhat.measure("attention", again, ids, out=tmp_path).path != first.path
    monkeypatch.setattr("wherewhat.runs.identity.code_identity", lambda *_: {"code": "another"})
    assert wherewhat.measure("attention", model, ids, out=tmp_path).path != first.path


@pytest.mark.slow
def test_pipelines_peft_models_and_columns(model, tokenizer):
    expected = wherewhat.measure("attention", model, texts=[WORDS * 2], tokenizer=tokenizer)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    assert by_place(wherewhat.measure("attention", made, texts=[WORDS * 2])) == by_place(expected)
    assert by_place(wherewhat.measure("attention", made, texts=np.array([WORDS * 2]))) == by_place(expected)
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"text": [WORDS * 2, WORDS * 3]})["text"]
    found = wherewhat.measure("attention", made, texts=column, documents=1)
    assert by_place(found) == by_place(expected)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_config(model.config), config)
    assert len(wherewhat.measure("attention", adapted, tokens(24) % 16).heads())


def test_tokens_are_those_of_the_shortest_text(model, tokenizer):
    texts = [WORDS, WORDS * 3]
    found = wherewhat.measure("attention", model, texts=texts, tokenizer=tokenizer)
    assert found.config["tokens"] == 1 + len(tokenizer(texts[0], add_special_tokens=False)["input_ids"])
    assert wherewhat.measure("attention", model, [list(range(16)), list(range(12))]).config["tokens"] == 12


def test_own_measurement_in_twelve_lines(model, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_known", dict(measurements()))

    @wherewhat.register
    class KeyNorm(wherewhat.LayerMeasurement):
        """Mean norm of the keys, per head."""

        name = "key_norm"
        metrics = (wherewhat.Metric("key_norm", "norm of keys", "Mean norm of the keys before rotation."),)

        def measure(self, layer, config):
            return {"key_norm": layer.k[0].norm(dim=-1).mean(-1)}

    found = wherewhat.measure("key_norm", model, tokens(24) % 16, controls=("random",))
    layer = wherewhat.attention(model, tokens(24) % 16)[1]
    expected = layer.k[0].norm(dim=-1).mean(-1).repeat_interleave(layer.heads // layer.kv_heads)
    heads = found.heads()
    found_norms = heads[(heads.weights == "trained") & (heads.layer == 1)].key_norm
    assert np.allclose(found_norms, expected, rtol=8 * rounding(24), atol=0)  # a mean over 24 tokens, all positive
    assert "norm of keys" in repr(found)
    assert "key_norm" in found.export(tmp_path / "scores.csv").read_text()
    assert "Mean norm of the keys, per head." in found.report(tmp_path / "page.html").read_text("utf-8")
    report = wherewhat.make_report(model, texts=tokens(24) % 16, tokens=24, out=tmp_path)
    assert [one["name"] for one in report.data["models"][0]["others"]] == ["residual", "key_norm"]


RETURNED = {
    "a shape": (lambda layer: {"wrong": layer.k[0].norm(dim=-1)}, "returned wrong of shape"),
    "a list too short": (lambda layer: {"wrong": [1.0]}, "returned wrong of shape (1,)"),
    "a word": (lambda layer: {"wrong": "many"}, "returned wrong as str: return real numbers"),
    "complex numbers": (lambda layer: {"wrong": torch.ones(layer.heads) * 1j}, "return real numbers"),
    "nothing": (lambda layer: None, "returned NoneType"),
    "a tensor": (lambda layer: layer.k, "returned Tensor"),
    "another name": (lambda layer: {"rwong": torch.ones(layer.heads)}, "is not one of its metrics"),
    "another name in scores": (
        lambda layer: wherewhat.Scores(
            layer=layer.layer, heads={"rwong": torch.ones(layer.heads)}, whole={"uniform": 0.5}
        ),
        "returned 'rwong', which is not one of its metrics: did you mean 'wrong'?",
    ),
    "a misspelt control": (
        lambda layer: wherewhat.Scores(
            layer=layer.layer, heads={"wrong": torch.ones(layer.heads)}, whole={"unifrom": 0.5}
        ),
        "returned 'unifrom', which is not one of its metrics",
    ),
    "no control": (
        lambda layer: wherewhat.Scores(layer=layer.layer, heads={"wrong": torch.ones(layer.heads)}),
        "returned 'wrong' without its control 'uniform'",
    ),
}


def test_a_metric_is_declared_once_and_is_not_its_own_control():
    metric = wherewhat.Metric("one", "one", "One.")
    own = wherewhat.Metric("two", "two", "Two.", control="two")
    for metrics, words in (((metric, metric), "'one' twice"), ((metric, own), "'two' as its own control")):
        declared = {"name": "again", "summary": "A.", "metrics": metrics, "measure": lambda *_: {}}
        with pytest.raises(WherewhatError, match=words):
            wherewhat.register(type("Again", (wherewhat.LayerMeasurement,), declared))


def test_categories_are_counted_and_never_averaged(model, monkeypatch, tmp_path):
    """By hand: head h of document d has the category (h + d) % 2 and one undefined head; shares, and the commonest."""
    monkeypatch.setattr(registry, "_known", dict(measurements()))

    @wherewhat.register
    class Kind(wherewhat.LayerMeasurement):
        """A category of every head."""

        name = "kind"
        metrics = (
            wherewhat.Metric("kind", "kind", "Kind of head.", categories=("even", "odd", "never")),
            wherewhat.Metric("size", "size", "A number."),
        )

        def measure(self, layer, config):
            first = documents.pop(0) if layer.layer == 0 else 0
            heads = (torch.arange(layer.heads) + first) % 2
            heads[-1] = -1 if layer.layer == 0 else heads[-1]
            return {"kind": heads, "size": torch.ones(layer.heads)}

    documents = [0, 1, 1]
    texts = [[1 + i % 9 for i in range(n, n + 16)] for n in (0, 3, 5)]
    found = wherewhat.measure("kind", model, texts=texts, out=tmp_path / "store")
    # Layer 0: (0 1 0 -), (1 0 1 -), (1 0 1 -); layer 1: (0 1 0 1) three times.
    heads = found.heads()
    assert heads[heads.layer == 0].kind.tolist()[:3] == ["odd", "even", "odd"]
    assert heads[heads.layer == 0].kind.isna().tolist() == [False, False, False, True]
    assert heads[heads.layer == 1].kind.tolist() == ["even", "odd", "even", "odd"]
    assert found.stored.head_means("kind") == {0: [1.0, 0.0, 1.0, None], 1: [0.0, 1.0, 0.0, 1.0]}
    shares = {summary.metric.name: summary for summary in found.summary()}
    assert list(shares) == ["kind=even", "kind=odd", "size"]
    # Shares of 7 heads in each document: 4, 3 and 3 are even.
    assert shares["kind=even"].overall.mean == pytest.approx((4 + 3 + 3) / 21)
    assert shares["kind=even"].layers[0].mean == pytest.approx((2 + 1 + 1) / 9)
    assert set(found.layers().columns) == {"layer", "kind=even", "kind=odd", "size"}
    with pytest.raises(WherewhatError, match="is a category, whose codes have no mean"):
        found.stored.document_means("kind")
    figure = found.plot("map", metric="kind")
    assert {code for row in figure.data[0].z for code in row} == {0, 1, None}
    assert "kind: odd" in figure.data[0].text[0][0]
    assert list(figure.data[0].colorbar.ticktext) == ["even", "odd", "never"]
    for metrics in (None, ["kind"], ["kind=odd"]):
        rows = {row["metric"]: row for row in compare([tmp_path / "store"], metrics=metrics).groups.to_dicts()}
        assert "kind" not in rows
        assert rows["kind=odd"]["mean"] == pytest.approx((3 + 4 + 4) / 21)
    assert rows.keys() == {"kind=odd"}
    shown = within_ranges(compare([tmp_path / "store"], metrics=["kind"]).groups).to_dicts()
    assert {row["metric"] for row in shown} == {"kind=even", "kind=odd", "kind=never"}
    assert all(0 <= row["low"] <= row["high"] <= 1 for row in shown)


def test_what_an_own_measurement_returns_is_checked(model, monkeypatch, subtests):
    monkeypatch.setattr(registry, "_known", dict(measurements()))
    returned = None

    @wherewhat.register
    class Wrong(wherewhat.LayerMeasurement):
        """Returns something else."""

        name = "wrong"
        metrics = (wherewhat.Metric("wrong", "wrong", "Wrong.", control="uniform"),)

        def measure(self, layer, config):
            return returned(layer)

    for case, (returned, words) in RETURNED.items():  # noqa: B007 - read by the measurement
        with subtests.test(case=case):
            with pytest.raises(WherewhatError) as raised:
                wherewhat.measure("wrong", model, tokens(24) % 16)
            assert words in str(raised.value)
            assert "\n" not in str(raised.value)


WRONG = {
    "unknown measurement": (lambda m: wherewhat.measure("axess", m, [1, 2, 3]), "did you mean 'axes'?"),
    "unknown option": (lambda m: wherewhat.measure("axes", m, list(range(16)), skp=1), "no option 'skp'"),
    "ids and texts": (lambda m: wherewhat.measure("axes", m, [1, 2, 3], texts=["a"]), "were both given"),
    "texts without tokenizer": (lambda m: wherewhat.measure("axes", m, texts=["a b"]), "has no tokenizer"),
    "embedded texts without tokenizer": (lambda m: wherewhat.measure("axes", m), "has no tokenizer"),
    "ids outside": (lambda m: wherewhat.measure("axes", m, [1, 9999]), "is not in the vocabulary"),
    "more tokens than ids": (lambda m: wherewhat.measure("axes", m, [1, 2, 3], tokens=9), "has 3 tokens, but 9"),
    "prompts without tokenizer": (lambda m: wherewhat.measure("prompts", m), "has no tokenizer"),
    "no model": (lambda m: wherewhat.measure("axes", 3), "model is 3"),
    "no model, but a seed": (lambda m: wherewhat.measure("axes", 3, seed=1), "model is 3"),
    "no model of transformers": (lambda m: wherewhat.measure("axes", torch.nn.Linear(2, 2)), "Linear is not a model"),
    "attention of no model": (lambda m: wherewhat.attention(None, [1, 2, 3]), "model is of type NoneType"),
    "attention of a layer": (lambda m: wherewhat.attention(torch.nn.Linear(2, 2), [1]), "Linear is not a model"),
    "the name of a file": (lambda m: wherewhat.measure("axes", m, texts=__file__), "is the name of a file"),
    "ids on the meta device": (lambda m: wherewhat.measure("axes", m, torch.ones(3, device="meta").long()), "text"),
    "a wrong control": (lambda m: wherewhat.measure("axes", m, [1, 2, 3], controls=("gold",)), "controls is"),
}


def test_wrong_calls_are_one_line(model, subtests):
    for case, (call, words) in WRONG.items():
        with subtests.test(case=case):
            with pytest.raises(WherewhatError) as raised:
                call(model)
            assert words in str(raised.value)
            assert "\n" not in str(raised.value)


def test_a_control_that_cannot_be_made_is_named(monkeypatch):
    def refuse(*_, **__):
        raise LoadError("its weights are quantised")

    monkeypatch.setattr("wherewhat.models.memory.shuffle_query_key", refuse)
    found = wherewhat.measure("attention", tiny("llama"), tokens(24), controls=("shuffled", "random"))
    assert found.left_out == {"shuffled": "its weights are quantised"}
    assert list(found.controls) == ["random"]
    for shown in (repr(found), found._repr_html_()):
        assert "No shuffled control: its weights are quantised" in shown


def test_labels_are_words(model):
    found = wherewhat.measure("heads", model, tokens(24, batch=3) % 16, queries=4)
    assert set(found.heads()["label_together"]) <= {"mixed", "positional", "symbolic", "uniform"}
    assert set(found.heads()["label_no_sink_together"]) <= {"mixed", "positional", "symbolic", "uniform", "sink"}
    tidy = found.heads(tidy=True)
    codes = tidy[(tidy.metric == "label") & (tidy.layer == 0) & (tidy["head"] == 0)].value.tolist()
    names = ("mixed", "positional", "symbolic", "uniform")
    assert found.heads()["label"][0] == names[int(max(codes, key=codes.count))]


def test_a_model_in_memory_is_named_as_it_was_loaded():
    model = tiny("llama")
    for path, name in (
        ("/cache/models--meta--Llama-3/snapshots/" + "a" * 40, "Llama-3"),
        ("C:\\models\\gpt2", "gpt2"),
        ("/cache/" + "0" * 64, "LlamaForCausalLM"),
        ("org/model", "model"),
        ("", "LlamaForCausalLM"),
    ):
        model.config._name_or_path = path
        assert model_request(model).model == name
