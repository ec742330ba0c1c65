"""End-to-end: one file with everything in it, nothing of the text executed, the same bytes again."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LlamaForCausalLM

from helpers.capture import run, tiny, tokens
from helpers.models import llama_config, save_model, save_tokenizer
from helpers.report import HOSTILE, TOKENS, unpacked
from helpers.tolerance import rounding
from wherewhat.caches.plan import LayerHeads, Plan
from wherewhat.imports import package_version
from wherewhat.measures.measurement import measurements
from wherewhat.report.excerpt import REPEATED, ExcerptFile, repeated_tokens, take_excerpt
from wherewhat.report.report import make_report
from wherewhat.rules.roles import find_roles, portraits
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.request import MemoryModel, ModelRequest
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import load_model
from wherewhat.text.documents import documents_of

MEASUREMENTS = {"axes", "heads", "planes", "distance", "frequencies", "perturb", "extend", "residual"}


class Page(HTMLParser):
    """Elements with their attributes, and the content of scripts."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page(made):
    return Page(made.path.read_text("utf-8"))


@pytest.fixture(scope="module")
def whole(page):
    return json.loads(page.scripts[0])


@pytest.fixture(scope="module")
def data(whole):
    (only,) = whole["models"]
    return only


def test_the_page_holds_everything(data, whole, made):
    assert len(data["numbers"]) == 5
    assert all(number["controls"] and number["reading"] for number in data["numbers"])
    assert {run["config"]["measurement"] for run in data["runs"]} == MEASUREMENTS
    assert data["model"]["layers"] == [0, 1]
    assert [len(layer) for layer in data["records"]] == data["model"]["heads"] == [4, 4]
    assert set(data["metrics"][0]["values"]) == {"trained", "random", "shuffled"}
    assert data["distance"]["distances"][:3] == [0, 1, 2]
    assert whole["command"].startswith("wherewhat report ")
    assert whole["learning"] == []
    assert not data["left_out"]
    assert (
        data["swaps"]["votes"] == data["swaps"]["all_keys"]["votes"] == [[[2, 2]] * 4] * 2
    )  # both documents begin alike and give every head one label
    assert HOSTILE.startswith("".join(data["texts"][0]["tokens"])[: len(HOSTILE)])
    assert len(data["texts"][0]["tokens"]) == TOKENS
    assert f"version {package_version('wherewhat')}. Software" in made.path.read_text("utf-8")


def test_the_price_of_additive_logits_is_beside_their_share(data, made):
    """One document: a measured fact beside the untouched model and a control, with no interval and no finding."""
    (name,) = (run["name"] for run in data["runs"] if run["config"]["measurement"] == "residual")
    run = StoredRun(RunDirectory.load(made.out / name))
    (loss,), (additive,), (noise,) = (run.values(name) for name in ("loss", "loss_strength_0", "loss_noise"))
    (price,) = (number["price"] for number in data["numbers"] if number["price"])
    assert price == next(number["price"] for number in data["numbers"] if "r2" in number["metrics"])
    words = (
        "stays at"
        if f"{additive:.2f}" == f"{loss:.2f}"
        else f"{'rises' if additive > loss else 'falls'} from {loss:.2f} to"
    )
    assert price == (
        f"With exactly additive logits the loss {words} {additive:.2f} nats; with noise of the same size added to the "
        f"logits instead, it is {noise:.2f} (one document of {TOKENS} tokens, no interval)."
    )
    assert not any("additive logits" in finding["text"] for finding in data["findings"])


def test_heads_are_counted_alike_in_cards_and_labels(data):
    """Labels over all documents together; those of single documents beside it."""
    (number,) = (number for number in data["numbers"] if "heads_sink" in number["metrics"])
    swaps = data["swaps"]
    total = sum(data["model"]["heads"])
    for metric, value in zip(number["metrics"], number["values"], strict=True):
        name = metric.removeprefix("heads_").removesuffix("_no_sink")
        labels = swaps if name == "sink" or metric.endswith("_no_sink") else swaps["all_keys"]
        count = sum(swaps["codes"][int(code)] == name for layer in labels["label"] for code in layer)
        assert value["words"].startswith(f"{count} of {total}; ")
        assert value["words"].endswith(" in single documents")


