"""Identity: what disturbing nothing must leave equal. Brute force: hand-made answers and pairs.

End-to-end: through the pipeline and the command line, on a tiny saved model.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binomtest

from helpers.capture import tiny, tokens
from helpers.models import save_model
from wherewhat.captures.proof import prove
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.choices import (
    Choices,
    ChoicesConfig,
    ItemChoices,
    continued_positions,
    mcnemar,
    paired_change,
    perturb_context,
    score_choices,
)
from wherewhat.measures.measurement import Spans, Text
from wherewhat.measures.perturb import KINDS, PerturbConfig
from wherewhat.measures.statistics import change_bounds, wilson
from wherewhat.report.result import run
from wherewhat.runs.request import ModelRequest, Request, blank, item_choices
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import ModelSubject, load
from wherewhat.scores import Scores
from wherewhat.text.questions import read_items

WORDS = tuple((i, i + 1 + i % 2) for i in range(2, 20, 3))
RESPELLED = tuple((30 + i, 40 + i, 50 + i) for i in range(len(WORDS)))
ITEM = Choices(
    context=Text(tokens(23), 1, lambda: Spans(WORDS, ((2, 9), (11, 21)), RESPELLED)),
    continuations=((20, 31), (33,), (90, 18, 25)),
    lengths=(9, 4, 12),
    gold=1,
    blank=(1,),
    seed=5,
)


@pytest.fixture(scope="module")
def subject():
    model = tiny("llama")
    return ModelSubject(SimpleNamespace(model=model), prove(model))


# answers


def test_right_by_sum_and_by_character():
    found = score_choices(torch.tensor([-6.0, -5.0, -7.0], dtype=torch.float64), ITEM)
    assert found.right
    assert found.chosen == 1
    assert not found.right_by_character  # -0.67, -1.25, -0.58
    assert found.probability == pytest.approx(math.exp(-5) / sum(math.exp(-x) for x in (5, 6, 7)))
    assert found.margin == pytest.approx(1.0)

    found = score_choices(torch.tensor([-5.0, -5.0, -5.0], dtype=torch.float64), ITEM)  # the first is chosen
    assert not found.right
    assert found.margin == 0
    with pytest.raises(MeasureError, match="try another dtype"):
        score_choices(torch.tensor([-5.0, torch.nan, -5.0], dtype=torch.float64), ITEM)


def test_tokens_behind_slide_only_where_all_that_follows_does():
    moved = torch.tensor([0, 5, 2, 7])
    assert continued_positions(moved, 2, kind="position_jitter").tolist() == [0, 5, 2, 7, 4, 5]
    assert continued_positions(moved, 2, kind="position_gaps").tolist() == [0, 5, 2, 7, 8, 9]
    assert continued_positions(None, 2, kind="words") is None


def test_a_context_without_units_stays_as_it_is():
    short = Text(tokens(4), 0, lambda: Spans(((0, 4),), ()))
    config = PerturbConfig()
    for kind in ("words", "sentences", "letters"):
        assert torch.equal(perturb_context(short, kind, 0.5, 0, config, layer=None).ids, tokens(4)[0])
    with pytest.raises(MeasureError, match="does not report where words are"):
        perturb_context(Text(tokens(4)), "words", 0.5, 0, config, layer=None)


# the measurement


def test_rate_zero_is_the_untouched_answer_in_every_kind(subject):
    config = ChoicesConfig(kinds=tuple(KINDS), rates=(0.0,), layers=(0, 1))
    whole = ItemChoices().measure(subject, ITEM, config).whole
    changed = [name for name in whole if name.startswith("probability_change")]
    assert len(changed) == len(KINDS) + 1
    for name in changed:
        assert whole[name] == pytest.approx(0, abs=1e-5)
    for name in (name for name in whole if name.startswith("accuracy_") and "_at_0" in name):
        assert whole[name] == whole["accuracy_norm" if "_norm_" in name else "accuracy"]


def test_a_constant_shift_changes_nothing_and_other_kinds_do(subject):
    config = ChoicesConfig(kinds=tuple(KINDS), rates=(0.5,))
    whole = ItemChoices().measure(subject, ITEM, config).whole
    assert whole["probability_change_position_shift_at_50"] == pytest.approx(0, abs=1e-5)
    for kind in set(KINDS) - {"position_shift", "features"}:
        assert abs(whole[f"probability_change_{kind}_at_50"]) > 1e-5, kind
    assert whole["moved_tokens_at_50"] == pytest.approx(0.5, abs=0.05)


def test_answers_are_never_disturbed_and_equal_a_pass_by_hand(subject, monkeypatch):
    asked = []
    real = subject.continued

    def spy(ids, continuations, **changes):
        asked.append((ids, continuations))
        return real(ids, continuations, **changes)

    monkeypatch.setattr(subject, "continued", spy)
    whole = ItemChoices().measure(subject, ITEM, ChoicesConfig(rates=(0.0, 0.5))).whole
    assert len(asked) == 3  # untouched, without context, disturbed; rate 0 asks nothing new of words
    assert all(continuations == ITEM.continuations for _, continuations in asked)
    change = perturb_context(ITEM.context, "words", 0.5, 5, PerturbConfig(), layer=None)
    assert torch.equal(asked[2][0][0], change.ids)
    by_hand = []
    for one in ITEM.continuations:
        ids = torch.cat([change.ids, torch.tensor(one)])[None]
        with torch.no_grad():
            rows = subject.loaded.model(ids).logits[0].double().log_softmax(-1)
        by_hand.append(sum(float(rows[len(change.ids) - 1 + i, token]) for i, token in enumerate(one)))
    expected = score_choices(torch.tensor(by_hand, dtype=torch.float64), ITEM)
    assert whole["probability_change_words_at_50"] + whole["probability"] == pytest.approx(
        expected.probability, abs=1e-5
    )
    assert whole["accuracy_words_at_50"] == float(expected.right)
    assert whole["flipped_words_at_0"] == 0


def test_items_draw_by_their_own_seeds():
    one, other = (perturb_context(ITEM.context, "tokens", 0.5, seed, PerturbConfig(), layer=None) for seed in (1, 2))
    assert not torch.equal(one.ids, other.ids)


def test_models_that_cannot_be_told_positions_are_refused():
    model = tiny("bloom")
    with pytest.raises(Exception, match="position"):
        ItemChoices().measure(
            ModelSubject(SimpleNamespace(model=model), prove(model)), ITEM, ChoicesConfig(kinds=("position_swap",))
        )


def test_bad_options(subtests):
    wrong = [
        ({"kinds": ("wrods",)}, "did you mean 'words'"),
        ({"rates": (1.5,)}, "outside 0 to 1"),
        ({"rates": ()}, "rates is empty"),
        ({"seed": -1}, "seed is -1"),
    ]
    for options, message in wrong:
        with subtests.test(**options), pytest.raises(ConfigError, match=message):
            ChoicesConfig(**options)


# pairs


def test_mcnemar_is_the_exact_sign_test():
    for gained, lost in [*product(range(5), repeat=2), (3, 17), (40, 60), (900, 1000)]:
        expected = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
        assert mcnemar(gained, lost) == pytest.approx(expected, rel=1e-9), (gained, lost)


def test_pairs():
    before, after = [1, 1, 1, 0, 0, 1], [1, 0, 0, 1, 0, 0]
    found = paired_change(before, after)
    assert found.change == pytest.approx(-2 / 6)
    assert found.p == mcnemar(1, 3)
    assert found.error == pytest.approx(math.sqrt((2 / 8 + 4 / 8 - (2 / 8) ** 2) / 8))
    assert paired_change([1, 0], [1, 0]).error > 0
    assert (found.low, found.high) == pytest.approx((-2 / 8 - 1.959964 * found.error, -2 / 8 + 1.959964 * found.error))
    assert paired_change([0] * 12, [1] * 12).high == 1


def test_intervals_of_changes_hold_what_they_promise():
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        draw = torch.rand(80, generator=generator)
        before = (draw < 0.6).double().tolist()
        after = [
            1 - x if flip < 0.15 else x for x, flip in zip(before, torch.rand(80, generator=generator), strict=True)
        ]
        found = paired_change(before, [float(x) for x in after])
        truth = -0.6 * 0.15 + 0.4 * 0.15
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 400 <= 0.99


def test_together_by_hand():
    config = ChoicesConfig(rates=(0.1,))
    rows = [(1, 0, 0.0), (1, 1, 1.0), (0, 0, 1.0), (1, 0, 1.0)]
    documents = [
        Scores(
            layers=[],
            whole={
                "accuracy": float(before),
                "accuracy_norm": 1.0,
                "accuracy_words_at_10": float(after),
                "accuracy_norm_words_at_10": 1.0,
                "moved_words_at_10": 0.1,
                "right_place": place,
            },
        )
        for before, after, place in rows
    ]
    found = ItemChoices().combine(documents, config)
    assert found.whole["accuracy_one_place"] == 0.75
    assert found.whole["change_words_at_10"] == -0.5
    assert found.whole["change_words_at_10_p"] == 0.5
    low, high = (found.whole[f"change_words_at_10_{end}"] for end in ("low", "high"))
    assert (low, high) == pytest.approx(change_bounds(0, 2, 4))
    assert found.whole["change_norm_words_at_10"] == 0
    row = found.curves["accuracy_by_rate_words"].values[0]
    assert row[:4].tolist() == pytest.approx([0.1, 0.1, 0.25, -0.5])


# end to end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "tiny", bos=True)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    path = tmp_path_factory.mktemp("items") / "cats.jsonl"
    nouns = ["cat", "dog", "mat"]
    records = [
        {
            "context": f"the {nouns[i % 3]} sat on a mat and the dog ran on the {nouns[(i + 1) % 3]} . the",
            "choices": ["cat ran", "dog", "mat . a cat"],
            "gold": i % 3,
        }
        for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def test_an_item_is_cut_as_the_harness_cuts_it(folder, items):
    loaded = load(folder)
    item = read_items(items)[0]
    found = item_choices(loaded, item)
    whole = [loaded.tokenizer(item.context + text)["input_ids"] for text in item.continuations]
    assert found.context.ids[0].tolist() == loaded.tokenizer(item.context)["input_ids"]
    assert [[*found.context.ids[0].tolist(), *one] for one in found.continuations] == whole
    assert found.lengths == (7, 3, 11)
    assert found.context.prefix == 1
    assert found.blank == blank(loaded) == (1,)
    assert found.context.spans.words is not None


def test_the_pipeline_stores_shares_with_intervals(folder, items, tmp_path):
    request = Request(
        measurement="choices",
        model=ModelRequest(model=folder),
        items=items,
        options={"rates": "0,0.2,0.5", "kinds": "words,position_gaps"},
    )
    directory = run(request, out=tmp_path)
    found = {summary.metric.name: summary for summary in StoredRun(directory).summaries}
    table = directory.scores().to_pydict()
    right = [v for m, d, v in zip(table["metric"], table["document"], table["value"], strict=True) if m == "accuracy"]
    assert len(right) == 6
    assert set(right) <= {0.0, 1.0}
    assert found["accuracy"].overall == wilson(right)
    assert found["accuracy"].control == pytest.approx(1 / 3)
    assert found["accuracy_one_place"].overall.mean == pytest.approx(1 / 3)
    change = found["change_words_at_50"].overall
    assert change.mean == pytest.approx(found["accuracy_words_at_50"].overall.mean - found["accuracy"].overall.mean)
    stored = dict(zip(table["metric"], table["value"], strict=True))
    assert (change.low, change.high) == tuple(stored[f"change_words_at_50_{end}"] for end in ("low", "high"))
    assert -1 <= change.low <= change.mean <= change.high <= 1
    assert 0 < found["moved_words_at_20"].overall.mean < found["moved_words_at_50"].overall.mean
    other = tmp_path / "other.jsonl"
    lines = Path(items).read_text().splitlines()
    other.write_text("\n".join(json.dumps({**json.loads(line), "gold": 0}) for line in lines))
    assert run(Request(**{**vars(request), "items": str(other)}), out=tmp_path).path != directory.path


def test_the_command(cli, folder, items):
    shown = cli("choices", folder, "--items", items, "--documents", 4, "--set", "rates=0,0.5")
    assert shown.code == 0, shown.err
    assert "mean over items" in shown.out
    assert "right without context" in shown.out
    assert "random" in shown.out


def test_bad_input_is_one_line(cli, folder, items, tmp_path, subtests):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"context": "the cat " * 20, "choices": ["ran", "sat"], "gold": 0}))
    wrong = [
        (("choices",), "choices needs --items"),
        (("choices", "--items", items, "--text", "x.txt"), "leave --text and --prompts out"),
        (("attention", "--items", items), "attention is not measured on items"),
        (("choices", "--items", items, "--documents", "7"), "7 items were asked for"),
        (("choices", "--items", "nothing.jsonl"), "does not exist"),
        (("choices", "--items", items, "--set", "rates=2"), "rate 2 is outside 0 to 1"),
        (("choices", "--items", long), "item 'long-1': 41 tokens are more than the 32 positions"),
    ]
    for (command, *arguments), message in wrong:
        with subtests.test(message=message):
            shown = cli(command, folder, *arguments, "--no-control")
            assert shown.code == 2
            assert message in shown.err
            assert shown.err.count("\n") == 1
