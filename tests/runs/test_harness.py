"""Parity: lm-evaluation-harness gets from the wrapped model what its own model class and our own measurement get.

Brute force: under a length method a score is that of one pass over the whole text.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, OpenAIGPTConfig, OPTConfig, PreTrainedTokenizerFast

from helpers.models import llama_config, on_disk, save_model
from wherewhat.captures.proof import prove
from wherewhat.errors import ConfigError, MeasureError, TextError
from wherewhat.lengths import METHODS, find_method
from wherewhat.lengths.frequencies import DynamicNTK, YaRN
from wherewhat.lengths.method import extended, generate
from wherewhat.lengths.windows import InfLLM, LMInfinite, SlidingWindow
from wherewhat.measures.choices import answer_choices, perturb_context
from wherewhat.measures.perturb import PerturbConfig
from wherewhat.measures.perturb.changes import no_change
from wherewhat.runs.request import item_choices
from wherewhat.runs.subject import ModelSubject, load
from wherewhat.text.questions import ChoiceItem, read_items

NOUNS = ["cat", "dog", "mat", "hat"]
DOCUMENTS = [
    {
        "question": f"the {NOUNS[i % 4]} and a {NOUNS[(i + 1) % 4]} sat on {i} mats, so the",
        "options": ["cat ran far", "dog", "hat is a big hat"],
        "answer": i % 3,
    }
    for i in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with 128 positions and a byte-level tokenizer."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_model(folder, llama_config(vocab_size=260, max_position_embeddings=128))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rules = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)} | {"</s>": 256}, []))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder, dtype="float64")  # rounding decides no greedy token


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A task of the harness on a local file."""
    folder = tmp_path_factory.mktemp("task")
    data = folder / "nouns.json"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    path = folder / "nouns.yaml"
    path.write_text(
        f"""
task: nouns
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    return path


def harness_model(*given, **options):
    """A wrapped model; the harness is imported where it is used, which takes seconds."""
    from wherewhat.runs.harness import HarnessModel

    return HarnessModel(*given, **options)


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def evaluated(model, task, monkeypatch, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_path=str(task.parent), include_defaults=False)
    found = simple_evaluate(model=model, tasks=["nouns"], task_manager=manager, bootstrap_iters=0)
    samples = sorted(found["samples"]["nouns"], key=lambda sample: sample["doc_id"])
    return found["results"]["nouns"], [[float(x[0]) for x in sample["filtered_resps"]] for sample in samples]


def ours(loaded, perturb=None):
    """The same items by the measurement's own code."""
    subject = ModelSubject(loaded)
    answers = []
    for document in DOCUMENTS:
        item = item_of(loaded, document)
        change = no_change(item.context.ids[0])
        if perturb:
            kind, rate, seed = perturb
            change = perturb_context(item.context, kind, rate, seed + item.seed, PerturbConfig(), layer=0)
        answers.append(answer_choices(subject, item, change, kind=perturb[0] if perturb else ""))
    return answers


def item_of(loaded, document):
    choices = tuple(f" {text}" for text in document["options"])
    return item_choices(loaded, ChoiceItem("x", document["question"], choices, document["answer"], "test"))


@pytest.mark.slow
@pytest.mark.parametrize("perturb", [None, ("words", 0.5, 3), ("position_swap", 0.5, 0), ("features", 0.5, 1)])
def test_the_harness_and_the_measurement_agree(loaded, task, monkeypatch, tmp_path, perturb):
    results, scores = evaluated(harness_model(loaded, perturb=perturb), task, monkeypatch, tmp_path)
    expected = ours(loaded, perturb)
    torch.testing.assert_close(
        torch.tensor(scores, dtype=torch.float64),
        torch.stack([found.logprobs for found in expected]),
        rtol=1e-5,
        atol=1e-5,
    )
    assert results["acc,none"] == pytest.approx(sum(found.right for found in expected) / len(expected))
    assert results["acc_norm,none"] == pytest.approx(
        sum(found.right_by_character for found in expected) / len(expected)
    )


@pytest.mark.slow
def test_rate_zero_is_the_untouched_model(loaded):
    pairs = instances("loglikelihood", *[(d["question"], f" {o}") for d in DOCUMENTS for o in d["options"]])
    plain = harness_model(loaded).loglikelihood(pairs, disable_tqdm=True)
    for kind in ("words", "letters", "position_jitter", "position_shift", "features"):
        found = harness_model(loaded, perturb=(kind, 0.0, 0)).loglikelihood(pairs, disable_tqdm=True)
        assert [x for x, _ in found] == pytest.approx([x for x, _ in plain], abs=1e-5)


@pytest.fixture(scope="module")
def theirs(loaded):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=128)


def test_equal_to_the_harness_own_model(loaded, theirs):
    pairs = [(d["question"], f" {o}") for d in DOCUMENTS for o in d["options"]]
    pairs += [("", "a cat"), ("two ", "spaces"), ("cut " * 60, " off"), ("cut " * 60, " at the beginning")]
    asked = instances("loglikelihood", *pairs)
    mine = harness_model(loaded).loglikelihood(asked, disable_tqdm=True)
    other = theirs.loglikelihood(asked, disable_tqdm=True)
    assert [x for x, _ in mine] == pytest.approx([float(x) for x, _ in other], abs=2e-4, rel=1e-5)
    assert [x for _, x in mine] == [bool(x) for _, x in other]


@pytest.mark.slow
def test_rolling_equals_the_harness_own_model(loaded, theirs):
    asked = instances("loglikelihood_rolling", ("a cat sat",), ("the dog ran on " * 20,))
    mine = harness_model(loaded).loglikelihood_rolling(asked)
    other = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert mine == pytest.approx([float(x) for x in other], rel=1e-5)
    with pytest.raises(ConfigError, match="no context to perturb"):
        harness_model(loaded, perturb=("words", 0.1, 0)).loglikelihood_rolling(asked)


