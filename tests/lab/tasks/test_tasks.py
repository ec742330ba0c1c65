"""Brute force: plain solvers find what was sampled. Identity: balance, uniformity, seeds, splits, vocabularies."""

import collections
import dataclasses
import itertools

import pytest
import torch

from wherewhat.errors import ConfigError
from wherewhat_lab.tasks import TASKS, find_task
from wherewhat_lab.tasks.multi_hop import LetterTask, NumberTask
from wherewhat_lab.tasks.one_hop import IndexTask, PartialInductionTask, RetrievalTask
from wherewhat_lab.tasks.task import fingerprints

SETTINGS = {
    "number": [
        NumberTask(),
        NumberTask(target=1, pretarget=1, hops=1, symbols=1),
        NumberTask(target=1, pretarget=1, hops=2, symbols=3),
        NumberTask(target=5, pretarget=3, hops=4, symbols=7),
        NumberTask(target=12, pretarget=20, hops=6, symbols=900, integers=50),
    ],
    "letter": [
        LetterTask(),
        LetterTask(target=1, pretarget=1, hops=1, letters=3, digits=1),
        LetterTask(target=1, pretarget=1, hops=2, letters=4, digits=1),
        LetterTask(target=5, pretarget=3, hops=4, letters=6, digits=3),
        LetterTask(target=12, pretarget=20, hops=6, letters=40, digits=10),
    ],
    "index": [IndexTask(), IndexTask(target=1, symbols=1), IndexTask(target=40, symbols=30)],
    "retrieval": [
        RetrievalTask(),
        RetrievalTask(target=1, letters=2, digits=1),
        RetrievalTask(target=40, letters=30, digits=3),
    ],
    "partial-induction": [
        PartialInductionTask(),
        PartialInductionTask(target=2, letters=2, digits=2),
        PartialInductionTask(target=40, letters=30, digits=3),
    ],
}


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def symbol(index):
    """The symbol with an index from 0: a … z, aa, ab …, like the columns of a spreadsheet."""
    text = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, len(ALPHABET))
        text = ALPHABET[letter] + text
    return text


def spell(task, tokens):
    """Token ids as text: letters and integers, or pairs such as ``a1`` and ``ab``."""
    return [_word(task, int(token)) for token in tokens]


def _word(task, token):
    if isinstance(task, NumberTask | IndexTask):
        return symbol(token) if token < task.symbols else str(token - task.symbols + 1)
    if token < task.answers:
        left, digit = divmod(token, task.digits)
        right = str(digit + 1)
    else:
        left, letter = divmod(token - task.answers, task.letters)
        right = symbol(letter)
    return symbol(left) + ("." if task.letters > len(ALPHABET) else "") + right


def rows(sequences):
    return [tuple(row) for row in sequences.tokens.tolist()]


def spread(values):
    counts = collections.Counter(values).values()
    return max(counts) - min(counts)


def assert_solved(task, sequences):
    for tokens, answer, hops, path in zip(
        *(x.tolist() for x in (sequences.tokens, sequences.answers, sequences.hops, sequences.path)), strict=True
    ):
        assert task.solve(tokens) == (answer, path[: hops + 1])
        assert path[hops + 1 :] == [-1] * (task.max_hops - hops)
        assert all(token < task.vocabulary for token in tokens)


@pytest.mark.parametrize("kind", TASKS)
def test_every_sequence_is_solved_to_its_answer_path_and_hops(kind):
    for task, extra in itertools.product(SETTINGS[kind], (0, 23)):
        sequences = task.sample(300, seed=1, extra=extra)
        assert sequences.tokens.shape == (len(sequences), task.length + extra) == (300, task.length + extra)
        assert sequences.path.shape == (300, task.max_hops + 1)
        assert all(x.dtype == torch.int64 for x in vars(sequences).values())
        assert_solved(task, sequences)
    task = TASKS[kind]()
    short, long = task.sample(10, seed=2), task.sample(10, seed=2, extra=5000 - task.length)
    assert long.tokens.shape == (10, 5000)
    assert torch.equal(long.tokens[:, -task.length :], short.tokens)
    assert torch.equal(long.answers, short.answers)
    assert_solved(task, long)


