"""Identity: layers of different kinds are told apart by what they do, and their numbers are reported apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import wherewhat
from helpers.models import llama_config, save_model
from wherewhat.captures.layer_proofs import layer_kinds
from wherewhat.captures.proof import prove
from wherewhat.measures import measurement as registry
from wherewhat.report.result import run
from wherewhat.runs.execution import run as run_request
from wherewhat.runs.request import MemoryModel, ModelRequest, Request
from wherewhat.runs.results import StoredRun
from wherewhat.runs.tables import curve_table, head_table
from wherewhat.scores import stored_metric

LOCAL, GLOBAL = "window 8, RoPE base 10,000", "full, RoPE base 1,000,000"


def gemma_config(**changes) -> Gemma3TextConfig:
    settings = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
    }
    return Gemma3TextConfig(**{**settings, **changes})


def kinds_of(config) -> dict[str, list[int]]:
    torch.manual_seed(0)
    return layer_kinds(prove(AutoModelForCausalLM.from_config(config).eval()).layers)


def test_kinds_are_named_by_what_differs():
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": linear}
    for changes, expected in (
        ({}, {LOCAL: [0, 1, 3], GLOBAL: [2]}),
        ({"sliding_window": 4096}, {"window 4,096, RoPE base 10,000": [0, 1, 3], GLOBAL: [2]}),
        ({"layer_types": ["full_attention"] * 4}, {}),
        ({"rope_parameters": ropes}, {LOCAL: [0, 1, 3], "full, RoPE base 10,000 ÷ 8": [2]}),
    ):
        assert kinds_of(gemma_config(**changes)) == expected, changes
    assert kinds_of(llama_config()) == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("kinds") / "tiny-gemma", gemma_config())


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    here = tmp_path_factory.mktemp("runs")
    files = []
    for number, words in enumerate(("the cat sat on a mat and the dog ran", "a dog ran and sat . the mat on a cat")):
        files.append(here / f"{number}.txt")
        files[-1].write_text(f"{words} " * 4)
    request = Request(
        measurement="axes", model=ModelRequest(model=folder, device="cpu"), files=tuple(map(str, files)), tokens=30
    )
    return run(request, out=here / "runs")


def test_numbers_of_each_kind(result):
    """Brute force: means and pooled correlations of the stored scores."""
    kinds = StoredRun(result).kinds
    assert kinds == {LOCAL: [0, 1, 3], GLOBAL: [2]}
    scores = result.scores().to_pandas()
    summaries = {summary.metric.name: summary for summary in result.summary()}
    for kind, layers in kinds.items():
        chosen = scores[scores.layer.isin(layers) & scores.document.notna()]
        r = chosen[chosen.metric == "r"].groupby("document").value.mean()
        assert summaries["r"].kinds[kind].mean == pytest.approx(r.mean(), abs=1e-12)
        pooled = []
        for _, one in chosen.groupby("document"):
            pairs = one[one.metric == "pairs"].set_index("layer").value
            sse, tss, mean = (one[one.metric == name] for name in ("sse", "tss", "logit_mean"))
            weight = mean.layer.map(pairs).to_numpy()
            grand = np.average(mean.value, weights=weight)
            total = tss.value.sum() + (weight * (mean.value - grand) ** 2).sum()
            pooled.append(np.sqrt(1 - sse.value.sum() / total))
        assert summaries["pooled_r"].kinds[kind].mean == pytest.approx(np.mean(pooled), abs=1e-9)
    assert all(LOCAL in summary.kinds for summary in summaries.values())
    shown = result._repr_html_()  # in a notebook
    assert shown.index(f">{LOCAL} (3)</th>") < shown.index(f">{GLOBAL} (1)</th>")


@pytest.mark.slow
def test_the_command_shows_the_kinds_beside_their_controls(cli, folder, text):
    done = cli("axes", folder, "--text", text, "--tokens", 24, "--device", "cpu")
    assert done.code == 0, done.err
    assert "by kind of layer" in done.out
    below = done.out.split("by kind of layer")[1].split("mean over")[1]
    assert below.count("trained") == below.count("shuffled") == 2
    assert "3 layers: window" in below
    assert "1 layer: full" in below
    assert "pooled r" in below


@pytest.mark.slow
def test_the_report_shows_the_kinds(folder, text, tmp_path):
    from wherewhat.report.report import make_report

    made = make_report(ModelRequest(model=folder, device="cpu"), out=tmp_path, files=[str(text)], tokens=24)
    (model,) = made.data["models"]
    assert model["model"]["kinds"] == {LOCAL: [0, 1, 3], GLOBAL: [2]}
    names = [value["name"] for value in model["numbers"][0]["kinds"]]
    assert names == [
        f"{kind}{control}"
        for kind in (LOCAL, GLOBAL)
        for control in ("", ", one random control", ", one shuffled control")
    ]


def test_categories_of_options_and_of_controls_are_not_averaged(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_known", dict(registry.measurements()))
    names, codes = ("where", "what"), torch.tensor([0, 1, 1, 1])

    @wherewhat.register
    class Sides(wherewhat.LayerMeasurement):
        """Categories whose names depend on options, by pattern, and as a control."""

        name = "sides"
        metrics = (wherewhat.Metric("side", "side", "A side.", categories=names, control="by_chance"),)
        stored = (stored_metric("side_*", categories=names),)

        def more_metrics(self, config):
            return (wherewhat.Metric("other", "other", "Another.", categories=names),)

        def measure(self, layer, config):
            return dict.fromkeys(("side", "by_chance", "side_3", "other"), codes)

    model = MemoryModel(AutoModelForCausalLM.from_config(llama_config()).eval(), model="tiny")
    made = StoredRun(run_request(Request("sides", model=model, texts=(list(range(8)), list(range(9)))), out=tmp_path))
    heads = head_table({"trained": made}, tidy=False).to_pydict()
    for metric in ("side", "by_chance", "side_3", "other"):
        assert heads[metric] == [names[code] for code in codes] * 2
        with pytest.raises(wherewhat.WherewhatError, match="is a category, whose codes have no mean"):
            made.document_means(metric)
    assert curve_table({"trained": made}, None).num_rows == 0  # it has no curves