def fitted(record, number):
    """The fit of a head on a document, from what the page stores."""
    one = record["documents"][number]
    a = unpacked(record["mean"]) + unpacked(one["a"]) + one["level"]
    b, c = (unpacked(one[name]) for name in "bc")
    i, j = np.indices((len(b), len(b)))
    return a[np.abs(i - j)] + b[i] + c[j]


def test_map_and_curves_give_the_stored_r(data):
    """On a text no longer than the map, fitted and true logits must correlate as the decomposition says."""
    n = TOKENS
    r = next(metric for metric in data["metrics"] if metric["id"] == "r")
    assert r["measurement"] == "axes"
    i, j = np.tril_indices(n)
    for layer, heads in enumerate(data["records"]):
        for head, record in enumerate(heads):
            found = np.corrcoef(fitted(record, 0)[i, j], unpacked(record["documents"][0]["map"]))[0, 1]
            # Both documents begin alike, so the mean over documents is the first one's.
            assert found == pytest.approx(r["values"]["trained"][layer][head], abs=5e-3)


def test_every_document_has_logits_fit_and_curve(data):
    """Both documents begin alike, so that what is stored of the second is the first one's, in fewer bits."""
    assert [text["document"] for text in data["texts"]] == ["<i>0", "<i>1", "repeated random tokens"]
    rows = len(data["texts"][1]["tokens"])
    assert data["texts"][1]["tokens"] == data["texts"][0]["tokens"][:rows]
    assert rows == min(24, TOKENS)
    i, j = np.tril_indices(rows)
    for record in (record for layer in data["records"] for record in layer):
        first, second = (fitted(record, number)[:rows, :rows] for number in range(2))
        np.testing.assert_allclose(first, second, atol=1e-3)
        rest = record["documents"][1]["rest"]
        step = (rest["hi"] - rest["lo"]) / 254
        whole = np.full((TOKENS, TOKENS), np.nan)
        whole[np.tril_indices(TOKENS)] = unpacked(record["documents"][0]["map"])
        np.testing.assert_allclose(second[i, j] + unpacked(rest), whole[i, j], atol=step + 1e-3)
        np.testing.assert_allclose(unpacked(record["half"]), 0, atol=1e-5)


