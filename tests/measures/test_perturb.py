"""Identity: what perturbations that change nothing, or the same thing, must leave equal. Brute force: hand-made cases.

End-to-end: through the pipeline, on a tiny saved model.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.capture import proved, tiny, tokens
from helpers.models import llama_config, save_model
from helpers.tolerance import rounding
from wherewhat.captures.proof import prove
from wherewhat.errors import CaptureError, ConfigError, MeasureError
from wherewhat.measures.measurement import Spans, Text, all_metrics
from wherewhat.measures.perturb import KINDS, PerturbConfig
from wherewhat.measures.perturb import changes as positions
from wherewhat.measures.perturb.changes import (
    Change,
    adjacent_pairs,
    make_change,
    no_change,
    random_pairs,
    random_units,
    replace_spans,
    swapped_order,
)
from wherewhat.measures.perturb.losses import (
    PerturbedRuns,
    closed_prefixes,
    first_layer_identity,
    last_unmoved,
    loss_rise,
    measure_perturb,
    perturbed_losses,
    same_swaps,
    sensitivity,
)
from wherewhat.measures.perturb.perturb_measurement import PerturbMeasurement
from wherewhat.report.result import run
from wherewhat.runs.request import ModelRequest, Request, find_sentences, find_words, transpose_letters
from wherewhat.runs.subject import ModelSubject, computing, placed

ROTATING = ["llama", "gptj", "gpt_neox", "gemma2", "cohere", "phi3", "mistral"]
N = 23
WORDS = tuple((i, i + 1 + i % 2) for i in range(2, 20, 3))
SENTENCES = ((2, 9), (11, 21))
RESPELLED = tuple((30 + i, 40 + i, 50 + i) if i % 2 else () for i in range(len(WORDS)))
TEXT = Text(tokens(N), 1, lambda: Spans(WORDS, SENTENCES, RESPELLED))
CONFIG = PerturbConfig()
DRAWS = (random_units, random_pairs, adjacent_pairs)


def subject_of(model, proof=None) -> ModelSubject:
    return ModelSubject(SimpleNamespace(model=model), proof or prove(model))


@pytest.fixture(scope="module")
def llama() -> ModelSubject:
    return subject_of(*proved("llama"))


def ignore(_):
    """Reduce a layer to nothing."""


def change_of(kind, rate, seed=0, **options) -> Change:
    return make_change(TEXT, kind, rate, seed, PerturbConfig(**options), layer=0)


# draws


def test_draws_hold_the_share_asked_for_to_one_swap():
    for draw, rate, count in product(DRAWS, (0.0, 0.01, 0.05, 0.1, 0.5, 1.0), (2, 7, 100, 301)):
        found, case = draw(count, rate, 3), (draw.__name__, rate, count)
        assert len(set(found.flatten().tolist())) == found.numel(), case
        units = 1 if draw is random_units else 2
        assert abs(found.numel() - rate * count) <= units / 2 + (count % 2 if rate > 0.9 else 0), case
        assert torch.equal(found, draw(count, rate, 3)), case
        if draw is adjacent_pairs:
            assert bool((found[:, 1] - found[:, 0] == 1).all()), case
    assert not torch.equal(random_pairs(100, 0.2, 0), random_pairs(100, 0.2, 1))
    assert torch.equal(random_pairs(100, 0.1, 0), random_pairs(100, 0.4, 0)[:5])  # low rates are among high ones


def test_every_set_of_adjacent_pairs_is_as_likely():
    """The standard deviation of each count is 26."""
    counts = Counter(tuple(adjacent_pairs(5, 0.8, seed)[:, 0].tolist()) for seed in range(3000))
    assert set(counts) == {(0, 2), (0, 3), (1, 3)}
    assert all(abs(x - 1000) < 120 for x in counts.values())


# content


def test_spans_are_swapped_and_what_is_between_stays():
    order, moved = swapped_order(9, [(1, 2), (3, 6), (7, 8)], torch.tensor([[0, 1]]))
    assert order.tolist() == [0, 3, 4, 5, 2, 1, 6, 7, 8]
    assert moved.tolist() == [False, True, True, True, False, True, False, False, False]


def test_untouched_targets_by_hand():
    order, moved = swapped_order(8, [(t, t + 1) for t in range(8)], torch.tensor([[2, 5]]))
    change = Change(torch.arange(8)[order], order, moved)
    # Targets 1 to 7: 2 and 5 moved, 3 and 6 follow a moved token.
    assert change.untouched.tolist() == [True, False, False, True, False, False, True]


def test_replaced_words_keep_the_rest_aligned():
    change = replace_spans(torch.arange(6), [(1, 3), (4, 5)], [(10, 11, 12), (13,)])
    assert change.ids.tolist() == [0, 10, 11, 12, 3, 13, 5]
    assert change.origin.tolist() == [0, -1, -1, -1, 3, -1, 5]
    assert change.moved.tolist() == [False, True, True, True, False, True, False]


def test_untouched_targets_have_their_own_neighbour():
    for kind, rate in product(KINDS, (0.0, 0.3, 1.0)):
        change, case = change_of(kind, rate, seed=4), (kind, rate)
        at = change.untouched.nonzero()[:, 0] + 1
        assert bool((change.origin[at] == change.origin[at - 1] + 1).all()), case
        assert torch.equal(change.ids[at], TEXT.ids[0][change.origin[at]]), case
        assert change.origin[0] == 0, case
        assert not change.moved[0], case
        if rate == 0:
            assert torch.equal(change.ids, TEXT.ids[0]), case
            assert not bool(change.moved.any()), case


def test_content_is_permuted_and_seeds_are_reproducible():
    for kind in KINDS:
        one, same = (change_of(kind, 0.5, seed=1) for _ in range(2))
        for name in ("ids", "origin", "moved"):
            assert torch.equal(getattr(one, name), getattr(same, name)), kind
        if kind != "letters":
            assert torch.equal(one.ids.sort().values, TEXT.ids[0].sort().values), kind
        if kind in ("tokens", "adjacent_tokens", "features", "position_swap"):
            assert abs(int(one.moved.sum()) - 0.5 * (N - 1)) <= 1, kind


def test_tokens_positions_and_features_share_their_swaps():
    content, index, feature = (change_of(kind, 0.3, seed=2) for kind in ("tokens", "position_swap", "features"))
    assert torch.equal(content.origin, index.positions)
    assert torch.equal(content.origin, feature.orders[0])


# positions


def test_jitter_moves_exactly_the_share_and_never_below_zero():
    for seed in range(20):
        where, moved = positions.jitter(40, 0.5, seed, reach=3)
        assert int(moved.sum()) == 20
        assert torch.equal(where != torch.arange(40), moved)
        assert int(where.min()) >= 0
        assert int((where - torch.arange(40)).abs().max()) <= 3


def test_swap_and_shuffle_are_permutations():
    for make in (positions.swap, positions.shuffle):
        where, moved = make(41, 0.4, 5, prefix=1)
        assert where.sort().values.tolist() == list(range(41))
        assert torch.equal(where != torch.arange(41), moved)
        assert int(moved.sum()) == 16
    swapped = positions.swap(41, 0.4, 5)[0]
    assert torch.equal(swapped[swapped], torch.arange(41))


def test_gaps_and_shift():
    where, moved = positions.gaps(10, 0.3, 0, size=4)
    steps = where.diff(prepend=torch.tensor([-1]))
    assert steps[moved].tolist() == [5, 5, 5]
    assert bool((steps[~moved] == 1).all())
    where, moved = positions.shift(10, 0.5)
    assert where.tolist() == list(range(5, 15))
    assert not bool(moved.any())


# the model


def close_to(logits):
    """Tolerance of logits that are sums of up to 64 terms, in units of the largest."""
    return {"rtol": 0, "atol": rounding(64) * float(logits.abs().max())}


@pytest.mark.parametrize("name", ROTATING)
def test_changes_of_nothing_and_equal_changes(name):
    """No rate and a constant shift change nothing; features swapped at the first layer are swapped tokens."""
    subject = subject_of(*proved(name))
    ids = tokens(N)
    plain = subject.run(ids, ignore, logits=True)
    close = close_to(plain)
    for kind, rate in [("position_shift", 0.5), ("position_gaps", 0.0), ("position_jitter", 0.0)]:
        change = change_of(kind, rate)
        found = subject.run(ids, ignore, logits=True, positions=change.positions)
        torch.testing.assert_close(found, plain, **close)
    with subject.reordered({0: torch.arange(N)}):
        found = subject.run(ids, ignore, logits=True)
    torch.testing.assert_close(found, plain, **close)
    assert torch.equal(subject.run(ids, ignore, logits=True), plain)
    content, feature = change_of("tokens", 0.4), change_of("features", 0.4)
    with subject.reordered(feature.orders):
        found = subject.run(feature.ids[None], ignore, logits=True)
    expected = subject.run(content.ids[None], ignore, logits=True)
    torch.testing.assert_close(found, expected, **close)
    assert float((found - plain).abs().max()) > 100 * close["atol"]


def test_positions_keep_one_text_one_text(llama):
    """Without a mask transformers would take a gap for the start of another text."""
    ids = tokens(N)
    where = torch.arange(N) + 5 * (torch.arange(N) >= 10)
    seen = []
    llama.run(ids, lambda a: seen.append(a.visible(slice(N - 1, N)).flatten()), positions=where)
    assert all(bool(row.all()) for row in seen)
    edited = llama.edited(ids, lambda _: None, positions=where)
    torch.testing.assert_close(edited, llama.run(ids, ignore, logits=True, positions=where), **close_to(edited))


def test_swapped_positions_under_a_swapped_mask_are_swapped_tokens():
    """Positions and contents differ by nothing but who sees whom."""
    model = tiny("llama", attn_implementation="eager")
    ids = tokens(N)
    order = change_of("tokens", 0.5).origin
    visible = order[None, :] <= order[:, None]
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        by_index = model(ids, position_ids=order[None], attention_mask=mask, use_cache=False).logits
        by_content = model(ids[:, order], use_cache=False).logits
    torch.testing.assert_close(by_index[:, order], by_content, **close_to(by_content))


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox"])
def test_positions_and_features_agree_where_they_must(name):
    subject = subject_of(*proved(name))
    text = Text(tokens(40))
    for draw in (random_pairs, adjacent_pairs):
        index, feature = same_swaps(text, draw, 0.2, 1, 0)
        first = int(index.moved.nonzero()[0])
        plain, *found = (perturbed_losses(subject, change) for change in (no_change(text.ids[0]), index, feature))
        for losses in found:
            torch.testing.assert_close(losses[: first - 1], plain[: first - 1], rtol=0, atol=1e-5)
        assert float((found[0] - found[1])[first:].abs().max()) > 1e-4
    assert first_layer_identity(subject, text, 0.2, 1, 0) < 1e-5


def test_one_layer_cannot_tell_positions_from_features_outside_the_swaps():
    torch.manual_seed(0)
    config = llama_config(vocab_size=160, num_hidden_layers=1, initializer_range=0.3)
    subject = subject_of(AutoModelForCausalLM.from_config(config).eval())
    index, feature = same_swaps(Text(tokens(40)), adjacent_pairs, 0.3, 1, 0)
    rows = closed_prefixes(feature.orders[0]) & ~feature.moved
    assert 20 < int(rows.sum()) < 40
    by_index = subject.run(index.ids[None], ignore, logits=True, positions=index.positions)
    with subject.reordered(feature.orders):
        by_feature = subject.run(index.ids[None], ignore, logits=True)
    torch.testing.assert_close(by_index[0, rows], by_feature[0, rows], **close_to(by_feature))
    assert float((by_index - by_feature)[0, ~rows].abs().max()) > 0.01


def test_prefixes_that_only_exchange_among_themselves():
    assert closed_prefixes(torch.tensor([0, 3, 2, 1, 4])).tolist() == [True, False, False, True, True]


def test_models_without_positions_are_refused_in_one_line(subtests):
    for name in ("bloom", "mpt", "falcon:alibi"):
        with subtests.test(name=name):
            subject = subject_of(*proved(name))
            with pytest.raises(CaptureError, match="leave kinds of positions out") as error:
                subject.run(tokens(N), ignore, positions=torch.arange(N))
            assert "\n" not in str(error.value)
            found = measure_perturb(subject, TEXT, PerturbConfig(rates=(0.2,), seeds=1, axes=False))
            assert "rise_tokens_at_20" in found.whole
            assert not any("position" in name for name in found.whole)


def test_frequencies_that_depend_on_the_largest_position_are_refused():
    subject = subject_of(*proved("llama:dynamic"))
    with pytest.raises(CaptureError, match="rotates differently from the proof"):
        subject.run(tokens(N), ignore, positions=torch.arange(N) + 20)


def test_a_model_that_breaks_at_other_positions_says_so_in_one_line(llama):
    def breaking(positions):
        with computing(llama.loaded.model, positions):
            raise RuntimeError("index 6 is out of bounds\nat some line")

    with pytest.raises(
        CaptureError, match=r"cannot be run at other positions \(index 6 is out of bounds at some line\)"
    ):
        breaking(torch.arange(N))
    with pytest.raises(RuntimeError, match="at some line"):
        breaking(None)


def test_learned_positions_end_at_their_table():
    subject = subject_of(*proved("gpt2"))
    limit = subject.loaded.model.config.n_positions
    with pytest.raises(ConfigError, match=f"beyond the last of the model's {limit} positions"):
        subject.run(tokens(N), ignore, positions=torch.arange(N) + limit - N + 1)
    with pytest.raises(ConfigError, match="one for each"):
        placed(subject.loaded.model, tokens(N), torch.arange(3))
    with pytest.raises(ConfigError, match="negative"):
        placed(subject.loaded.model, tokens(N), torch.arange(N) - 1)


def test_a_layer_that_is_not_there(llama):
    orders = {0: torch.arange(N), 99: torch.arange(N)}
    before = hooks(llama.loaded.model)
    with pytest.raises(ConfigError, match="there is no layer 99"), llama.reordered(orders):
        pass
    assert hooks(llama.loaded.model) == before


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


# losses and heads


def test_losses_by_hand():
    order, moved = swapped_order(5, [(t, t + 1) for t in range(5)], torch.tensor([[3, 4]]))
    change = Change(torch.arange(5)[order], order, moved)
    plain, after = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.5, 2.0, 5.0, 5.0])
    rise = loss_rise(change, after.double(), plain.double())
    assert (rise.loss, rise.rise) == (13.5 / 4, 3.5 / 4)
    assert (rise.untouched, rise.rise_untouched, rise.moved) == (1.75, 0.25, pytest.approx(0.4))


def test_sensitivity_by_hand():
    before, after = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)
    before[..., 0] = 2.0
    after[..., 0] = torch.tensor([[2.0, 1.0], [2.0, 4.0]])
    torch.testing.assert_close(sensitivity(before, after), torch.tensor([0.0, 0.75]).double())
    kept, origin = last_unmoved(replace_spans(torch.arange(6), [(1, 2), (4, 5)], [(8, 9), (7, 7)]), 6, 3)
    assert (kept.tolist(), origin.tolist()) == ([4, 7], [3, 5])


def test_the_same_perturbed_text_is_run_once(llama, monkeypatch):
    passes = []
    run_model = ModelSubject.run
    monkeypatch.setattr(
        ModelSubject,
        "run",
        lambda own, ids, *args, **options: passes.append(len(ids)) or run_model(own, ids, *args, **options),
    )
    config = PerturbConfig(kinds=("tokens", "position_swap", "features"), rates=(0.0, 0.5), seeds=2, at=0.5)
    measure_perturb(llama, TEXT, config)
    # The intact text, positions and orders as they are, three kinds of two draws; then tokens with other targets for
    # each draw, and two swaps of neighbours.
    assert sum(passes) == 3 + 6 + 2 + 2
    runs, change = PerturbedRuns(llama), change_of("position_swap", 0.5)
    runs.states([(change, torch.arange(3))])
    assert torch.equal(runs.losses(change), perturbed_losses(llama, change))
    assert sum(passes) == 13 + 2


def test_every_number_of_a_document_has_finite_words(llama):
    config = PerturbConfig(rates=(0.0, 0.05, 0.1, 0.5), seeds=2, layers=(0, 1), at=0.5)
    found = measure_perturb(llama, TEXT, config)
    for kind in KINDS:
        label = "features_1" if kind == "features" else kind
        assert abs(found.whole[f"rise_{label}_at_0"]) < 1e-5
        assert found.curves[f"loss_by_rate_{label}"].values.shape == (4, 5)
    assert abs(found.whole["rise_position_shift_at_50"]) < 1e-5
    assert found.whole["rise_at_10"] == found.whole["rise_words_at_10"]
    assert found.whole["identity_first_layer"] < 1e-5
    assert found.whole["identity_tokens"] < 1e-5
    for layer in found.layers:
        torch.testing.assert_close(
            layer.heads["sensitivity_position_shift"], torch.zeros(4).double(), rtol=0, atol=1e-4
        )
        assert float(layer.heads["sensitivity_tokens"].min()) > 0
    words = {metric.name for metric in all_metrics(PerturbMeasurement(), config)}
    stored = set(found.whole) | set(found.layers[0].heads)
    assert words - stored == {"predicted_position_shift"}
    assert measure_perturb(llama, TEXT, config).whole == found.whole


# words, sentences, letters


def test_words_with_and_without_counted_spaces():
    text = "Oh café, he said."
    trimmed = [(0, 2), (3, 6), (6, 7), (6, 7), (7, 8), (9, 11), (12, 16), (16, 17)]
    spaced = [(0, 2), (2, 6), (6, 7), (6, 7), (7, 8), (8, 11), (11, 16), (16, 17)]
    for offsets in (trimmed, spaced):
        spans, characters = find_words(text, offsets)
        assert spans == [(0, 1), (1, 5), (5, 6), (6, 8)]
        assert [text[a:b] for a, b in characters] == text.split()


def test_sentences_end_where_they_end():
    said = ["Mr.", "Bennet", "left.", "“Why?”", "she", "said"]
    spans = tuple((i, i + 1) for i in range(6))
    assert find_sentences(spans, said) == ((0, 3), (3, 4))


def test_letters_inside_a_word():
    for seed in range(20):
        found = transpose_letters("(planet)", random.Random(seed))
        assert found in {"(palnet)", "(plnaet)", "(plaent)"}
    assert transpose_letters("the", random.Random(0)) is None
    assert transpose_letters("3.14", random.Random(0)) is None


# bad input and the pipeline


def test_senseless_options_are_refused(subtests):
    wrong = [
        ({"rates": (0.1, 1.5)}, "rate 1.5 is outside 0 to 1"),
        ({"rates": (-0.1,)}, "rate -0.1 is outside"),
        ({"rates": (float("nan"),)}, "outside 0 to 1"),
        ({"at": 2.0}, "rate 2 is outside"),
        ({"rates": ()}, "rates is empty"),
        ({"rates": (0.1, 0.1)}, "only once"),
        ({"kinds": ("wrods",)}, "did you mean 'words'"),
        ({"kinds": ("xyzzy",)}, "known: words"),
        ({"seeds": 0}, "seeds is 0"),
        ({"layers": ()}, "one or more layers"),
        ({"seed": -1}, "seed is -1"),
    ]
    for options, message in wrong:
        with subtests.test(**options), pytest.raises(ConfigError, match=message):
            PerturbConfig(**options)


def test_texts_that_do_not_do_are_refused(llama, subtests):
    for kind in ("words", "sentences", "letters"):
        with subtests.test(kind=kind), pytest.raises(MeasureError):
            measure_perturb(llama, Text(tokens(N)), PerturbConfig(kinds=(kind,)))
    with pytest.raises(MeasureError, match="too few"):
        measure_perturb(llama, Text(tokens(5)), CONFIG)


@pytest.mark.parametrize("bos", [False, True])
def test_through_the_pipeline(tmp_path, bos):
    folder = save_model(tmp_path / "tiny", llama_config(max_position_embeddings=64), bos=bos)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat . and the dog ran . " * 4)
    asked = Request(
        measurement="perturb",
        model=ModelRequest(model=folder),
        files=(str(text),),
        tokens=36,
        options={"rates": "0,0.05,0.1,0.5", "seeds": 1},
    )
    directory = run(asked, out=tmp_path / "out")
    table = directory.scores().to_pydict()
    found = dict(zip(table["metric"], table["value"], strict=True))
    assert abs(found["rise_words_at_0"]) < 1e-5
    assert abs(found["rise_words_at_50"]) > 1e-4
    assert found["rise_at_5"] == found["rise_words_at_5"]
    assert {"rise_sentences_at_50", "rise_features_0_at_50", "predicted_tokens"} <= found.keys()
    assert "rise_letters_at_50" not in found  # its tokenizer knows ten words and no letters
    assert run(asked.with_weights("random"), out=tmp_path / "out").path != directory.path
