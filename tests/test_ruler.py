"""RULER: intervals, tasks that are left out, batches without padding, resuming, and the page, without NVIDIA's code."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers.models import save_speller
from wherewhat.caches.plan import Plan, fingerprint, plannable
from wherewhat.captures.proof import prove
from wherewhat.errors import WherewhatError
from wherewhat.models.loader import load

ROOT = Path(__file__).resolve().parents[1]
NEW = {"niah_single_1": 12, "vt": 5, "qa_1": 7}
LENGTHS = {"niah_single_1": (60, 61, 66), "vt": (40, 58), "qa_1": (70,)}
OPTIONS = {"infllm": {"sinks": 4, "block": 8, "top": 2}}
"""Parameters of methods whose defaults are for longer texts."""


@pytest.fixture
def ruler(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("ruler")


@pytest.fixture
def nvidia(ruler, monkeypatch):
    """Its module of NVIDIA's code, with tasks that have short answers."""
    module = importlib.import_module("nvidia_ruler")
    for task, count in NEW.items():
        monkeypatch.setitem(module.NEW_TOKENS, task, count)
    return module


@pytest.fixture
def page(ruler):
    return importlib.import_module("ruler_page")


@pytest.fixture(scope="module")
def speller(tmp_path_factory):
    """A tiny model, in float64 so that batches cannot change which token is the most likely one."""
    loaded = load(str(save_speller(tmp_path_factory.mktemp("ruler") / "speller")))
    loaded.model.double()
    return loaded


def letters(count, seed):
    draw = torch.randint(97, 123, (count,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, draw.tolist()))


def made_set(nvidia, loaded, task, length):
    """Made-up samples, the references of which no answer contains."""
    prompts = []
    for index, count in enumerate(LENGTHS[task]):
        text = letters(count, 10 * count + index)
        ids = loaded.tokenize(text)
        prompts.append(nvidia.Prompt(index, text, ("no answer",), len(ids)))
    return nvidia.PromptSet(task, length, length, loaded.tokenizer_hash, tuple(prompts))


def test_intervals_of_a_task_are_wilsons(page):
    found = page.task_interval([100.0] * 3 + [0.0])
    z, p, n = 1.959964, 0.75, 4
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (found.mean, found.low, found.high) == pytest.approx((75, 100 * (middle - reach), 100 * (middle + reach)))
    assert page.task_interval([0.0] * 50).high > 5  # not certain


def test_mean_over_tasks_adds_squares(page):
    tasks = [page.task_interval([100.0, 0.0, 0.0, 0.0]), page.task_interval([50.0] * 8)]
    found = page.mean_interval(tasks)
    below = math.sqrt(sum((task.mean - task.low) ** 2 for task in tasks)) / 2
    assert found.mean == pytest.approx(37.5)
    assert found.low == pytest.approx(37.5 - below)
    one = page.mean_interval(tasks[:1])
    assert (one.mean, one.low, one.high) == pytest.approx((tasks[0].mean, tasks[0].low, tasks[0].high))


def test_differences_are_paired(page):
    first = {"vt": [100.0, 0.0, 100.0], "cwe": [50.0, 50.0]}
    second = {"vt": [0.0, 0.0, 100.0], "cwe": [40.0, 40.0]}
    found = page.paired_difference(first, second, ["vt", "cwe"])
    assert found.mean == pytest.approx((100 / 3 + 10) / 2)
    # The differences of vt are 100, 0, 0: their variance is 100²/3, that of their mean 100²/9.
    assert found.high - found.mean == pytest.approx(1.959964 * (100 / 3) / 2)
    assert page.paired_difference(first, second, ["fwe"]) is None


def result():
    def cell(**scores):
        return {"seconds": 4.0, "scores": scores}

    within = cell(niah_single_1=[100.0, 100.0], vt=[0.0, 20.0], cwe=[100.0, 0.0])
    beyond = cell(niah_single_1=[100.0, 0.0], vt=[80.0, 80.0], cwe=[0.0, 0.0])
    return {
        "model": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "trained": 100,
        "lengths": {
            "200": {"left_out": {"qa_1": "too short"}, "methods": {"none": beyond, "yarn": beyond}},
            "100": {"left_out": {}, "methods": {"none": within, "plan-25": within}},
        },
    }


