"""End-to-end: several models, or a model and its control model, on one page, and measurements by other commands."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

import wherewhat
from helpers.models import llama_config, save_speller
from helpers.report import TOKENS
from wherewhat.cli.report import _numbers_table
from wherewhat.measures import measurement as registry
from wherewhat.measures.measurement import LayerMeasurement
from wherewhat.measures.statistics import interval, welch
from wherewhat.models.memory import weight_sample
from wherewhat.report import views
from wherewhat.report.data import Number, Value
from wherewhat.report.excerpt import Excerpt, Passage
from wherewhat.report.page import Profiled
from wherewhat.report.report import make_report
from wherewhat.report.side_by_side import SAME_WEIGHTS, ComparedModel, difference, not_matched
from wherewhat.runs.collection import Runs
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import StoredRun
from wherewhat.scores import Metric

DIGITS = {"rel": 2e-3}
"""A page shows four digits: half a unit of the last is at most 5e-4."""


def test_each_model_is_what_it_is_alone_and_a_control_model_is_its_models_control(beside, made):
    report, _ = beside
    assert report.data["models"][0] == made.report.data["models"][0]
    names = [one["model"]["name"] for one in report.data["models"]]
    assert names == ["<b onclick=alert(3)>tiny", "<b onclick=alert(3)>tiny (random)", "other"]
    assert [len(one["records"]) for one in report.data["models"]] == [2, 2, 3]
    # The random control model's own numbers are those shown beside the trained model's.
    trained, random, _ = beside[0].data["models"]
    r = [next(m for m in one["metrics"] if m["id"] == "r") for one in (trained, random)]
    assert set(r[1]["values"]) == {"random"}
    assert r[0]["values"]["random"] == r[1]["values"]["random"]
    control = next(value for value in trained["numbers"][0]["controls"] if value["name"] == "one random control")
    assert control["mean"] == random["numbers"][0]["values"][0]["mean"]
    assert "one random control" not in [value["name"] for value in random["numbers"][0]["controls"]]


def test_command_with_several_models(cli, made, hostile_model, beside):
    del beside  # what it measured is there already
    given = ("--text", made.text, "--tokens", TOKENS, "--out", made.out, "--device", "cpu")
    outcome = cli("report", hostile_model, "--weights", "trained", "--weights", "random", *given)
    assert outcome.code == 0, outcome.err
    path = outcome.out.splitlines()[-1]
    data = json.loads(Path(path).read_text("utf-8").split('id="data">')[1].split("</script>")[0])
    assert [one["model"]["weights"] for one in data["models"]] == ["trained", "random"]
    assert "--weights trained --weights random" in data["command"]


def rows_of(data, metric_title, name):
    found = [row for row in data["comparison"]["numbers"] if (row["title"], row["name"]) == (metric_title, name)]
    return {row["model"]: row for row in found}


def stored(made, page, measurement):
    """The finished run of a measurement on the model of a page."""
    weights = page["model"]["weights"]
    name = next(
        run["name"]
        for run in page["runs"]
        if (run["config"]["measurement"], run["config"]["weights"]) == (measurement, weights)
    )
    return StoredRun(wherewhat.RunDirectory.load(made.out / name))


def test_differences_are_paired_by_document(tuned, made):
    data = tuned[0].data
    first, second = rows_of(data, "Additive share of the logits", "r").values()
    runs = [stored(made, page, "axes") for page in data["models"]]
    means = [run.document_means("r") for run in runs]
    expected = interval([means[1][name] - means[0][name] for name in means[0]])
    assert second["over"] == "paired, 2 documents"
    assert second["difference"]["mean"] == pytest.approx(expected.mean, **DIGITS)
    assert second["difference"]["low"] == pytest.approx(expected.low, **DIGITS)
    assert second["difference"]["mean"] == pytest.approx(second["value"]["mean"] - first["value"]["mean"], abs=1e-3)
    assert first["difference"] is None
    shown = next(
        value for value in data["models"][1]["numbers"][1]["controls"] if value["name"] == "one random control, r"
    )
    assert second["control"]["mean"] == shown["mean"]


def test_other_documents_are_compared_by_welch():
    one, two = {"a": 1.0, "b": 2.0, "e": 4.0}, {"a": 2.0, "c": 5.0, "d": 3.0}
    assert difference(one, {"a": 2.0, "b": 3.0}, paired=True) == (interval([1.0, 1.0]), "paired, 2 documents")
    expected = welch([1.0, 2.0, 4.0], [2.0, 5.0, 3.0])
    assert difference(one, two, paired=True) == (expected, "Welch, 3 and 3 documents")
    assert difference(one, one, paired=False)[1] == "Welch, 3 and 3 documents"
    assert difference({"a": 1.0}, {"a": 2.0}, paired=True) == (interval([1.0]), "one document")


def test_a_fine_tuned_model_is_compared_head_by_head(tuned, made):
    data = tuned[0].data
    (pair,) = data["comparison"]["pairs"]
    assert pair["why"] is None
    pages = data["models"]
    runs = [stored(made, page, "axes") for page in pages]
    before, after = (run.head_documents("unique_c") for run in runs)
    changes = {place: interval([after[place][d] - before[place][d] for d in before[place]]) for place in before}
    found = pair["metrics"]["unique_c"]
    order = sorted(changes, key=lambda place: -abs(changes[place].mean))
    assert [(one["layer"], one["head"]) for one in found["changed"]] == order[:10]
    assert len(found["changed"]) == found["heads"] == 8
    for one in found["changed"]:
        expected = changes[one["layer"], one["head"]]
        assert (one["change"]["mean"], one["change"]["low"]) == pytest.approx((expected.mean, expected.low), **DIGITS)
    means = [[sum(values.values()) / 2 for values in found.values()] for found in (before, after)]
    assert found["correlation"] == pytest.approx(np.corrcoef(*means)[0, 1], abs=1e-3)
    assert sum(map(sum, pair["labels"]["counts"])) == 8
    assert [sum(row) for row in pair["labels"]["counts"]] == [
        sum(int(code) == index for layer in pages[0]["swaps"]["label"] for code in layer)
        for index in range(len(pair["labels"]["names"]))
    ]


def test_unrelated_heads_are_not_matched(beside, tuned, made):
    """A control model is no fine-tuned model, and neither is one of another architecture or training."""
    random, other = (pair["why"] for pair in beside[0].data["comparison"]["pairs"])
    assert "is a control with random weights, not a fine-tuned model" in random
    assert "the architectures differ (llama, 2 layers of 4 heads, width 16; gpt2, 3 layers" in other
    page = tuned[0].data["models"][0]
    runs = Runs([(Request("axes"), stored(made, page, "axes"))])
    numbers = np.random.default_rng(0).normal(size=(2, 80))
    passage = Passage([], {0: torch.zeros(4, 6)})
    first, second = (
        ComparedModel(name, Excerpt([passage], {}, {"type": "x", "sample": list(sample)}, None, 0.0), runs)
        for name, sample in zip("ab", numbers, strict=True)
    )
    assert "the weights are unrelated (correlation " in not_matched(first, second)
    assert not_matched(first, first) is None


def test_samples_of_weights_tell_separate_trainings_from_fine_tuning():
    """Also in another precision."""
    samples = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama_config(num_hidden_layers=8))
        samples.append(weight_sample(model))
    samples.append(weight_sample(model.bfloat16()))
    assert len(samples[0]) == 4 * (2 + 7 * 8)
    correlation = np.corrcoef(samples)
    assert abs(correlation[0, 1]) < 0.3 < SAME_WEIGHTS < correlation[1, 2]


def test_a_control_is_said_to_be_one_model(made, cli, hostile_model, monkeypatch):
    (model,) = made.report.data["models"]
    assert made.report.data["comparison"] is None
    assert "sample" not in model["model"]
    names = [value["name"] for number in model["numbers"] for value in (*number["controls"], *number["kinds"])]
    controls = [name for name in names if "control" in name]
    assert len(controls) >= 7
    assert all(name.startswith(("one random control", "one shuffled control")) for name in controls)
    options = ("--text", made.text, "--tokens", TOKENS, "--out", made.out, "--device", "cpu")
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("report", hostile_model, *options).out
    table = shown[shown.index("mean over heads and documents") :].partition("In brackets")[0].splitlines()
    assert table[1].split() == ["value", "random", "shuffled"]
    assert len(table) <= 25
    assert max(map(len, table)) <= 80
    assert "over documents: random is one untrained model, shuffled one draw" in " ".join(shown.split())


def test_control_models_that_were_not_measured_have_no_column(capsys):
    numbers = [Number("r", [Value("r", interval([0.9]))], [Value("one random control", interval([0.8]))], "")]
    Console(width=200).print(_numbers_table([Profiled("tiny", [], numbers)]))
    header, *lines = capsys.readouterr().out.splitlines()[1:]
    assert header.split() == ["value", "random"]
    assert lines[0].split() == ["r", "0.900", "0.800"]
    assert "shuffled" not in "".join(lines)


def test_names_in_the_terminal_are_no_markup(capsys):
    names = ["tiny[v2]", "tiny[/b]", r"tiny\[i]"]
    Console(width=200).print(_numbers_table([Profiled(name, [], []) for name in names]))
    shown = capsys.readouterr().out
    assert [name for name in names if name not in shown] == []


# Measurements made by other commands


class KeyNorm(LayerMeasurement):
    """Mean norm of the keys of every head."""

    name = "key_norm"
    metrics = (Metric("key_norm", "norm of keys", "Mean norm of the keys before rotation."),)

    def measure(self, layer, config):
        return {"key_norm": layer.k[0].norm(dim=-1).mean(-1)}


OTHERS = {
    "residual": {},
    "removal": {},
    "split": {},
    "prompts": {"options": {"sizes": "2", "count": "2", "kinds": "binding"}},
    "choices": {"options": {"rates": (0.0, 0.5), "kinds": ("words",)}},
    "attention": {},
    "key_norm": {},
}
LENGTH = 24


@pytest.fixture(scope="module")
def spelled(speller, tmp_path_factory):
    """Folder with reports of a model: ``runs`` has the other measurements too, ``report`` those of another model."""
    folder = tmp_path_factory.mktemp("others")
    text, items = folder / "text.jsonl", folder / "items.jsonl"
    lines = [{"name": f"text {i}", "text": "the cat sat on a mat and the dog ran. "[i:] * 3} for i in range(4)]
    text.write_text("\n".join(map(json.dumps, lines)))
    questions = [{"context": f"the {word} sat on a", "choices": [" mat", " dog"], "gold": 0} for word in ("cat", "dog")]
    items.write_text("\n".join(map(json.dumps, questions)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_known", dict(registry.measurements()))
        patch.setattr(views, "VIEWS", {**views.VIEWS, "key_norm": views.View()})  # a report does not run it
        registry.register(KeyNorm)
        report(speller, text, folder / "report")
        shutil.copytree(folder / "report", folder / "runs")
        inputs = {"prompts": {}, "choices": {"items": str(items)}}
        another = save_speller(folder / "other" / "tiny", seed=8)
        for place, model, controls in (("runs", speller, ("random",)), ("report", another, ())):
            for name, given in OTHERS.items():
                asked = inputs.get(name, {"files": (str(text),), "tokens": LENGTH})
                request = Request(name, model=ModelRequest(model=model, device="cpu"), **asked, **given)
                wherewhat.run(request, out=folder / place, controls=controls)
        yield folder


def report(model, text, out):
    asked = ModelRequest(model=model, device="cpu")
    return make_report(asked, out=out, files=[str(text)], tokens=LENGTH)


@pytest.mark.slow
def test_finished_measurements_are_shown_without_measuring(spelled, speller, monkeypatch):
    monkeypatch.setattr("wherewhat.runs.execution.prepare", None)  # would be called to measure
    made = report(speller, spelled / "text.jsonl", spelled / "runs").data["models"][0]
    assert {other["name"] for other in made["others"]} == set(OTHERS)
    assert {one["name"] for one in made["method"]} >= set(OTHERS)
    for other in made["others"]:
        assert other["rows"], other["name"]
        assert all({"value", "control", "controls"} <= set(row) for row in other["rows"])
        assert all(set(row["controls"]) <= {"random"} for row in other["rows"])
        assert any(row["controls"] for row in other["rows"]), other["name"]
        # The report's own run of the residual is of one document.
        assert other["more"] == int(other["name"] == "residual")
        assert other["command"].startswith(f"wherewhat {other['name']} ")
    values = {metric["id"]: metric["values"] for metric in made["metrics"]}  # of heads, for the map
    assert {"removal_loss", "direct_logit", "key_norm"} <= set(values)
    assert all(set(values[name]) == {"trained", "random"} for name in ("removal_loss", "key_norm"))
    about = {other["name"]: other["about"] for other in made["others"]}
    assert about["attention"].startswith("Measured in float32 on 4 documents of 24 tokens;")
    assert about["residual"].startswith("Measured in float32 on 4 documents of 24 tokens;")
    assert about["choices"].startswith("Measured in float32 on 2 items;")


@pytest.mark.slow
def test_measurements_of_another_model_are_not_shown(spelled, speller):
    """The folder has them of a model with the same name and tokenizer, and other weights."""
    finished = {config["measurement"] for _, config in KnownRuns(spelled / "report").finished()}
    assert set(OTHERS) <= finished
    others = report(speller, spelled / "text.jsonl", spelled / "report").data["models"][0]["others"]
    assert [(one["name"], one["more"]) for one in others] == [("residual", 0)]
    assert "on 1 document of 24 tokens" in others[0]["about"]


@pytest.mark.slow
def test_the_command_of_a_measurement_finds_its_run(spelled, speller, cli):
    """Also the options, as a user would type them."""
    for other in report(speller, spelled / "text.jsonl", spelled / "runs").data["models"][0]["others"]:
        if other["name"] == "key_norm":  # the commands were made before it was registered
            continue
        found = cli(*shlex.split(other["command"])[1:], "--out", spelled / "runs")
        assert (found.code, found.err) == (0, ""), other["name"]


@pytest.mark.slow
def test_the_newest_run_is_shown_and_unfinished_ones_are_not(spelled, speller, tmp_path):
    out = shutil.copytree(spelled / "runs", tmp_path / "runs")
    request = Request(
        "attention",
        model=ModelRequest(model=speller, device="cpu"),
        files=(str(spelled / "text.jsonl"),),
        tokens=LENGTH - 4,
    )
    newer = wherewhat.run(request, out=out)
    shown = {one["name"]: one for one in report(speller, spelled / "text.jsonl", out).data["models"][0]["others"]}
    assert "of 20 tokens" in shown["attention"]["about"]
    assert shown["attention"]["more"] == 1
    assert all(not row["controls"] for row in shown["attention"]["rows"])  # the control has other options
    (newer.path / "complete.json").unlink()
    shown = {one["name"]: one for one in report(speller, spelled / "text.jsonl", out).data["models"][0]["others"]}
    assert ("of 24 tokens" in shown["attention"]["about"], shown["attention"]["more"]) == (True, 0)


@pytest.mark.slow
def test_numbers_and_intervals_are_inside_the_declared_ranges(spelled, made):
    for out in (spelled / "runs", made.out):
        for path, _ in KnownRuns(out).finished():
            run = StoredRun(wherewhat.RunDirectory.load(path))
            for summary in run.summaries:
                least, most = summary.metric.range
                values = run.numbers[summary.metric.name].defined.value
                assert least - 1e-6 <= values.min() <= values.max() <= most + 1e-6, summary.metric
                for about in (summary.overall, *summary.layers.values()):
                    if about.low is not None:
                        assert least - 1e-6 <= about.low <= about.mean <= about.high <= most + 1e-6
