"""Brute force: solvers that only read the text find the same answers. Identity: places, lengths, balance, seeds."""

import collections
import dataclasses
import itertools
import re

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from wherewhat.errors import ConfigError, TextError, WherewhatError
from wherewhat.text.prompts.kinds import KINDS, make_prompts
from wherewhat.text.prompts.prompt import SENTENCES, Prompt, PromptItem, balanced, generator
from wherewhat.text.prompts.vocabulary import NAMES, THINGS, PieceTokenizer, normalised

LINES = [
    "Here is what everybody likes: Anna likes apples. Bob likes music.",
    "Question: what does Anna like? Answer: Anna likes apples.",
    "List: k d a p. Go back 3: d.",
    "Pairs: k=4 d=7. Ask: k=4",
    SENTENCES,
    " ".join(str(number) for number in range(200)),
    *(f" {name} likes {thing}." for name, thing in zip(NAMES[:150], THINGS[:150], strict=True)),
]
ALPHABET = sorted(set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:?=\n "))
SPECIAL = ["<unk>", "<s>", "</s>"]


def wrapped(rules):
    return PreTrainedTokenizerFast(tokenizer_object=rules, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_bpe():
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    rules.train_from_iterator(LINES, trainer)
    return wrapped(rules)


def word_piece():
    rules = Tokenizer(models.WordPiece(unk_token="<unk>"))
    rules.normalizer = normalizers.BertNormalizer(lowercase=True)
    rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rules.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=ALPHABET)
    rules.train_from_iterator(LINES, trainer)
    return wrapped(rules)


def sentence_piece():
    """Unigram as Llama and T5 have it: a space is put in front of every text, and no piece for a line end."""
    rules = Tokenizer(models.Unigram())
    rules.normalizer = normalizers.Replace("\n", " ")
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    rules.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=[*ALPHABET, "▁"]
    )
    rules.train_from_iterator(LINES, trainer)
    return wrapped(rules)


def characters():
    rules = Tokenizer(models.Unigram([(text, 0.0) for text in [*SPECIAL, *ALPHABET]], unk_id=0))
    rules.decoder = decoders.Fuse()
    tokenizer = wrapped(rules)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


BUILDERS = {
    "byte_bpe": (byte_bpe, ()),
    "word_piece": (word_piece, (1,)),
    "sentence_piece": (sentence_piece, (1,)),
    "characters": (characters, (1, 2)),
}
ASKING = ["binding", "numbers", "letters"]
SIZE = {"binding": "pairs", "numbers": "length", "letters": "pairs"}


@pytest.fixture(scope="module", params=BUILDERS)
def speller(request):
    build, prefix = BUILDERS[request.param]
    return PieceTokenizer.of(build(), prefix)


@pytest.fixture(scope="module")
def bpe():
    return PieceTokenizer.of(byte_bpe())


def solve(kind, text):
    """The answer, the place it stands in, and the items in order, from the text alone."""
    if kind == "binding":
        body = text[text.rindex("Here is what everybody likes:") :]
        pairs = re.findall(r" ?(\w+) likes (\w+)\.", body)
        asked = re.search(r"what does (\w+) like\?\nAnswer: (\w+) likes *$", body)
        assert asked[1] == asked[2]
        place = [who for who, _ in pairs].index(asked[1])
        return pairs[place][1], place, [*(word for pair in pairs for word in pair), asked[1], asked[1]]
    if kind == "numbers":
        line = text[text.rindex("List:") :]
        symbols, back = re.fullmatch(r"List:((?: \w+)+)\. Go back (\d+): *", line).groups()
        listed = symbols.split()
        return listed[-int(back)], len(listed) - int(back), [*listed, back]
    line = text[text.rindex("Pairs:") :]
    pairs, asked = re.fullmatch(r"Pairs:((?: \w+=\d)+)\. Ask: (\w+)=", line).groups()
    listed = [pair.split("=") for pair in pairs.split()]
    place = [key for key, _ in listed].index(asked)
    return listed[place][1], place, [*(word for pair in listed for word in pair), asked]