def test_tasks_that_fail_within_the_trained_length_are_left_out_of_the_mean(page):
    assert page.able_tasks(result()) == ["niah_single_1", "cwe"]
    text = page.write_page([result()])
    assert "can do 2 of 3 tasks: `niah_single_1`, `cwe`" in text
    yarn = next(line for line in text.splitlines() if line.startswith("| 200 (2 ×) | `yarn`"))
    cells = [cell.strip() for cell in yarn.split("|")[3:-1]]
    assert cells[0].startswith("25 (")  # 50 and 0
    assert cells[1] == "0.33"  # of 100 and 50
    assert cells[3].startswith("43 (")  # with 80
    assert "cache plan, 25 %" in text
    assert "Left out: `qa_1` (too short)." in text
    grey = [line for line in text.splitlines() if "(not done within)" in line]
    assert len(grey) == 2
    assert all("`vt`" in line for line in grey)


def test_page_needs_answers_within_the_trained_length(page):
    broken = result()
    del broken["lengths"]["100"]
    with pytest.raises(WherewhatError, match="no answers of the unmodified model within 100 tokens"):
        page.write_page([broken])


def test_prompts_are_stored_and_must_fit(nvidia, speller, tmp_path):
    made = made_set(nvidia, speller, "vt", 63)
    made.save(tmp_path / "vt.jsonl.xz")
    assert nvidia.PromptSet.load(tmp_path / "vt.jsonl.xz") == made
    made_set(nvidia, speller, "vt", 62).save(tmp_path / "vt.jsonl.xz")
    with pytest.raises(WherewhatError, match="sample 1 of vt has 58 tokens, which with 5 of the answer exceeds"):
        nvidia.PromptSet.load(tmp_path / "vt.jsonl.xz")
    (tmp_path / "vt.jsonl.xz").write_bytes(b"nothing")
    with pytest.raises(WherewhatError, match="is not a file of prompts"):
        nvidia.PromptSet.load(tmp_path / "vt.jsonl.xz")


def test_questions_are_not_generated_where_the_generator_does_not_end(nvidia, speller, tmp_path):
    with pytest.raises(WherewhatError, match="does not end below 4,096 tokens"):
        nvidia.make_prompts(speller, "qa_1", 2048, 2, folder=tmp_path, patience=1)


def test_a_prompt_that_a_model_reads_as_other_tokens_must_fit(ruler, nvidia, speller):
    made = made_set(nvidia, speller, "vt", 100)

    def asked(text):
        other = nvidia.Prompt(**vars(made.prompts[0]) | {"text": text})
        return ruler.questions(speller, nvidia.PromptSet("vt", 100, 100, "", (other,)), 1)

    (question,) = asked("other text")
    assert question.prompt.tokens == len(question.ids) == len(speller.tokenize("other text"))
    with pytest.raises(WherewhatError, match="of the answer exceeds the context of 100"):
        asked("x " * 100)


def test_batches_need_the_fewest_steps(ruler, nvidia):
    """Brute force over all ways to cut the sorted prompts into batches."""
    counts = [10, 11, 11, 19, 30, 31, 33]
    some = [ruler.Question("vt", nvidia.Prompt(i, "", (), n), (0,) * n, 4) for i, n in enumerate(counts)]

    def steps(batch):
        return len(batch[-1].ids) - len(batch[0].ids) + 4

    for most in (1, 60, 75, 10_000):
        best = math.inf
        for cuts in itertools.product((False, True), repeat=len(counts) - 1):
            parts, start = [], 0
            for stop in [i + 1 for i, cut in enumerate(cuts) if cut] + [len(counts)]:
                parts.append(some[start:stop])
                start = stop
            if all(len(part) == 1 or len(part) * (len(part[-1].ids) + 4) <= most for part in parts):
                best = min(best, sum(map(steps, parts)))
        made = ruler.batches(some, most)
        assert [x for batch in made for x in batch] == some
        assert sum(map(steps, made)) == best