@pytest.mark.parametrize("kind", TASKS)
def test_hops_answers_and_places_are_balanced_within_one(kind):
    for task, count in itertools.product(SETTINGS[kind], (1, 37, 1000, 3333)):
        sequences = task.sample(count, seed=3)
        shares = collections.Counter(dict.fromkeys(range(1, task.max_hops + 1), 0))
        shares.update(sequences.hops.tolist())
        assert max(shares.values()) - min(shares.values()) <= 1
        for h, share in shares.items():
            chosen = sequences.select(sequences.hops == h)
            answers, places = chosen.answers.tolist(), chosen.path[:, h].tolist()
            for values, different in (
                (answers, task.answers),
                (places, task.slots),
                (list(zip(answers, places, strict=True)), task.answers * task.slots),
            ):
                assert len(set(values)) == min(share, different), (task, count)
                assert not values or spread(values) <= 1, (task, count)
    task = TASKS[kind]()
    count = 2 * task.max_hops * task.answers * task.slots
    sequences = task.sample(count, seed=4)
    goals = sequences.path.gather(1, sequences.hops[:, None])[:, 0].tolist()
    cells = collections.Counter(zip(sequences.hops.tolist(), sequences.answers.tolist(), goals, strict=True))
    assert set(cells.values()) == {2}  # whole shares are exactly equal
    assert len(cells) == count // 2


def test_one_number_of_hops_alone():
    for h in range(1, 5):
        sequences = LetterTask().sample(600, seed=5, hops=h)
        assert sequences.hops.unique().tolist() == [h]
        assert sequences.path.shape == (600, 5)
        assert_solved(LetterTask(), sequences)


def assert_uniform(counts, expected):
    """Within five standard deviations of as many draws as expected, each."""
    for count in counts:
        assert abs(count - expected) < 5 * expected**0.5


def test_paths_go_right_to_left_through_every_choice_of_positions_equally_often():
    drawn = [task.sample(40_000, seed=6) for task in (NumberTask(), LetterTask())]
    for sequences, h in itertools.product(drawn, range(1, 5)):
        paths = sequences.select(sequences.hops == h).path[:, : h + 1]
        assert bool((paths.diff(dim=1) < 0).all())
        between = collections.Counter(map(tuple, paths[:, 1:h].tolist()))
        choices = list(itertools.combinations(range(15, 7, -1), h - 1))
        assert set(between) == set(choices)
        assert_uniform(between.values(), 10_000 / len(choices))


def test_other_integers_and_letters_of_the_number_task_are_uniform():
    task = NumberTask()
    sequences = task.sample(60_000, seed=7)
    for p in range(8, 16):
        aside = (sequences.path != p).all(dim=1)
        values = (sequences.tokens[aside, p] - task.symbols + 1).tolist()
        counts = collections.Counter(values)
        assert set(counts) == set(range(1, p + 1))
        assert_uniform(counts.values(), len(values) / p)
    sequences = NumberTask(symbols=10).sample(20_000, seed=8, extra=2)
    goal = sequences.path.gather(1, sequences.hops[:, None])
    aside = sequences.tokens[:, :10][torch.arange(10) != goal]
    assert_uniform(aside.bincount(minlength=10).tolist(), len(aside) / 10)


def test_chain_letters_are_distinct_and_others_use_all_the_rest():
    task = LetterTask(target=3, pretarget=6, hops=5, letters=9)
    sequences = task.sample(4000, seed=9, extra=5)
    seen = collections.defaultdict(set)
    for tokens, path, hops in zip(rows(sequences), sequences.path.tolist(), sequences.hops.tolist(), strict=True):
        words = spell(task, tokens)
        chain = [words[position] for position in path[: hops + 1]]
        letters = [word[0] for word in chain]
        assert [word[1] for word in chain[:-1]] == letters[1:]
        assert len(set(letters)) == hops + 1
        aside = [word for position, word in enumerate(words) if position not in path]
        used = {character for word in aside for character in word if character.isalpha()}
        assert not used & set(letters)
        seen[frozenset(letters)] |= used
        assert all(word[1].isdigit() for word in words[: task.target + 5])
        assert all(word[1].isalpha() for word in words[task.target + 5 :])
    everything = set("abcdefghi")
    assert sum(used == everything - chain for chain, used in seen.items()) > 0.9 * len(seen)


def test_sampling_reaches_every_sequence_of_small_tasks():
    task = NumberTask(target=2, pretarget=2, hops=3, symbols=2)
    integers = [range(2, 2 + p) for p in (2, 3, 4)]
    every = set(itertools.product(range(2), range(2), *integers))
    assert set(rows(task.sample(20_000, seed=10))) == every

    task = LetterTask(target=2, pretarget=1, hops=2, letters=4, digits=1)
    every = set()
    for tokens in itertools.product(range(4), range(4), range(4, 20), range(4, 20)):
        words = spell(task, tokens)
        try:
            _, path = task.solve(tokens)
        except ConfigError:
            continue
        chain = [words[position] for position in path]
        letters = {word[0] for word in chain}
        aside = "".join(word for position, word in enumerate(words) if position not in path)
        if len(letters) == len(chain) and not letters & set(aside):
            every.add(tokens)
    assert set(rows(task.sample(20_000, seed=11))) == every


