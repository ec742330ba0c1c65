"""Known answers: rules judge constructed numbers; end to end: claims are judged, resumed and shown in a report."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from helpers.capture import tiny
from wherewhat import Judgement, judge_claims
from wherewhat.errors import ConfigError
from wherewhat.measures.statistics import Interval
from wherewhat.report import measurements
from wherewhat.report.claims_page import claims_data
from wherewhat.report.judgement import _runs, _schedule
from wherewhat.report.measurements import given_text, schedule
from wherewhat.report.sections import _first_undamaged
from wherewhat.report.views import Capacity
from wherewhat.rules.claims.claim import Evidence, judge, verdict_json, verdict_of, verdict_words
from wherewhat.rules.claims.registry import CLAIMS
from wherewhat.rules.numbers import contrast
from wherewhat.rules.rule import Statement
from wherewhat.runs import jobs
from wherewhat.runs.collection import Runs
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.scores import UNBOUNDED

DOCUMENTS = ("one", "two", "three")
CAPACITY = Capacity(512, False, 4, 9000)
KNOWN = {claim.number: claim for claim in CLAIMS}


class FakeRun:
    """The numbers of a run without a run directory: three documents with almost equal values."""

    def __init__(self, values=None, heads=None, summaries=None, **config):
        self._values = values or {}
        self._heads = heads or {}
        self._summaries = summaries or {}
        self.config = SimpleNamespace(**config)
        self.documents = list(DOCUMENTS)
        self.directory = SimpleNamespace(path=Path("fake"))

    def document_means(self, metric):
        if metric not in self._values:
            return {}
        return {name: self._values[metric] + 1e-3 * i for i, name in enumerate(DOCUMENTS)}

    def values(self, metric, *, less=None):
        first, second = self.document_means(metric), self.document_means(less)
        return [value - (second[name] if less else 0.0) for name, value in first.items() if not less or name in second]

    def head_documents(self, metric):
        found = self._heads.get(metric, [])
        return {(0, head): dict.fromkeys(DOCUMENTS, value) for head, value in enumerate(found)}

    def labels(self, metric):
        found = self._heads.get(f"{metric}_together", self._heads.get(metric, []))
        return {(0, head): int(code) for head, code in enumerate(found) if code >= 0}

    def summary(self, name):
        overall, control = self._summaries.get(name, (None, None))
        return None if overall is None else SimpleNamespace(overall=overall, control=control)

    def range_of(self, metric):
        return UNBOUNDED


def evidence(runs=None, **own):
    """Evidence of named runs of the model, and of its random control model."""
    finished, requests = [], {}
    for name, run in own.items():
        requests[name] = Request(measurement="axes", model=ModelRequest(model=name))
        finished.append((requests[name], run))
    for name, run in (runs or {}).items():
        finished.append((requests[name].with_weights("random"), run))
    return Evidence(Runs(finished), requests, planes=32)


def near(mean, reach=0.01, n=40):
    return Interval(mean, mean - reach, mean + reach, n)


def part(outcome, condition="c"):
    return Statement("s", outcome, condition=condition)


def test_verdicts_follow_from_parts():
    assert verdict_of([part(True), part(True)]) == ("holds", "")
    assert verdict_of([part(True, "a"), part(False), part(True, "b")]) == ("holds if", "a and b")
    assert verdict_of([part(False), part(False)]) == ("does not hold", "")
    assert verdict_of([part(False), part(None)]) == ("does not hold", "")
    assert verdict_of([part(True), part(None)]) == ("cannot be told", "")


def test_contrast_of_two_proportions():
    found = contrast(near(0.7, 0.03), near(0.5, 0.04))
    assert found is not None
    assert math.isclose(found.mean, 0.2)
    assert math.isclose(found.high - found.mean, 0.05)
    assert contrast(near(0.7), Interval(0.5, None, None, 1)) is None


def test_every_claim_is_judged_or_has_a_reason():
    assert list(KNOWN) == list(range(1, 26))
    known = _runs(24, CAPACITY)
    for claim in CLAIMS:
        assert claim.statement.endswith((".", ")."))
        assert (claim.rule is None) == bool(claim.reason)
        assert claim.rule is None or {*claim.rule.needs, *claim.rule.also} <= {*known}
        assert bool(claim.change) == (claim.rule is not None)
    assert [claim.number for claim in CLAIMS if claim.rule is None] == [11, 12, 13, 14, 15]


AXES = {
    "pooled_r": 0.95,
    "pooled_r_means": 0.8,
    "pooled_r_within": 0.93,
    "r": 0.85,
    "noise_floor": 0.2,
    "r_gaussian": 0.22,
    "r_behaviour": 0.8,
}
ALIKE, UNLIKE = (dict.fromkeys(("r", "r_behaviour"), values) for values in ([0.5] * 8, [0.3, 0.7] * 4))
DISTANCE = {"additive_share": 0.81, "additive_share_scrambled": 0.7, "key_rank_correlation": 0.8}
DISTANCE |= {"key_rank_correlation_scrambled": 0.6, "distance_share": 0.2, "shape_drift": 0.1}
PLANES = {"q_concentration": 0.5, "k_concentration": 0.5, "random_concentration": 0.05}
BOUNDS = {"residual_bound": [0.5] * 20, "residual_share": [0.1] * 20}
WORDS = {"rise_words_at_5": 0.3, "rise_words_at_20": 1.0, "rise_words_at_5_untouched": 0.05}
WORDS |= {"rise_words_at_20_untouched": 0.3}
SWAPS = {"index_feature_correlation": 0.8, "index_minus_feature": 0.01, "rise_features_0_at_5_untouched": 0.1}
SHIFTS = {"output_shift_none": 3.0, "output_shift_lm-infinite": 0.2, "output_shift_pieces": 0.1}
SHIFTS |= {"loss_rise_none": 1.2, "loss_rise_lm-infinite": 0.01, "rank_shift_loss": 0.9}
METHODS = ("none", "lm-infinite")
BANDS = {"s_pos_band_1": 0.8, "s_pos_band_4": 0.5, "s_sym_band_1": 0.4, "s_sym_band_4": 0.9}
BANDS |= {"s_pos_change_without_band_1": -0.05, "s_sym_change_without_band_4": -0.05}
BANDS |= {f"{name[:5]}_no_sink{name[5:]}": value for name, value in BANDS.items()}
CORRELATIONS = {"corr_pos_sym": -0.9, "corr_pos_frequency_softmax": -0.5, "corr_sym_frequency_softmax": 0.5}
CORRELATIONS |= {f"{name}_no_sink": value for name, value in CORRELATIONS.items()}
COSTS = {"loss": 3.0, "loss_strength_0": 5.0, "cost_without_a": 1.0, "cost_without_c": 1.0}
UNROTATED = {"band_peak": 20.0, "band_predicted": 21.0, "loss": 3.0, "loss_unrotated_slow": 3.01}
UNROTATED |= {"loss_unrotated_slow_random": 6.0, "loss_without_slow": 5.0}
MASSIVE = {"massive_heads": 0.9, "massive_heads_v": 0.0, "massive_slow": 0.95, "massive_slow_even": 0.5}
MASSIVE |= {"planted_lost_massive": 0.6, "planted_lost_massive_random": 0.1, "planted": 3.0, "facts": 4.0}
MASSIVE |= {"facts_lost_massive": 0.1, "facts_lost_massive_random": 0.1}
NONE_MASSIVE = {name: value for name, value in MASSIVE.items() if name != "massive_slow"} | {"massive_heads": 0.0}
NONE_MASSIVE |= {f"{name}_lost_massive{end}": 0.0 for name in ("planted", "facts") for end in ("", "_random")}
SLOW = {"planted": 3.0, "planted_lost_masked": 0.8, "planted_lost_masked_random": 0.02}
SLOW |= {"planted_lost_masked_others": 0.02, "planted_lost_unrotated": 0.01}
ANSWERS = {
    "accuracy_letters_4": (near(0.9), 0.1),
    "accuracy_letters_16": (near(0.8), 0.1),
    "accuracy_numbers_4": (near(0.9), 0.25),
    "accuracy_numbers_16": (near(0.1), 0.06),
    "accuracy_letters": (near(0.85), 0.1),
    "accuracy_numbers": (near(0.5), 0.1),
    **{f"accuracy_letters_{x}": (near(y), 0.1) for x, y in (("first", 0.8), ("middle", 0.9), ("last", 0.8))},
    **{f"accuracy_numbers_{x}": (near(y), 0.1) for x, y in (("first", 0.6), ("middle", 0.4), ("last", 0.6))},
}
PERTURBED = {"share_a": [0.1] * 20 + [0.5] * 20, "sensitivity_position_swap": [0.2] * 20 + [0.6] * 20}
LABELLED = {"slash_max": [0.5] * 20 + [0.01] * 20, "slash_lag": [1.0] * 40, "label_no_sink": [1.0] * 20 + [4.0] * 20}
RETRIEVAL = {"label": [2.0] * 4 + [1.0] * 36, "retrieval": [0.9] * 4 + [0.1] * 36}
RETRIEVAL |= {"induction": [0.9] * 4 + [0.1] * 36, "s_pos": [0.0] * 40, "s_sym": [0.8] * 8 + [0.1] * 32}
RETRIEVAL |= {f"{name}_no_sink": RETRIEVAL[name] for name in ("label", "s_pos", "s_sym")}


RULES = (
    (
        1,
        evidence(axes=FakeRun(AXES)),
        "holds if the logits of all heads are pooled, with the differences of their means and "
        "the logits of all heads are pooled, each around its mean",
    ),
    (1, evidence(axes=FakeRun(AXES | {"r": 0.95, "r_behaviour": 0.92})), "holds"),
    (1, evidence(axes=FakeRun(AXES | {"r": 0.95})), "holds if the logits of all heads are pooled, with"),
    (1, evidence(axes=FakeRun(AXES | {"pooled_r": 0.5, "pooled_r_within": 0.5})), "does not hold"),
    (2, evidence(axes=FakeRun(AXES), distance=FakeRun(DISTANCE)), "holds"),
    (
        2,
        evidence(axes=FakeRun(AXES), distance=FakeRun(DISTANCE | {"additive_share_scrambled": 0.81})),
        "holds if only the quality of the fit counts",
    ),
    (3, evidence(distance=FakeRun(DISTANCE)), "holds"),
    (3, evidence(distance=FakeRun(DISTANCE | {"distance_share": 0.0})), "holds if only the order of the keys"),
    (4, evidence(planes=FakeRun(PLANES, BOUNDS)), "holds"),
    (
        4,
        evidence(planes=FakeRun(PLANES, BOUNDS | {"residual_bound": [1.5] * 20})),
        "holds if only the pattern of phases is meant",
    ),
    (5, evidence({"axes": FakeRun(AXES, ALIKE)}, axes=FakeRun(AXES)), "does not hold"),
    (5, evidence({"axes": FakeRun(AXES, UNLIKE)}, axes=FakeRun(AXES)), "cannot be told"),  # as other draws may be
    (
        5,
        evidence({"axes": FakeRun(AXES | {"r_behaviour": 0.3}, ALIKE)}, axes=FakeRun(AXES)),
        "holds if additivity is measured by r of behaviour",
    ),
    (5, evidence(axes=FakeRun(AXES)), "not judged: It has no random control model."),
    (6, evidence(axes=FakeRun(AXES)), "holds"),
    (6, evidence(axes=FakeRun(AXES | {"r_gaussian": 0.6})), "does not hold"),
    (7, evidence(words=FakeRun(WORDS)), "holds if only targets that were not moved are counted"),
    (7, evidence(words=FakeRun(WORDS | {"rise_words_at_5": 0.05})), "holds"),
    (8, evidence(positions=FakeRun(SWAPS)), "holds"),
    (8, evidence(positions=FakeRun(SWAPS | {"index_minus_feature": 0.5})), "holds if the same targets are meant"),
    (  # the gap is more than half of the rise in every document, by more than the interval of the gap alone tells
        8,
        evidence(positions=FakeRun(SWAPS | {"index_minus_feature": 0.0518})),
        "holds if the same targets are meant",
    ),
    (9, evidence(extend=FakeRun(SHIFTS, methods=METHODS)), "holds"),
    (
        9,
        evidence(extend=FakeRun(SHIFTS | {"rank_shift_loss": 0.0}, methods=METHODS)),
        "holds if only the distribution of outputs is meant and only the loss is meant",
    ),
    (9, evidence(extend=FakeRun(SHIFTS | {"loss_rise_none": 0.0}, methods=METHODS)), "cannot be told"),
    (9, evidence(extend=FakeRun(SHIFTS, methods=("none",))), "not judged: The finished run of extend"),
    (10, evidence(positions=FakeRun({"predicted_position_swap": 0.9}, PERTURBED)), "holds"),
    (
        10,
        evidence(positions=FakeRun({}, PERTURBED | {"share_a": PERTURBED["share_a"][::-1]})),
        "does not hold",
    ),
    (16, evidence(prompts=FakeRun(summaries=ANSWERS, sizes=(4, 16))), "holds"),
    (  # 0.445 ± 0.015 is above chance by half of 0.9 - 0.25, but 0.9 is uncertain too
        16,
        evidence(
            prompts=FakeRun(
                summaries=ANSWERS
                | {"accuracy_letters_4": (near(0.9, 0.05), 0.1), "accuracy_letters_16": (near(0.445, 0.015), 0.1)},
                sizes=(4, 16),
            )
        ),
        "cannot be told",
    ),
    (
        16,
        evidence(prompts=FakeRun(summaries=ANSWERS | {"accuracy_numbers_4": (near(0.25), 0.25)}, sizes=(4, 16))),
        "cannot be told",
    ),
    (17, evidence(frequencies=FakeRun(BANDS, bands=4)), "holds"),
    (
        17,
        evidence(frequencies=FakeRun(BANDS | {"s_sym_change_without_band_4": 0.1}, bands=4)),
        "holds if single planes are meant, scored without the sink and heads with masked bands are meant, scored "
        "without the sink and single planes are meant, scored over all keys",
    ),
    (18, evidence(heads=FakeRun(CORRELATIONS)), "holds"),
    (
        18,
        evidence(heads=FakeRun(CORRELATIONS | {"corr_sym_frequency_softmax_no_sink": 0.0})),
        "holds if only the two scores without the sink are meant and only the two scores over all keys are meant "
        "and only the frequencies are meant, with scores over all keys",
    ),
    (
        18,
        evidence(heads=FakeRun({"corr_pos_sym": -0.9, "corr_pos_sym_no_sink": 0.0})),
        "holds if only the two scores over all keys are meant",
    ),
    (19, evidence(prompts=FakeRun(summaries=ANSWERS, sizes=(4, 16))), "holds"),
    (
        19,
        evidence(prompts=FakeRun(summaries=ANSWERS | {"accuracy_letters_middle": (near(0.4), 0.1)}, sizes=(4, 16))),
        "holds if only Index is meant",
    ),
    (20, evidence(frequencies=FakeRun(UNROTATED)), "holds"),
    (
        20,
        evidence(frequencies=FakeRun(UNROTATED | {"band_peak": 5.0})),
        "holds if only un-rotating is meant",
    ),
    (20, evidence(frequencies=FakeRun({"loss": 3.0})), "not judged: The model does not state its trained length"),
    (
        21,
        evidence(axes=FakeRun(AXES), residual=FakeRun(COSTS)),
        "holds if use is measured: the loss with exactly additive logits",
    ),
    (
        21,
        evidence(axes=FakeRun(AXES), residual=FakeRun(COSTS | {"loss_strength_0": 3.01})),
        "does not hold",
    ),
    (22, evidence(**{"heads": FakeRun({}, LABELLED), "random tokens": FakeRun({}, LABELLED)}), "holds"),
    (
        22,
        evidence(
            **{"heads": FakeRun({}, LABELLED), "random tokens": FakeRun({}, LABELLED | {"label_no_sink": [0.0] * 40})}
        ),
        "holds if slash-dominant heads are meant",
    ),
    (23, evidence(massive=FakeRun(MASSIVE)), "holds"),
    (
        23,
        evidence(massive=FakeRun(MASSIVE | {"facts_lost_massive": 0.5})),
        "holds if only their place is meant and only reading context is meant",
    ),
    (
        23,
        evidence(massive=FakeRun(MASSIVE | {"planted_lost_massive": 0.0, "facts_lost_massive": 0.5})),
        "holds if only their place is meant",
    ),
    (23, evidence(massive=FakeRun(NONE_MASSIVE)), "does not hold"),
    (
        23,  # as in a model whose dimensions hardly rotate
        evidence(massive=FakeRun(MASSIVE | {"massive_slow_even": 0.94})),
        "holds if only reading context is meant",
    ),
    (23, evidence(massive=FakeRun({k: v for k, v in MASSIVE.items() if "facts" not in k})), "cannot be told"),
    (24, evidence(heads=FakeRun({}, RETRIEVAL)), "holds"),
    (
        24,
        evidence(heads=FakeRun({}, RETRIEVAL | {"s_sym": [0.1] * 40, "s_sym_no_sink": [0.1] * 40})),
        "does not hold",
    ),
    (
        24,  # sinks among the symbolic heads of all keys hide the retrieval heads
        evidence(heads=FakeRun({}, RETRIEVAL | {"s_sym": [0.1] * 40})),
        "holds if retrieval heads are those with most attention to the next token, and scores are without the sink",
    ),
    (25, evidence(retrieval=FakeRun(SLOW)), "holds"),
    (
        25,
        evidence(retrieval=FakeRun(SLOW | {"planted_lost_masked_random": 0.5})),
        "holds if only the slowest planes of retrieval heads are meant and the comparison with those of other heads is "
        "meant",
    ),
    (25, evidence(retrieval=FakeRun(SLOW | {"planted_lost_masked": 0.02})), "does not hold"),
    (25, evidence(retrieval=FakeRun({"planted": 0.01})), "cannot be told"),
    (11, evidence(), "not judged: about trained small models: see wherewhat multihop"),
    (8, evidence(axes=FakeRun()), "not judged: positions was not measured"),
)


def test_rules_judge_known_numbers(subtests):
    assert {number for number, *_ in RULES} >= {claim.number for claim in CLAIMS if claim.rule is not None}
    for case, (number, found, verdict) in enumerate(RULES):
        with subtests.test(claim=number, case=case, verdict=verdict):
            made = verdict_json(judge(KNOWN[number], found))
            json.dumps(made, allow_nan=False)
            words = verdict_words(made)
            whole = verdict in ("holds", "does not hold", "cannot be told")
            assert words == verdict if whole else words.startswith(verdict)


def test_retrieval_heads_are_counted_in_both_versions():
    labels = {"label": [2.0] * 10 + [1.0] * 30, "label_no_sink": [4.0] * 7 + [2.0] * 3 + [1.0] * 30}
    found = judge(KNOWN[24], evidence(heads=FakeRun({}, RETRIEVAL | labels))).judged
    note = "Attention sinks: 7 of 40 heads; pure symbolic heads among the others: 3; over all keys, with sinks: 10."
    assert list(found.notes) == [note]
    versions = ["without the sink"] * 2 + ["over all keys"] * 2
    assert [number.title.rsplit("scored ", 1)[1] for number in found.numbers] == versions


def texts(count=3, tokens=24, vocabulary=32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (tokens,), generator=generator).tolist() for _ in range(count)]


def test_model_in_memory(tmp_path, monkeypatch):
    model = tiny("llama")
    numbers = (1, 5, 16, 18)
    made = judge_claims(model, claims=numbers, texts=texts(), out=tmp_path)
    assert list(made.verdicts) == list(numbers)
    assert made.verdicts[16].startswith("not judged: ")
    assert made[1]["numbers"][0]["n"] == 3
    assert made.data["command"] is None
    assert "Judgement of " in repr(made)
    path = made.save(tmp_path / "claims-mine.json")
    assert Judgement.load(path) == made
    with pytest.raises(KeyError, match="not in this judgement: choose from"):
        made[2]
    # Nothing is measured again, and the file is the same.
    monkeypatch.setattr(jobs, "_measured", None)
    assert judge_claims(model, claims=numbers, texts=texts(), out=tmp_path) == made


def test_several_control_models_are_drawn(tmp_path):
    made = judge_claims(tiny("llama"), claims=(5,), texts=texts(), controls=2, out=tmp_path)
    measured = [(run["measurement"], run["weights"]) for run in made.data["runs"]]
    assert measured.count(("axes", "random")) == measured.count(("planes", "random")) == 2
    stability = made[5]["stability"]
    assert stability["over"] == "3 documents and 2 random control models"
    assert math.isclose(sum(stability["verdicts"].values()), 1.0)
    one = judge_claims(tiny("llama"), claims=(5,), texts=texts(), out=tmp_path)
    assert one[5]["numbers"] == made[5]["numbers"]  # those of the first control model


@pytest.mark.slow
def test_massive_values(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = LlamaForCausalLM(config).eval()
    made = judge_claims(model, claims=(23,), texts=texts(tokens=160), out=tmp_path)
    assert made.verdicts[23] == "does not hold"  # random weights have no massive values
    assert made[23]["parts"][2]["outcome"] is None  # token ids have no tokenizer, so there are no facts
    made = judge_claims(model, claims=(23,), texts=texts(), out=tmp_path)
    assert made.verdicts[23].startswith("not judged: 24 tokens are too few for 4 planted sequences")


@pytest.mark.slow
def test_model_without_rotation(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()
    made = judge_claims(model, claims=(2, 3, 4, 6, 9, 17, 18, 20, 23), texts=texts(), out=tmp_path)
    for number in (2, 3, 4, 6, 17, 20, 23):
        assert made.verdicts[number] == "not judged: no layer of this model rotates its queries and keys"
    assert made.verdicts[9] == "not judged: the model accepts no more than 32 tokens"
    assert made[18]["notes"] == ["No layer rotates: there are no frequencies to correlate with."]
    assert len(made.data["runs"]) == 5  # axes with two control models, heads with one


def test_beyond_the_trained_length(model, text, tmp_path):
    text.write_text("the cat sat on a mat and the dog ran " * 20)
    request = ModelRequest(model=model, device="cpu")
    made = judge_claims(request, claims=(9,), files=[str(text)], tokens=32, out=tmp_path / "runs")
    assert made.verdicts[9] == "cannot be told"  # a single document has no interval
    assert [run["measurement"] for run in made.data["runs"]].count("extend") == 1


@pytest.mark.slow
def test_killed_at_any_moment_the_same_bytes_follow(speller, tmp_path, monkeypatch):
    request = ModelRequest(model=speller, device="cpu")
    options = {"claims": (1, 4, 7), "tokens": 40, "documents": 2}
    whole = judge_claims(request, out=tmp_path / "whole", **options).save(tmp_path / "whole.json")
    compute, calls = jobs._measured, []

    def killed(*args):
        calls.append(1)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return compute(*args)

    monkeypatch.setattr(jobs, "_measured", killed)
    made = None
    while made is None:
        with suppress(KeyboardInterrupt):
            made = judge_claims(request, out=tmp_path / "parts", **options)
    assert len(calls) > 5
    assert made.save(tmp_path / "parts.json").read_bytes() == whole.read_bytes()
    for name in ("command", "versions", "weights_hash", "tokenizer_hash", "documents", "left_out"):
        assert name in made.data
    assert made.data["command"].startswith(f"wherewhat claims {speller} --claim 1 --claim 4 --claim 7")


def test_runs_are_those_of_a_report(speller, tmp_path):
    request, capacity = ModelRequest(model=speller), CAPACITY
    given = given_text(None, documents=None, out=tmp_path, default=8)
    requests, scheduled, _ = _schedule(request, capacity, given, _runs(24, CAPACITY), documents=None, tokens=512)
    reported = [made.request for made in schedule(request, capacity, documents=4, tokens=512)[0]]
    for name in ("axes", "heads"):
        assert requests[name] in reported
    assert {name: made.documents for name, made in requests.items()} == {
        **dict.fromkeys(requests, 4),
        "words": 8,
        "prompts": None,
    }
    more, _, _ = _schedule(request, capacity, given, _runs(24, CAPACITY), documents=6, tokens=512)
    assert {made.documents for made in more.values()} == {6, None}
    assert scheduled[0].request == requests["axes"]
    weights = [made.request.model.weights for made in scheduled]
    assert weights == sorted(weights, key=["trained", "random", "shuffled"].index)


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no claim 26: choose from 1 to 25"):
        judge_claims("smollm2", claims=(1, 26), out=tmp_path)
    with pytest.raises(ConfigError, match="--prompts is 0: at least 1 is needed"):
        judge_claims("smollm2", prompts=0, out=tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a file of judged claims"):
        Judgement.load(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        Judgement.load(tmp_path / "none.json")


def test_damaged_fields_of_stored_claims_are_named(tmp_path):
    number = {"title": "n", "mean": None, "low": None, "high": 1.0, "n": 2, "control": None, "control_title": ""}
    texts_of = dict.fromkeys(("verdict", "condition", "statement", "source", "change"), "holds")
    claim = {"number": 1, **texts_of, "notes": [], "runs": ["r"], "numbers": [number], "parts": []}
    whole = {"wherewhat_claims": 1, "model": "m", "weights": "trained", "claims": [claim]}
    file = tmp_path / "claims.json"
    file.write_text(json.dumps(whole))
    assert Judgement.load(file).data == whole  # as written before titles, bounds and stability were stored
    for changes, at in (
        ({"claims": 5}, "claims"),
        ({"claims": [{}]}, r"claims\[0\].number"),
        ({"model": None}, "model"),
        ({"documents": 3}, "documents"),
        ({"claims": [claim, claim | {"number": True}]}, r"claims\[1\].number"),
        ({"claims": [claim | {"numbers": [{"mean": 1}]}]}, r"claims\[0\].numbers\[0\].low"),
        ({"claims": [claim | {"stability": {"changed": 0.5}}]}, r"claims\[0\].stability.over"),
    ):
        file.write_text(json.dumps(whole | changes))
        with pytest.raises(ConfigError, match=f"are damaged at {at}: write them again"):
            Judgement.load(file)


def test_newest_claims_that_are_not_damaged_are_shown(tmp_path):
    model = tiny("llama")
    made = judge_claims(model, claims=(1, 11), texts=texts(), out=tmp_path)
    made.save(tmp_path / "claims-mine.json")
    (tmp_path / "claims-other.json").write_text('{"weights_hash": "0", "claims": []}')
    (tmp_path / "claims-damaged.json").write_text("{")
    found = measurements._claims(tmp_path, made.data["weights_hash"])
    assert found == [made.data]
    shown = _first_undamaged([{"claims": [{}]}, *found], claims_data)
    assert [row["number"] for row in shown["claims"]] == [1, 11]
    assert shown["claims"][1]["words"].startswith("not judged: about trained small models")
    assert _first_undamaged([], claims_data) is None