def test_a_batch_gives_the_answers_of_generate(ruler, nvidia, speller):
    """Parity with transformers: prompts of different lengths in one batch, and one by one."""
    some = ruler.questions(speller, made_set(nvidia, speller, "niah_single_1", 100), 3)
    expected = [ruler.generated(speller, question) for question in some]
    assert ruler.answer_batch(speller, some) == expected
    assert [ruler.answer_batch(speller, [question])[0] for question in some] == expected


@pytest.mark.parametrize(
    "name",
    [
        *("sliding-window", "streaming-llm", "lm-infinite", "infllm", "position-interpolation", "ntk-aware"),
        *("dynamic-ntk", "yarn", "self-extend", "rerope", "near-far"),
    ],
)
def test_a_batch_under_a_method_gives_the_answers_of_its_own_generate(ruler, nvidia, speller, name):
    """The method is fitted to the context, not to the prompt, and prompts differ in length."""
    from wherewhat.lengths import find_method, generate

    method = find_method(name)(**OPTIONS.get(name, {})).fitted(trained=32, length=100)
    proof = prove(speller.model)
    some = ruler.questions(speller, made_set(nvidia, speller, "niah_single_1", 100), 3)
    way = ruler.Way(name, method=method)
    with way.context(speller, proof, length=100, trained=32):
        found = ruler.answer_batch(speller, some, split=way.split)
    for question, text in zip(some, found, strict=True):
        ids = generate(speller.model, torch.tensor([question.ids]), method, question.new_tokens, proof=proof)[0]
        assert text == speller.tokenizer.decode(ids[len(question.ids) :], skip_special_tokens=True)


def test_a_batch_under_a_plan_gives_the_answers_of_generate(ruler, nvidia, speller):
    proof = prove(speller.model)
    layers = plannable(proof)
    full = {layer: (0,) if layer == 0 else () for layer in layers}
    plan = Plan("speller", fingerprint(speller.model), window=8, sinks=2, layers=layers, full=full)
    some = ruler.questions(speller, made_set(nvidia, speller, "niah_single_1", 100), 3)
    with ruler.Way("plan", plan=plan).context(speller, proof, length=100, trained=100):
        found = ruler.answer_batch(speller, some, split=False)
        assert found == [ruler.generated(speller, question) for question in some]
    assert found != ruler.answer_batch(speller, some)


def test_an_answer_ends_when_its_score_is_certain(ruler, nvidia, speller, monkeypatch):
    monkeypatch.setattr(ruler, "_LOOK", 4)
    (question, *_) = ruler.questions(speller, made_set(nvidia, speller, "niah_single_1", 100), 1)
    whole = ruler.generated(speller, question)
    prompt = nvidia.Prompt(**vars(question.prompt) | {"references": (whole[:1].upper(),)})
    sure = ruler.Question(question.task, prompt, question.ids, question.new_tokens)
    (text,) = ruler.answer_batch(speller, [sure])
    assert len(text) < len(whole)
    assert ruler.agree(sure, text, whole)
    assert not ruler.agree(question, text, whole)  # a beginning alone is not the same answer


def test_lengths(ruler):
    assert ruler.lengths_of(["4096", "1.5x", "2x"], 100) == [4096, 150, 200]
    with pytest.raises(WherewhatError, match="'two' is not a length"):
        ruler.lengths_of(["two"], 100)


def test_ways_and_where_they_run(ruler):
    unmodified, yarn = ruler.ways(["none", "yarn"], [], None)
    assert [unmodified.runs_at(n, 100) for n in (100, 200)] == [True, True]
    assert [yarn.runs_at(n, 100) for n in (100, 200)] == [False, True]


def test_variants_are_methods_with_other_parameters(ruler):
    (way,) = ruler.ways([], [], None, ["near-far:top=64,seen=averaged"])
    assert (way.name, way.method) == ("near-far:top=64,seen=averaged", ruler.NearFar(top=64, seen="averaged"))
    for text in ("near-far", "near-far:tops=1", "near-far:top="):
        with pytest.raises(WherewhatError, match="no option of near-far: give OPTION=VALUE"):
            ruler.variant(text)