def test_excerpts_of_several_documents_come_back(tmp_path):
    """A further document has fewer tokens; logits of each are those of a pass over it alone."""
    model = tiny("llama")
    save_tokenizer(tmp_path)
    request = MemoryModel(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    given = [torch.randint(3, 30, (TOKENS,), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    documents = documents_of([ids.tolist() for ids in given])
    file = ExcerptFile.of(request, documents, tokens=TOKENS, out=tmp_path)
    file.write(take_excerpt(load_model(request), documents, tokens=TOKENS))
    stored = file.read()
    assert stored is not None
    assert [len(passage.tokens) for passage in stored.passages] == [TOKENS, 24, 24]
    for ids, passage in zip(given, stored.passages, strict=False):
        rows = len(passage.tokens)
        i, j = np.tril_indices(rows)
        for layer in run(model, ids[None]):
            expected = layer.attn_scores()[0][:, i, j].double()
            # Products of fewer rows, whose terms may cancel: relative to the largest logit.
            near = 8 * rounding(layer.q.shape[-1]) * float(expected.abs().max())
            torch.testing.assert_close(passage.logits[layer.layer], expected, atol=near, rtol=0)
    half = len(stored.repeated.tokens) // 2
    assert stored.repeated.tokens[:half] == stored.repeated.tokens[half:]
    assert set(stored.repeated.logits) == set(stored.logits)
    whole = (file.path / "excerpt.json").read_text()
    (file.path / "excerpt.json").write_text(whole.replace("LlamaForCausalLM", "LlamaForCausalLN"))
    assert file.read() is None  # an altered word
    (file.path / "excerpt.json").write_text(whole)
    assert file.read() is not None
    weights = bytearray((file.path / "logits.safetensors").read_bytes())
    weights[-1] ^= 1
    (file.path / "logits.safetensors").write_bytes(weights)
    assert file.read() is None  # an altered number


def test_random_tokens_come_twice_and_are_shown_without_curves(data):
    """An induction head shows its stripe there; the logits are not fitted, so that there is no distance curve."""
    tokens = data["texts"][-1]["tokens"]
    half = len(tokens) // 2
    assert tokens[:half] == tokens[half:]
    assert len(tokens) == 28  # as many as the model has positions for, an even number
    for record in (record for layer in data["records"] for record in layer):
        assert set(record["documents"][-1]) == {"map"}
        assert len(unpacked(record["documents"][-1]["map"])) == len(tokens) * (len(tokens) + 1) // 2


@pytest.mark.parametrize(("positions", "prefix"), [(512, ()), (512, (1,)), (9, (1,)), (2, (1,))])
def test_repeated_tokens_fit_the_model(positions, prefix, tmp_path):
    model = LlamaForCausalLM(llama_config(max_position_embeddings=positions))
    save_tokenizer(tmp_path)
    loaded = load_model(MemoryModel(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)))
    repeated = repeated_tokens(replace(loaded, prefix=prefix))
    half = min(REPEATED, (positions - len(prefix)) // 2)
    if not half:
        assert repeated is None
        return
    assert repeated.ids[: len(prefix)] == prefix
    body = repeated.ids[len(prefix) :]
    assert len(body) == 2 * half
    assert body[:half] == body[half:]
    assert not {0, 1, 2} & set(body)  # special tokens


def test_one_document_has_no_band(tmp_path):
    report = make_report(tiny("llama"), texts=tokens(TOKENS), tokens=TOKENS, out=tmp_path)
    (data,) = report.data["models"]
    assert len(data["texts"]) - 1 == data["sizes"]["axes"]["documents"] == 1
    assert all("half" not in record and "mean" in record for layer in data["records"] for record in layer)


def test_metrics_are_grouped_sized_and_defined_by_their_declarations(data):
    declared = measurements()
    for metric in data["metrics"]:
        name = metric["measurement"]
        assert metric["group"] == f"{name}: {declared[name].summary}"
        assert name in data["sizes"]
    assert data["sizes"]["heads"] == {"documents": 2, "tokens": TOKENS, "queries": 8}
    assert data["sizes"]["axes"] == {"documents": 2, "tokens": TOKENS, "queries": None}
    terms = [term["id"] for term in data["terms"]]
    assert len(terms) == len(set(terms))
    assert {metric.name for name in MEASUREMENTS for metric in declared[name].metrics} == set(terms)
    for number in data["numbers"]:
        assert number["measurement"] in data["sizes"]
        assert set(number["metrics"]) <= set(terms)


def test_headline_numbers_and_labels_are_in_both_versions(data):
    """Sinks apart first, and beside them the papers' definition, over all keys."""
    numbers = {number["title"]: number for number in data["numbers"]}
    assert numbers["Pure heads"]["metrics"] == [
        *("heads_sink", "heads_positional_no_sink", "heads_symbolic_no_sink", "heads_positional", "heads_symbolic")
    ]
    assert numbers["Positional and symbolic"]["metrics"] == ["s_pos_no_sink", "s_sym_no_sink", "s_pos", "s_sym"]
    names = [value["name"] for value in numbers["Pure heads"]["values"]]
    assert names == ["sink", "positional", "symbolic", "positional, all keys", "symbolic, all keys"]
    swaps = data["swaps"]
    assert swaps["labels"][0] == "sink"
    assert "sink" not in swaps["all_keys"]["labels"]
    assert swaps["s_pos"] != swaps["all_keys"]["s_pos"]
    assert (swaps["gamma"], swaps["sink_threshold"], swaps["sink_tokens"]) == (0.1, 0.3, 1)


def test_pattern_can_be_computed_from_the_excerpt(tmp_path):
    """Softmax over the stored logits and the stored sink is the attention pattern of a model with sinks and windows."""
    model = tiny("gpt_oss", attn_implementation="eager")
    save_tokenizer(tmp_path)
    request = MemoryModel(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    documents = documents_of([tokens(TOKENS)[0].tolist()])
    file = ExcerptFile.of(request, documents, tokens=TOKENS, out=tmp_path)
    file.write(take_excerpt(load_model(request), documents, tokens=TOKENS))
    stored = file.read()
    assert stored is not None
    i, j = np.tril_indices(TOKENS)
    for layer in run(model, tokens(TOKENS)):
        scores = torch.full((layer.heads, TOKENS, TOKENS + 1), -torch.inf, dtype=torch.float64)
        scores[:, i, j] = stored.logits[layer.layer].nan_to_num(nan=-torch.inf).double()
        scores[:, :, -1] = torch.tensor(stored.sinks[layer.layer]).double()[:, None]
        near = 8 * rounding(TOKENS)  # a softmax over so many keys
        torch.testing.assert_close(scores.softmax(-1)[..., :-1], layer.pattern()[0].double(), atol=near, rtol=0)


def test_curves_have_intervals_over_documents_and_bands_have_random_planes(data, made):
    """Numbers on the page are those of the runs, with an interval over the two documents."""
    for kind in data["perturbation"]["kinds"]:
        assert kind["rates"] == [1, 5, 10, 20, 50]
        assert all(point["low"] <= point["mean"] <= point["high"] for point in kind["all"])
    lengths = data["lengths"]
    assert (lengths["edge"], lengths["tokens"]) == (TOKENS, 2 * TOKENS)
    none, window, *_ = lengths["methods"]
    assert all(point["mean"] == 0 for point in none["cost"])
    assert [p["mean"] for p in window["cost"][:3]] == pytest.approx([0, 0, 0], abs=1e-5)
    assert len(lengths["positions"]) == len(window["loss"])
    run = next(run for run in data["runs"] if run["config"]["measurement"] == "perturb")
    scores = pq.read_table(made.out / run["name"] / "scores.parquet").to_pylist()
    rises = [row["value"] for row in scores if row["metric"] == "rise_words_at_50"]
    words = data["perturbation"]["kinds"][0]
    assert words["all"][-1]["mean"] == pytest.approx(sum(rises) / len(rises), abs=1e-3)
    bands = data["bands"]
    assert len(bands["turns"]) == len(bands["without"]) == len(bands["only"]) == 2
    assert bands["turns"][0][0] == pytest.approx(2 * np.pi, rel=1e-3)
    assert bands["without_random"] is not None


def test_nothing_comes_from_elsewhere(page, made):
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert re.match(r"#|data:", attributes.get("href", "#")), tag
    policy = next(a for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")["content"]
    assert "default-src 'none'" in policy
    own = page.scripts[3] + re.search(r"<style>(.*?)</style>", made.path.read_text("utf-8"), re.DOTALL)[1]
    assert not re.search(r"https?:|@import|url\(|innerHTML|insertAdjacentHTML|document\.write", own)


def test_the_page_of_a_small_model_is_small(made, tmp_path):
    """The bundle of plotly.js draws every chart of a page; figures with other traces bring all of plotly.js."""
    assert made.path.stat().st_size <= 1_500_000
    (model,) = made.report.data["models"]
    figure = {"data": [{"type": "scatter3d", "x": [0], "y": [0], "z": [0]}], "layout": {}}
    others = [{**model["others"][0], "figure": figure}]
    large = replace(made.report, data={**made.report.data, "models": [{**model, "others": others}]})
    for report, is_drawn in ((made.report, False), (large, True)):
        code = gzip.decompress(base64.b64decode(Page(report.html()).scripts[2])).decode()
        assert code.lstrip().startswith("/**\n* plotly.js")
        assert ('name:"scatter3d"' in code) == is_drawn
        for kind in ("bar", "box", "contour", "heatmap", "histogram", "histogram2d", "pie", "scatter", "violin"):
            assert f'name:"{kind}"' in code


def test_roles_and_portraits_of_model_and_control(data, made):
    """Identity: what the page shows is what the rules say about the stored runs."""
    for weights in ("trained", "random"):
        (folder,) = made.out.glob(f"heads-*tiny-{weights}-*")
        run = StoredRun(RunDirectory.load(folder))
        roles, sentences = find_roles(run), portraits(run)
        for layer, heads in enumerate(data["roles"]["heads"][weights]):
            assert heads == [
                {"roles": [role.role for role in roles[layer, head]], "portrait": sentences[layer, head]}
                for head in range(4)
            ]
    assert set(data["roles"]["metrics"].values()) <= {metric["id"] for metric in data["metrics"]}


def test_distance_curves_of_control_models(data, made):
    """Brute force: the mean over documents of curves without their means, and the interval's half width."""
    for weights in ("random", "shuffled"):
        (folder,) = made.out.glob(f"axes-*tiny-{weights}-*")
        run = StoredRun(RunDirectory.load(folder))
        for layer in range(2):
            curves = [run.curve(layer, "a", document=document).double() for document in range(2)]
            for head in range(4):
                first, second = (curve[head] - curve[head].mean() for curve in curves)
                record = data["control_curves"][weights][layer][head]
                half = 12.706204736 * (first - second).abs() / 2  # Student's factor of two documents
                for name, expected in (("mean", (first + second) / 2), ("half", half)):
                    step = (expected.max() - expected.min()) / 254
                    np.testing.assert_allclose(unpacked(record[name]), expected, rtol=1e-5, atol=0.51 * float(step))


def test_hostile_text_is_only_data(page, made, data):
    html = made.path.read_text("utf-8")
    for text in ("<script>alert", "<img", "onclick=alert(3)>", "onerror=alert(4)>", "🐈", "שלום", "\u202e"):
        assert text not in html.replace(page.scripts[2], ""), text
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert "<b onclick" in data["model"]["name"]
    assert data["texts"][0]["document"] == "<i>0"


def test_same_runs_same_bytes(made, hostile_model, tmp_path):
    again = make_report(
        ModelRequest(model=hostile_model, device="cpu"), out=made.out, files=[str(made.text)], tokens=TOKENS
    )
    assert again.name == made.report.name
    assert again.write(tmp_path / "new" / "again.html").read_bytes() == made.path.read_bytes()


@pytest.mark.slow
def test_standard_input_is_read_once_and_kept(cli, made, hostile_model, tmp_path, monkeypatch):
    data = (HOSTILE * 3).encode("utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    outcome = cli("report", hostile_model, "--text", "-", "--tokens", TOKENS, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    (kept,) = (tmp_path / "runs").glob("stdin-*/stdin.txt")
    assert kept.read_bytes() == data
    page = Path(outcome.out.splitlines()[-1])
    whole = json.loads(Page(page.read_text("utf-8")).scripts[0])
    command = shlex.split(whole["command"])
    assert whole["models"][0]["texts"][0]["document"] == "stdin"
    again = cli(*command[1:])
    assert again.out.splitlines()[-1] == str(page)


def test_nothing_piped_in_is_one_line(cli, hostile_model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    outcome = cli("report", hostile_model, "--text", "-", "--tokens", TOKENS)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert not (tmp_path / "runs").exists()


def test_wrong_input_is_one_line(cli, made, hostile_model, tmp_path, subtests):
    for arguments, word in (
        (("--training", "nowhere"), "nowhere"),
        (("--weights", "trained", "--weights", "trained"), "twice"),
        (("--weights", "pruned"), "pruned"),
        (("--tokens", "1"), "at least 2 tokens"),
        (("--tokens", "99"), "99"),
        (("--documents", "99"), "99 documents"),
        (("--dtype", "float7"), "float7"),
    ):
        with subtests.test(arguments=arguments):
            outcome = cli("report", hostile_model, "--text", made.text, *arguments)
            *before, error = outcome.err.splitlines()
            assert (outcome.code, outcome.out, error.startswith("wherewhat: ")) == (2, "", True), outcome
            assert word in error
            # What only the loaded model shows to be wrong comes after the lines of its loading.
            assert not before or arguments[0] in ("--tokens", "--dtype"), outcome
            assert not any(line.startswith("wherewhat: ") for line in before)
            assert not (tmp_path / "runs").exists()


def test_without_plotly_it_says_so_before_measuring(cli, made, hostile_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    outcome = cli("report", hostile_model, "--text", made.text, "--tokens", TOKENS)
    assert outcome.code == 2
    assert "pip install plotly" in outcome.err
    assert not (tmp_path / "runs").exists()


def test_a_model_without_rotation_has_a_page_too(tmp_path):
    config = GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    folder = save_model(tmp_path / "gpt2", config)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and the dog ran " * 3)
    report = make_report(ModelRequest(model=folder), out=tmp_path / "runs", files=[str(text)], tokens=24)
    (data,) = report.data["models"]
    assert sorted(line.split()[0].strip(":") for line in data["left_out"]) == [
        "distance",
        "extend",
        "frequencies",
        "planes",
    ]
    assert data["distance"] is data["bands"] is None
    assert data["lengths"] is None
    assert report.html().startswith("<!doctype html>")


def test_the_newest_plan_of_the_same_weights_is_shown(made, hostile_model, tmp_path):
    """Plans of other weights and files that are no plans are passed over; text of a plan stays text."""
    out = tmp_path / "runs"
    shutil.copytree(made.out, out)
    config = next(run["config"] for run in made.report.data["models"][0]["runs"])
    number = {"mean": 0.25, "low": 0.0, "high": 0.5, "n": 2}
    row = {"selector": "ranks", "share": 0.5, "rise": number, "found": number, "part": number}
    known = {
        "sentence": "<script>alert(4)</script>",
        "tokens": 200,
        "dtype": "float32",
        "chosen_on": ["a"],
        "evaluated_on": ["b", "c"],
        "curve": [row],
        "areas": {"rows": [{"selector": name, "rise": number, "part": None} for name in ("ranks", "mass")]},
    }
    for name, weights_hash in (("plan-a.json", config["weights_hash"]), ("plan-b.json", "0" * 64)):
        plan = Plan(
            model="tiny",
            fingerprint="0",
            window=8,
            sinks=1,
            layers={0: LayerHeads(4, 2)},
            full={0: (0,)},
            provenance={**known, "weights_hash": weights_hash},
        )
        plan.save(out / name)
    (out / "plan-c.json").write_text("{")
    damaged = json.loads((out / "plan-a.json").read_text())
    damaged["provenance"]["curve"] = [{"share": "x"}]
    (out / "plan-d.json").write_text(json.dumps(damaged))
    model = ModelRequest(model=hostile_model, device="cpu")
    report = make_report(model, out=out, files=[str(made.text)], tokens=TOKENS)
    (shown,) = (other for other in report.data["models"][0]["others"] if other["name"] == "plan")
    assert shown["summary"] == known["sentence"]
    assert "scored on 1 document of 200 tokens" in shown["about"]
    assert [row["title"] for row in shown["rows"]] == [
        "rise of the loss, ranks, 50% of the groups",
        "gain from planted sequences, ranks, 50% of the groups",
        "rise of the loss, ranks, mean over all shares",
        "rise of the loss, mass, mean over all shares",
    ]
    assert shown["rows"][0]["value"].items() >= number.items()
    assert "<script>alert(4)" not in report.html()