def check(prompt, speller):
    """Everything that must hold for a prompt with a question, its text read by the solver."""
    answer, place, words = solve(prompt.kind, prompt.text)
    assert normalised(speller.decode(prompt.answer)) == normalised(answer)
    assert prompt.answer_group == place
    assert prompt.candidates[prompt.correct] == prompt.answer
    assert len(set(prompt.candidates)) == len(prompt.candidates) > 1
    main = [item for item in prompt.items if item.role != "example"]
    assert [normalised(speller.decode(prompt.ids[i.start : i.end])) for i in main] == [
        normalised(word) for word in words
    ]
    assert not any(speller.leading_spaces(prompt.ids[item.start : item.end]) for item in main)
    assert prompt.ids[: len(speller.prefix)] == speller.prefix
    body = prompt.ids[len(speller.prefix) :]
    assert speller.special.isdisjoint(body)
    assert normalised(speller.decode(body)) == normalised(prompt.text) or "##" in prompt.text[:20]
    assert prompt.query == len(prompt.ids) - 1


def test_a_solver_that_reads_the_text_agrees(speller):
    for kind, size in itertools.product(ASKING, (2, 9, 40)):
        for prompt in make_prompts(kind, speller, count=5, seed=3, **{SIZE[kind]: size}):
            check(prompt, speller)
            groups = {item.group for item in prompt.items if item.role in ("attribute", "letter")}
            assert groups == set(range(size)), kind
            if size == 9:  # few enough answers to be told apart by their first token
                assert len({candidate[0] for candidate in prompt.candidates}) == len(prompt.candidates), kind


def test_exactly_the_tokens_asked_for(speller):
    for kind in ASKING:
        with pytest.raises(ConfigError) as error:
            make_prompts(kind, speller, tokens=4, count=3)
        least = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
        with pytest.raises(ConfigError):
            make_prompts(kind, speller, tokens=least - 1, count=3)
        for tokens in [*range(least, least + 12), 777]:
            for prompt in make_prompts(kind, speller, tokens=tokens, count=3):
                assert len(prompt.ids) == tokens, kind
                check(prompt, speller)


def test_no_more_pairs_would_fit(bpe):
    for kind in ASKING:
        prompts = make_prompts(kind, bpe, tokens=300, count=1)
        size = 1 + max(item.group for item in prompts[0].items if item.role in ("attribute", "letter"))
        assert size > 10, kind
        with pytest.raises(ConfigError, match="tokens is 300"):
            make_prompts(kind, bpe, tokens=300, count=1, **{SIZE[kind]: size + 1})
        padded = make_prompts(kind, bpe, tokens=300, count=1, **{SIZE[kind]: 3})[0]
        bare = make_prompts(kind, bpe, count=1, **{SIZE[kind]: 3})[0]
        assert padded.text.endswith("\n" + bare.text), kind
        assert padded.answer == bare.answer, kind


def test_answers_are_in_every_place_equally_often(bpe):
    for kind in ASKING:
        prompts = make_prompts(kind, bpe, count=24, **{SIZE[kind]: 8})
        assert collections.Counter(prompt.answer_group for prompt in prompts) == dict.fromkeys(range(8), 3), kind
        assert [prompt.answer_group for prompt in prompts] != sorted(prompt.answer_group for prompt in prompts), kind
        chosen = make_prompts(kind, bpe, count=3, index_answer=5, **{SIZE[kind]: 8})
        assert {prompt.answer_group for prompt in chosen} == {5}, kind