def test_the_page_is_that_of_the_stored_scores(ruler, page):
    files = sorted(ruler.STUDIES.glob("*.json"))
    if not files:
        pytest.skip("no scores are stored")
    text = page.write_page([json.loads(file.read_text("utf-8")) for file in files])
    assert ruler.PAGE.read_text("utf-8") == text, "run python benchmarks/ruler.py page"


def test_scores_are_of_the_stored_answers(ruler, tmp_path):
    for file in ruler.STUDIES.glob("*.json"):
        stored = json.loads(file.read_text("utf-8"))
        about, answers = ruler.read_answers(ruler.STUDIES / "answers" / f"{file.stem}.jsonl.xz")
        assert (about["model"], about["weights_hash"]) == (stored["model"], stored["weights_hash"])
        counts = Counter((str(x["length"]), x["method"], x["task"]) for x in answers)
        for length, at_length in stored["lengths"].items():
            for method, found in at_length["methods"].items():
                for task, scores in found["scores"].items():  # of tasks whose samples are all answered
                    assert counts[length, method, task] == len(scores)
    (tmp_path / "cut.jsonl.xz").write_bytes(b"not compressed")
    with pytest.raises(WherewhatError, match="is not a file of answers"):
        ruler.read_answers(tmp_path / "cut.jsonl.xz")


@pytest.mark.slow
def test_from_prompts_to_the_page(ruler, nvidia, tmp_path, monkeypatch, capsys):
    """End to end with made-up prompts; only the scores, which NVIDIA's code gives, are stood in for."""
    from wherewhat.plans.planner import make_plan

    model = save_speller(tmp_path / "speller")
    loaded = load(str(model))
    text = tmp_path / "text.txt"
    text.write_text(letters(4000, 3))
    made = make_plan(
        str(model), files=(str(text),), out=tmp_path, tokens=128, window=16, choose=1, documents=0, selector="ranks"
    )
    plan = made.save(tmp_path / "plan.json")
    for length in (96, 192):
        for task in NEW:
            folder = tmp_path / "prompts" / str(length)
            folder.mkdir(parents=True, exist_ok=True)
            made_set(nvidia, loaded, task, length).save(folder / f"{task}.jsonl.xz")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ruler.py", *map(str, arguments)])
        return ruler.main()

    prompts, answers = tmp_path / "prompts", tmp_path / "answers.jsonl"
    common = (model, "--prompts", prompts, "--trained", 96)
    some = ("--methods", "none", "yarn", "near-far", "--plan", plan, "--out", answers, "--batch", 4000)
    assert run("check", *common, "--count", 4) == 0
    assert "4 of 4 answers are those of generate" in capsys.readouterr().out
    assert run("answers", *common, *some, "--tasks", "vt") == 0
    about, first = ruler.read_answers(answers)
    assert {(x["length"], x["method"]) for x in first} == {
        (96, "none"),
        (96, "plan-25"),
        (192, "none"),
        (192, "yarn"),
        (192, "near-far"),
    }
    assert run("answers", *common, *some, "--tasks", "vt") == 0
    assert "0 answers to come" in capsys.readouterr().out
    with answers.open("a") as file:
        file.write('{"method": "cut')  # an interruption
    assert run("answers", *common, *some) == 0
    printed = capsys.readouterr().out
    assert f"{5 * 4} answers to come in " in printed
    assert f"; {5 * 2} answers are in" in printed
    again, lines = ruler.read_answers(answers)
    assert again == about
    assert lines[: len(first)] == first
    assert len(lines) == 5 * 6
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for part, file in enumerate(files):
        assert run("answers", *common, *some[:-4], "--batch", 100, "--share", f"{part + 1}/2", "--out", file) == 0
    both = [x for file in files for x in ruler.read_answers(file)[1]]
    keys = ("method", "length", "task", "index", "answer")
    assert sorted([x[key] for key in keys] for x in both) == sorted([x[key] for key in keys] for x in lines)
    more = ("--batch", 4000, "--answered", *files, "--out", files[0])
    capsys.readouterr()
    assert run("answers", *common, *some[:-4], *more) == 0
    assert "0 answers to come" in capsys.readouterr().out
    assert run("answers", *common, *some, "--dtype", "bfloat16") == 2
    assert "answers with another dtype" in capsys.readouterr().err

    def scores(folder, cells):
        return {task: [100.0 if task == "vt" else 0.0 for _ in pairs] for task, pairs in cells.items()}

    monkeypatch.setattr(ruler, "score_answers", scores)
    monkeypatch.setattr(ruler, "unpacked", lambda say: tmp_path)
    missing = {"method": "near-far", "length": 192, "task": "niah_single_1", "index": 0}
    kept = [line for line in lines if not missing.items() <= line.items()]
    answers.write_text("\n".join(map(json.dumps, [about, *kept])) + "\n")
    assert run("score", answers, "--prompts", prompts, "--out", tmp_path / "scores" / "speller.json") == 0
    assert "near-far, niah_single_1: left out, since its answers are incomplete" in capsys.readouterr().out
    stored = json.loads((tmp_path / "scores" / "speller.json").read_text())
    assert [*stored["lengths"]["192"]["methods"]] == ["none", "yarn", "near-far"]
    assert stored["lengths"]["192"]["methods"]["near-far"]["scores"] == {"qa_1": [0.0], "vt": [100.0, 100.0]}
    assert run("page", "--scores", tmp_path / "scores", "--out", tmp_path / "ruler.md") == 0
    assert "can do 1 of 3 tasks: `vt`" in (tmp_path / "ruler.md").read_text("utf-8")
    assert run("page", "--scores", tmp_path / "prompts", "--out", tmp_path / "ruler.md") == 2
    assert "has no scores" in capsys.readouterr().err