def test_partial_induction_needs_the_last_occurrence():
    task = PartialInductionTask()
    for tokens, answer, (_, goal) in zip(
        *(lambda s: (rows(s), s.answers.tolist(), s.path.tolist()))(task.sample(2000, seed=12)), strict=True
    ):
        words, wanted = spell(task, tokens), spell(task, [answer])[0]
        same = [word for word in words[:goal] if word[0] == wanted[0]]
        assert any(word != wanted for word in same)
        assert words[-1][0] != words[-1][1] == wanted[0]


def test_vocabularies_of_the_paper():
    number, letter = NumberTask(), LetterTask()
    words = spell(number, range(number.vocabulary))
    assert (number.length, letter.length) == (17, 17)
    assert (len(words), words[25:28], words[119:121], words[-1]) == (136, ["z", "aa", "ab"], ["dp", "1"], "16")
    pairs = spell(letter, range(letter.vocabulary))
    assert (len(pairs), pairs[0], pairs[63:66], pairs[-1]) == (128, "a1", ["h8", "aa", "ab"], "hh")
    for task in itertools.chain(*SETTINGS.values()):
        words = spell(task, torch.arange(task.vocabulary))
        assert len(set(words)) == task.vocabulary


def ids(task, text):
    words = spell(task, range(task.vocabulary))
    return [words.index(word) for word in text.split()]


def test_solvers_on_sequences_solved_by_hand():
    for task, text, answer, path in (
        (NumberTask(), "p q r s 4 1 3 2 2", "s", [8, 6, 3]),
        (NumberTask(), "p q r s 4 1 3 2 1", "p", [8, 7, 5, 4, 0]),
        (NumberTask(), "p 1", "p", [1, 0]),
        (LetterTask(), "a1 b2 b3 cd ea fc ge", "a1", [6, 4, 0]),
        (RetrievalTask(), "a1 b2 b3 ca", "a1", [3, 0]),
        (IndexTask(), "a b c d 3", "b", [4, 1]),
        (PartialInductionTask(), "a1 b2 a3 b4 c5 fa", "a3", [5, 2]),
    ):
        found, visited = task.solve(ids(task, text))
        assert (spell(task, [found]), visited) == ([answer], path)


def test_solvers_refuse_what_has_no_single_path(subtests):
    for task, text, complaint in (
        (NumberTask(), "p q 3", "points before the start"),
        (NumberTask(), "p q", "is a letter"),
        (LetterTask(), "a1 a2 ba", "left letter of 2 pairs"),
        (LetterTask(), "a1 ac ba", "left letter of 2 pairs"),
        (LetterTask(), "a1 bc de", "left letter of 0 pairs"),
        (LetterTask(), "a1 ef de fd", "at position 1 names one at 3, which is not before it"),
        (LetterTask(), "a1 aa aa", "left letter of 3 pairs"),
        (LetterTask(), "a1 ea de ad", "left letter of 2 pairs"),
        (LetterTask(), "b1 cd cc", "left letter of 2 pairs"),
        (LetterTask(), "b1 b2", "must be a .letter, letter."),
        (RetrievalTask(), "a1 a2 ba", "left letter of 2 pairs"),
        (PartialInductionTask(), "a1 a2 bc", "has no digit"),
        (PartialInductionTask(), "a1 ac ba", "only the last"),
    ):
        with subtests.test(task=str(task), text=text), pytest.raises(ConfigError, match=complaint):
            task.solve(ids(task, text))
    for kind in TASKS.values():
        task = kind()
        for tokens in ([0, task.vocabulary], [-1], []):
            refusal = pytest.raises(ConfigError, match=r"there is no token|is empty")
            with subtests.test(task=str(task), tokens=tokens), refusal:
                task.solve(tokens)


def test_seeds():
    for kind in TASKS.values():
        task = kind()
        first, again, other = (task.sample(500, seed=seed) for seed in (7, 7, 8))
        for name, values in vars(first).items():
            assert torch.equal(values, getattr(again, name))
        assert not set(rows(first)) & set(rows(other))
        state = torch.random.get_rng_state()
        task.sample(10, seed=0)
        assert torch.equal(state, torch.random.get_rng_state())
    # The same sequences everywhere.
    sums = {name: int(fingerprints(task().sample(4000, seed=1).tokens).sum()) for name, task in TASKS.items()}
    assert sums == FINGERPRINTS