@pytest.mark.slow
def test_writing_equals_the_harness_own_model_and_stops(loaded, theirs):
    options = {"until": ["\n\n"], "max_gen_toks": 40, "do_sample": False}
    asked = instances("generate_until", ("the cat", options), ("a dog sat on", options))
    mine = harness_model(loaded).generate_until(asked)
    assert mine == theirs.generate_until(asked, disable_tqdm=True)
    stop = mine[0][5:7]
    (cut,) = harness_model(loaded).generate_until(instances("generate_until", ("the cat", {**options, "until": stop})))
    assert cut == mine[0][: mine[0].index(stop)]
    with pytest.raises(ConfigError, match="greedy"):
        harness_model(loaded).generate_until(instances("generate_until", ("x", {"do_sample": True})))


@pytest.mark.slow
@pytest.mark.parametrize("method", [*map(find_method, METHODS)], ids=lambda method: method.name)
def test_under_a_method_scores_are_those_of_one_pass(loaded, method):
    options = {LMInfinite: {"window": 24}, InfLLM: {"window": 24, "sinks": 4, "block": 8, "top": 2}}
    rule = method(**options.get(method, {}))
    text, answers = "the dog ran on " * 12, [" far", " to the mat", "!"]
    model = harness_model(loaded, method=rule)
    found = model.loglikelihood(instances("loglikelihood", *[(text, one) for one in answers]), disable_tqdm=True)
    proof = prove(loaded.model)
    for (score, _), one in zip(found, answers, strict=True):
        ids, tail = model._encode_pair(text, one)
        whole = torch.tensor([[*ids, *tail]])
        with torch.no_grad(), extended(loaded.model, rule.fitted(trained=128, length=whole.shape[1]), proof=proof):
            rows = loaded.model(input_ids=whole[:, :-1], use_cache=False).logits[0, -len(tail) :].double()
        expected = rows.log_softmax(-1).gather(1, torch.tensor(tail)[:, None]).sum()
        assert score == pytest.approx(float(expected), abs=1e-4, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [LMInfinite(window=16), YaRN(), DynamicNTK()], ids=lambda method: method.name)
def test_writing_under_a_method_is_one_generation(loaded, method):
    model = harness_model(loaded, method=method)
    text = "the dog ran on " * 8
    (found,) = model.generate_until(instances("generate_until", (text, {"max_gen_toks": 50})))
    ids = torch.tensor([model.tok_encode(text)])
    rule = method.fitted(trained=128, length=ids.shape[1] + 50)
    written = generate(loaded.model, ids, rule, 50)[0, ids.shape[1] :].tolist()
    written = written[: written.index(256)] if 256 in written else written
    assert found == loaded.tokenizer.decode(written, skip_special_tokens=True)


@pytest.mark.slow
def test_what_cannot_be_combined_is_refused(loaded):
    with pytest.raises(ConfigError, match="cannot be perturbed under"):
        harness_model(loaded, method=LMInfinite(window=8), perturb=("position_swap", 0.1, 0))
    with pytest.raises(ConfigError, match="did you mean 'words'"):
        harness_model(loaded, perturb=("wrods", 0.1, 0))
    with pytest.raises(ConfigError, match="outside 0 to 1"):
        harness_model(loaded, perturb=("words", 1.1, 0))
    with pytest.raises(ConfigError, match="cannot be perturbed during generation"):
        harness_model(loaded, perturb=("features", 0.5, 0)).generate_until(instances("generate_until", ("a b c", {})))


@pytest.mark.slow
def test_a_table_of_positions_ends_under_a_method_too(loaded):
    opt = {
        "hidden_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    for config in (
        OPTConfig(vocab_size=260, max_position_embeddings=40, **opt),
        OpenAIGPTConfig(vocab_size=260, n_embd=32, n_layer=1, n_head=4, n_positions=40),
    ):
        small = replace(loaded, model=AutoModelForCausalLM.from_config(config).eval())
        model = harness_model(small, method=SlidingWindow(window=8))
        fits, long = (instances("loglikelihood", ("a" * count, "bc")) for count in (39, 40))
        model.loglikelihood(fits, disable_tqdm=True)
        with pytest.raises(MeasureError, match="a text of 41 tokens is longer than the table of 40 positions"):
            model.loglikelihood(long, disable_tqdm=True)
        with pytest.raises(MeasureError, match="longer than the table of 40 positions"):
            model.generate_until(instances("generate_until", ("a" * 30, {"max_gen_toks": 20})))


@pytest.mark.slow
def test_an_embedding_on_disk(folder, tmp_path):
    plain, spread = map(harness_model, on_disk(folder, tmp_path))
    assert spread.device == torch.device("cpu")
    asked = instances("loglikelihood", ("the cat", " sat"))
    expected, found = (model.loglikelihood(asked, disable_tqdm=True)[0][0] for model in (plain, spread))
    assert found == pytest.approx(expected, abs=1e-5)
    written = instances("generate_until", ("the cat", {"max_gen_toks": 4}))
    assert spread.generate_until(written) == plain.generate_until(written)


@pytest.mark.slow
def test_items_of_a_task_are_what_the_harness_asks(loaded, task, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = read_items(f"harness:{task}", count=5)
    assert [(x.context, x.continuations, x.gold) for x in items] == [
        (d["question"], tuple(f" {o}" for o in d["options"]), d["answer"]) for d in DOCUMENTS[:5]
    ]
    assert items[0].name == "nouns-1"
    with pytest.raises(TextError, match="cannot be loaded"):
        read_items(f"harness:{task.with_name('none.yaml')}")