def test_shares_are_all_questions_once(ruler, nvidia):
    counts = [10, 11, 11, 19, 30, 31, 33, 60]
    some = [ruler.Question("vt", nvidia.Prompt(i, "", (), n), (0,) * n, 4) for i, n in enumerate(counts)]
    for most, count in ((10_000, 3), (70, 2), (10_000, 9)):
        parts = [ruler.shared(some, most, ruler._share(f"{i + 1}/{count}")) for i in range(count)]
        asked = [x.prompt.index for part in parts for batch in part for x in batch]
        assert sorted(asked) == list(range(len(some)))
        loads = [sum(map(ruler.steps, part)) for part in parts]
        largest = max(ruler.steps(batch) for part in parts for batch in part)
        assert max(loads) - min(loads) <= largest
    for text in ("0/2", "3/2", "half"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a share"):
            ruler._share(text)


@pytest.mark.parametrize("name", ["none", "dynamic-ntk", "yarn", "self-extend", "infllm", "near-far", "plan"])
def test_texts_that_have_ended_leave_the_batch(ruler, nvidia, speller, monkeypatch, name):
    """The others go on as before, also if the texts were read one at a time."""
    from wherewhat.lengths import find_method

    proof, planned = prove(speller.model), name == "plan"
    some = ruler.questions(speller, made_set(nvidia, speller, "niah_single_1", 100), 3)
    if planned:
        layers = plannable(proof)
        way = ruler.Way(name, plan=Plan("speller", fingerprint(speller.model), 8, 2, layers, dict.fromkeys(layers, ())))
    else:
        way = ruler.Way(name, method=find_method(name)(**OPTIONS.get(name, {})).fitted(trained=32, length=100))
    with way.context(speller, proof, length=100, trained=32):
        expected = ruler.answer_batch(speller, some, split=way.split)
        monkeypatch.setattr(ruler, "_LOOK", 2)
        monkeypatch.setattr(ruler, "_READ", 70)
        prompt = nvidia.Prompt(**vars(some[0].prompt) | {"references": (expected[0][:1],)})
        some[0] = ruler.Question(some[0].task, prompt, some[0].ids, some[0].new_tokens)
        found = ruler.answer_batch(speller, some, split=way.split)
    assert found[1:] == expected[1:]
    assert expected[0].startswith(found[0])
    assert 0 < len(found[0]) < len(expected[0])