FINGERPRINTS = {
    "number": 2839071309851245992,
    "letter": 2344083351465652921,
    "index": -4435754543722591324,
    "retrieval": -6066467204969750213,
    "partial-induction": 5482572659333072675,
}


@pytest.mark.parametrize("kind", TASKS)
def test_splits_are_balanced_and_disjoint(kind):
    task = TASKS[kind]()
    splits = task.splits(16_000, seed=3)
    assert [len(split) for split in splits] == [14_400, 80, 1520]
    sets = [set(rows(split)) for split in splits]
    assert not any(a & b for a, b in itertools.combinations(sets, 2))
    assert not set().union(*sets) & set(rows(task.sample(14_400, seed=3)))
    for split in splits:
        assert spread(split.hops.tolist()) <= 1
        for h in range(1, task.max_hops + 1):
            chosen = split.select(split.hops == h)
            assert spread(chosen.path[:, h].tolist()) <= 1
            assert spread(chosen.answers.tolist()) <= 1
            assert spread(zip(chosen.answers.tolist(), chosen.path[:, h].tolist(), strict=True)) <= 1
        assert_solved(task, split.select(torch.arange(min(len(split), 100))))
    again = task.splits(16_000, seed=3)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(splits, again, strict=True))


def test_shared_sequences_are_drawn_anew():
    task = NumberTask(target=2, pretarget=2, hops=3, symbols=8)  # 1536 different sequences
    splits = task.splits(2000, seed=0)
    assert [len(split) for split in splits] == [1800, 10, 190]
    train, validation, test = (set(rows(split)) for split in splits)
    assert not train & validation
    assert not train & test
    assert not validation & test
    for split in splits:
        assert_solved(task, split)
        assert spread(split.hops.tolist()) <= 1


def test_splits_of_too_few_different_sequences_are_refused():
    with pytest.raises(ConfigError, match="too few different ones"):
        NumberTask(target=1, pretarget=1, hops=1, symbols=2).splits(2000)
    with pytest.raises(ConfigError, match="total is 700: at least 800"):
        NumberTask().splits(700)


def test_registry():
    assert find_task("letter") is LetterTask
    with pytest.raises(ConfigError, match="there is no task 'leter': did you mean 'letter'"):
        find_task("leter")
    with pytest.raises(ConfigError, match="known: number, letter, index, retrieval, partial-induction"):
        find_task("xyz")
    for task in TASKS.values():
        assert all(field.metadata["help"] for field in dataclasses.fields(task))
        assert hash(task()) == hash(task())


def test_bad_options_are_refused_in_one_line(subtests):
    for task, options in (
        (NumberTask, {"target": 0}),
        (NumberTask, {"pretarget": 0}),
        (NumberTask, {"hops": 0}),
        (NumberTask, {"pretarget": 2, "hops": 4}),
        (NumberTask, {"symbols": 0}),
        (NumberTask, {"integers": 15}),
        (NumberTask, {"target": 2.0}),
        (NumberTask, {"target": True}),
        (LetterTask, {"letters": 5}),
        (LetterTask, {"digits": 0}),
        (LetterTask, {"pretarget": 2}),
        (IndexTask, {"target": 0}),
        (IndexTask, {"symbols": 0}),
        (RetrievalTask, {"letters": 1}),
        (PartialInductionTask, {"target": 1}),
        (PartialInductionTask, {"digits": 1}),
    ):
        with subtests.test(task=task.__name__, options=options):
            with pytest.raises(ConfigError) as error:
                task(**options)
            assert "\n" not in str(error.value)
            assert list(options)[-1] in str(error.value) or "hops" in str(error.value)
    for name, value in (
        ("count", 0),
        ("seed", -1),
        ("seed", 2**30),
        ("seed", 1.5),
        ("hops", 0),
        ("hops", 5),
        ("extra", -1),
    ):
        with subtests.test(request=name, value=value), pytest.raises(ConfigError, match=f"^{name} is "):
            NumberTask().sample(**{"count": 4, "seed": 0, name: value})


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_as_many_as_the_paper_uses(kind):
    splits = TASKS[kind]().splits()
    assert [len(split) for split in splits] == [432_000, 2_400, 45_600]
    marks = [fingerprints(split.tokens) for split in splits]
    assert not any(bool(torch.isin(a, b).any()) for a, b in itertools.combinations(marks, 2))
