"""End to end: ``wherewhat plan`` writes a plan, a picture and a pattern, and refuses wrong input in one line."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.models import save_model
from wherewhat.caches.plan import LayerHeads, Plan
from wherewhat.errors import ConfigError
from wherewhat.report.figures import pareto_figure


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Five documents of the words that the tiny model knows."""
    texts = tmp_path_factory.mktemp("texts")
    for number in range(5):
        known = ["the", "cat", "sat", "on", "a", "mat"]
        (texts / f"{number}.txt").write_text(" ".join(known[(i * (number + 2) + i // 7) % 6] for i in range(260)))
    return texts


def test_plan_is_written_with_its_picture(cli, folder, words, tmp_path):
    options = (
        "--text",
        words,
        "--tokens",
        200,
        "--window",
        20,
        "--budget",
        0.5,
        "--choose",
        2,
        "--beyond",
        "--out",
        tmp_path / "runs",
    )
    files = (
        "--file",
        tmp_path / "my.json",
        "--export",
        f"kvpress={tmp_path / 'pattern'}",
        "--triattention",
        tmp_path / "my.pt",
    )
    outcome = cli("plan", folder, *options, *files)
    assert outcome.code == 0, outcome.err
    plan = Plan.load(tmp_path / "my.json")
    assert plan.share == 0.5
    assert "see the whole text, the others the last 20 and the first 4 keys" in " ".join(outcome.out.split())
    assert (tmp_path / "my.html").stat().st_size > 10_000
    assert (tmp_path / "pattern" / "full_attention_heads.tsv").is_file()
    assert "of the cache for 50% of the groups" in " ".join(outcome.out.split())
    assert "my.pt" in outcome.out
    statistics = torch.load(tmp_path / "my.pt", weights_only=True)  # noqa: TID251 - the format of TriAttention
    assert statistics["metadata"]["num_traces"] == 2  # the documents for choosing
    assert "layer01_head03" in statistics["stats"]
    figure = pareto_figure(plan)
    assert {trace.name for trace in figure.data} == {"auto", "mass", "random"}


@pytest.mark.slow
def test_curves_print_areas(cli, folder, words, tmp_path):
    options = ("--tokens", 200, "--window", 20, "--budget", 0.5, "--choose", 2, "--documents", 2)
    outcome = cli("plan", folder, "--text", words, *options, "--beyond", "--curves", "--greedy", "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    assert "areas under the curves: means over all shares" in " ".join(outcome.out.split())
    areas = Plan.load(next(tmp_path.glob("*.json"))).provenance["areas"]
    assert "greedy" in {row["selector"] for row in areas["rows"]}


def test_plan_without_measuring_it(cli, folder, words, tmp_path):
    options = ("--text", words, "--tokens", 200, "--window", 20, "--beyond", "--documents", 0, "--out", tmp_path)
    outcome = cli("plan", folder, *options, "--file", tmp_path / "my.json")
    assert outcome.code == 0, outcome.err
    assert "was not measured and is unknown." in " ".join(outcome.out.split())
    assert Plan.load(tmp_path / "my.json").share == 0.25
    assert not (tmp_path / "my.html").exists()


def test_a_saved_plan_is_exported_without_measuring(cli, folder, words, tmp_path, monkeypatch):
    options = ("--text", words, "--tokens", 200, "--window", 20, "--beyond", "--documents", 0, "--sinks", 0)
    saved = tmp_path / "my.json"
    outcome = cli("plan", folder, *options, "--unit", "layer", "--out", tmp_path, "--file", saved)
    assert outcome.code == 0, outcome.err
    monkeypatch.setattr("wherewhat.plans.planner.make_plan", lambda *_, **__: pytest.fail("a plan was made"))
    exported = ("--export", f"vllm={tmp_path / 'vllm.json'}", "--export", f"tensorrt-llm={tmp_path / 'trt.yaml'}")
    outcome = cli("plan", folder, "--plan", saved, *exported, "--context", 1000, "--memory", "1GB")
    assert outcome.code == 0, outcome.err
    text = " ".join(outcome.out.split())
    assert "The cache of a text of 1,000 tokens has" in text
    assert "vllm: fields of vLLM" in text
    assert len(json.loads((tmp_path / "vllm.json").read_text())["layer_types"]) == 2
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "bad.json").write_text("{}")
    for arguments, message in (
        (("--plan", tmp_path / "bad.json"), "is not a plan"),
        (("--plan", saved, "--export", f"transformers={tmp_path / 'x'}"), "ignores layer_types"),
        (("--plan", saved, "--export", f"{tmp_path / 'x'}"), "give KIND=FILE"),
        (("--plan", saved, "--budget", 0.5), "--budget has no effect on the plan that --plan names"),
    ):
        outcome = cli("plan", folder, *arguments)
        assert outcome.code == 2
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
    (tmp_path / "bad.json").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_wrong_input_is_one_line(cli, folder, words):
    for arguments, message in (
        (("--budget", 2), "--budget is 2: a share is from 0 to 1, such as 0.25"),
        (("--budget", 0.5, "--min-found", 0.5), "--budget and --min-found were both given"),
        (("--tokens", 60), "texts of 60 tokens are within the window of 64 keys and 4 first ones"),
        (("--export", "vllm=x"), "vllm limits whole layers, and this plan chooses groups: make it with --unit layer"),
        (("--export", "vllm=x", "--unit", "layer"), "vllm has no sinks, and this plan keeps the first 4 keys"),
        (("--text", words / "0.txt"), "a plan needs 4 documents for choosing and 3 others for measuring"),
    ):
        outcome = cli("plan", folder, *arguments)
        assert outcome.code == 2
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
    with pytest.raises(ConfigError, match="has no measured costs"):
        pareto_figure(Plan("m", "", 8, 2, {0: LayerHeads(4, 2)}, {}))