def test_balanced_within_one_and_spread():
    for size, count in ((5, 5), (5, 12), (100, 7), (3, 1), (2, 9)):
        places = balanced(size, count, generator("x", 0, 0))
        often = collections.Counter(places)
        assert len(places) == count
        assert all(count // size <= often[place] <= count // size + 1 for place in range(size))
        if count < size:
            parts = enumerate(sorted(places))
            assert all(part * size // count <= place < (part + 1) * size // count for part, place in parts)


def test_the_seed_decides_everything(bpe):
    again = PieceTokenizer(bpe.encode, bpe.decode, bpe.vocabulary, bpe.prefix, bpe.special)
    for kind in KINDS:
        first = make_prompts(kind, bpe, tokens=400, count=3, seed=5)
        assert first == make_prompts(kind, again, tokens=400, count=3, seed=5), kind
        others = make_prompts(kind, bpe, tokens=400, count=3, seed=6)
        assert {prompt.ids for prompt in first}.isdisjoint(prompt.ids for prompt in others), kind
        assert len({prompt.name for prompt in first}) == len({prompt.ids for prompt in first}) == 3, kind


def test_the_bytes_do_not_change_between_releases():
    letters = PieceTokenizer(lambda text: [ord(char) for char in text], lambda ids: "".join(map(chr, ids)), 128)
    assert (
        make_prompts("letters", letters, pairs=3, shots=1, seed=1)[0].text
        == "Pairs: e=5 s=3 j=7. Ask: j=7\nPairs: t=8 l=5 f=1. Ask: t="
    )
    numbers = "List: m t v y. Go back 1: y.\nList: z s j l. Go back 2: "
    assert make_prompts("numbers", letters, length=4, shots=1, seed=1)[0].text == numbers
    binding = (
        "Here is what everybody likes: Jan likes feathers. Beatrice likes cookies.\n"
        "Question: what does Beatrice like?\nAnswer: Beatrice likes "
    )
    assert make_prompts("binding", letters, pairs=2, seed=1)[0].text == binding
    assert make_prompts("random", letters, tokens=6, seed=1)[0].ids == (97, 90, 124, 19, 119, 26)


def test_words_of_one_token_come_first(bpe):
    for prompt in make_prompts("binding", bpe, pairs=12, count=4):
        assert {len(candidate) for candidate in prompt.candidates} == {1}
        assert {item.end - item.start for item in prompt.items} == {1}
    prompt = make_prompts("binding", bpe, pairs=256)[0]  # more than there are such words
    assert {len(candidate) for candidate in prompt.candidates} > {1}
    check(prompt, bpe)


def test_symbols_come_once_and_examples_are_solved(bpe):
    for prompt in make_prompts("letters", bpe, pairs=60, count=3):
        keys = re.findall(r" (\w+)=\d", re.sub(r"Ask: \w+=\d?", "", prompt.text))
        assert len(keys) == len(set(keys)) == 60 + 3 * 12
        for line in prompt.text.split("\n")[:-1]:
            assert solve("letters", line[:-1])[0] == line[-1]
    for prompt in make_prompts("numbers", bpe, length=30, count=3, shots=5, shot_length=7):
        lines = prompt.text.split("\n")
        assert len(lines) == 6
        for line in lines[:-1]:
            question, _, answer = line.removesuffix(".").rpartition(" ")
            assert solve("numbers", question)[0] == answer
        examples = [item for item in prompt.items if item.role == "example"]
        assert [item.group for item in examples] == list(range(5))
        shown = [bpe.decode(prompt.ids[item.start : item.end]) for item in examples]
        assert shown == [line.removeprefix("List:").removesuffix(".") for line in lines[:-1]]


def test_long_lists_use_symbols_equally_often(bpe):
    prompt = make_prompts("numbers", bpe, length=300)[0]
    check(prompt, bpe)
    often = collections.Counter(bpe.decode(prompt.ids[i.start : i.end]) for i in prompt.items if i.role == "letter")
    assert len(often) == len(prompt.candidates) >= 26
    assert {len(candidate) for candidate in prompt.candidates} == {1}
    assert max(often.values()) - min(often.values()) <= 1


def test_random_tokens(speller):
    for repeat in (1, 2, 3):
        for prompt in make_prompts("random", speller, tokens=50, count=3, repeat=repeat):
            body = prompt.ids[len(speller.prefix) :]
            assert len(prompt.ids) == 50
            assert speller.special.isdisjoint(body)
            assert (prompt.answer, prompt.candidates, prompt.correct, prompt.answer_item) == ((), (), -1, -1)
            assert not prompt.asks
            assert prompt.answer_group == -1
            blocks = [prompt.ids[item.start : item.end] for item in prompt.items]
            assert len(blocks) == repeat
            assert len(set(blocks)) == 1
            assert len(set(body)) == len(body) - (repeat - 1) * len(blocks[0])
            assert prompt.items[-1].end == 50
            assert prompt.text == speller.decode(body)
    assert len(make_prompts("random", speller, tokens=5000)[0].ids) == 5000  # more than the vocabulary


WRONG = [
    ("bindings", {}, "did you mean 'binding'"),
    ("zzz", {}, "known: binding, numbers, letters, random"),
    ("binding", {"pair": 3}, "did you mean 'pairs'"),
    ("random", {"tokens": 20, "pairs": 3}, "no option 'pairs'"),
    ("binding", {"pairs": 1}, "pairs is 1: at least 2"),
    ("binding", {"pairs": 10_000}, "have at most [34]"),
    ("letters", {"pairs": 10_000}, "have at most 666"),
    ("binding", {"pairs": "4"}, "whole number"),
    ("binding", {"pairs": True}, "whole number"),
    ("binding", {"pairs": 4, "index_answer": 4}, "index_answer is 4: choose from 0 to 3"),
    ("binding", {"pairs": 4, "index_answer": -1}, "index_answer is -1"),
    ("binding", {"pairs": 4, "tokens": 10}, "tokens is 10: binding prompts with pairs 4 need at least"),
    ("binding", {"tokens": 60, "index_answer": 40}, "with pairs 41 need at least"),
    ("numbers", {"length": 1}, "length is 1"),
    ("numbers", {"shots": -1}, "shots is -1"),
    ("letters", {"shot_length": 0}, "shot_length is 0"),
    ("random", {}, "give tokens"),
    ("random", {"tokens": 1, "repeat": 2}, "need at least 2"),
    ("random", {"tokens": 9, "repeat": 0}, "repeat is 0"),
    ("binding", {"count": 0}, "count is 0"),
    ("binding", {"tokens": 0}, "tokens is 0"),
    ("binding", {"seed": -1}, "seed is -1"),
]


def test_wrong_requests_are_one_line(bpe, subtests):
    for kind, options, words in WRONG:
        with subtests.test(kind=kind, options=options):
            with pytest.raises(ConfigError, match=words) as error:
                make_prompts(kind, bpe, **options)
            assert "\n" not in str(error.value)


def test_a_tokenizer_without_english():
    rules = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    for kind in ASKING:
        with pytest.raises(WherewhatError, match="tokenizer") as error:
            make_prompts(kind, PieceTokenizer.of(wrapped(rules)))
        assert "\n" not in str(error.value)


def test_ids_beyond_the_model_are_not_used():
    narrow = PieceTokenizer.of(byte_bpe(), vocabulary=1490)
    for kind in KINDS:
        for prompt in make_prompts(kind, narrow, tokens=300, count=2):
            assert max(prompt.ids) < 1490, kind


GOOD = Prompt(
    "p",
    "binding",
    (1, 2, 3, 4),
    "x",
    (PromptItem("entity", 0, 0, 1), PromptItem("attribute", 0, 1, 2)),
    3,
    (2,),
    ((2,), (5,)),
    0,
    1,
    0,
)


MISFITS = [
    ({"ids": (), "query": -1}, "no tokens"),
    ({"query": 2}, "not its last position 3"),
    ({"items": (PromptItem("entity", 0, 1, 3), PromptItem("attribute", 0, 1, 2))}, "starts before"),
    ({"items": (PromptItem("entity", 0, 0, 1), PromptItem("attribute", 0, 1, 9))}, "beyond its 4 tokens"),
    ({"correct": 2}, "there are 2 candidates"),
    ({"correct": 1}, "is not the answer"),
    ({"candidates": ((2,), (2,))}, "begins another"),
    ({"candidates": ((2,), (2, 7))}, "begins another"),
    ({"candidates": ((2,), ())}, "begins another"),
    ({"answer_item": 2}, "there are 2 items"),
    ({"answer_item": 0}, "does not hold the answer"),
    ({"answer": ()}, "has no answer"),
]


def test_prompts_that_do_not_fit_together(subtests):
    for changes, words in MISFITS:
        with subtests.test(changes=changes), pytest.raises(TextError, match=words):
            dataclasses.replace(GOOD, **changes)
    with pytest.raises(TextError, match="no token"):
        PromptItem("entity", 0, 3, 3)


def test_word_lists():
    for words in (NAMES, THINGS):
        assert len(words) == len({word.lower() for word in words}) >= 256
        assert list(words) == sorted(words)
        assert all(word.isascii() and word.isalpha() for word in words)
    assert not {word.lower() for word in re.findall(r"\w+", SENTENCES)} & {word.lower() for word in (*NAMES, *THINGS)}


@pytest.mark.slow
def test_smollm2_would_spell_the_same_text_the_same_way(smollm2):
    from wherewhat.models.loader import load

    loaded = load(smollm2, device="cpu", offline=True)
    speller = PieceTokenizer.of(loaded.tokenizer, loaded.prefix)
    for kind in ASKING:
        for prompt in make_prompts(kind, speller, tokens=512, count=5):
            check(prompt, speller)
            assert prompt.ids == (*loaded.prefix, *speller.encode(prompt.text))
            assert {len(candidate) for candidate in prompt.candidates} == {1}
    prompt = make_prompts("binding", speller, pairs=256)[0]
    assert {item.end - item.start for item in prompt.items} == {1}
