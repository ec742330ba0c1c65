"""The kinds of prompts: binding, letters, numbers and random tokens."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from wherewhat.errors import ConfigError
from wherewhat.options import nearest
from wherewhat.text.prompts.fit import Task, check_whole, fitted, generator
from wherewhat.text.prompts.prompt import Draft, Item, Prompt
from wherewhat.text.prompts.vocabulary import BIGRAMS, DIGITS, LETTERS, NAMES, THINGS, Pool, Speller, Word

BINDING = "binding"


@dataclass(frozen=True)
class Binding:
    """Options of the binding task: k entity–attribute pairs, all different, and a question about one entity."""

    pairs: int | None = field(default=None, metadata={"help": "number of pairs; as many as fit if not given"})
    index_answer: int | None = field(default=None, metadata={"help": "which pair is asked for, from 0; all in turn"})

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("pairs", self.pairs, least=2, optional=True)
        check_whole("index_answer", self.index_answer, least=0, optional=True)

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of at most ``tokens`` tokens."""
        names, things = Pool.of(speller, NAMES), Pool.of(speller, THINGS)

        def write(pairs: int, asked: int, rng: random.Random) -> Draft:
            who, what = names.draw(rng, pairs), things.draw(rng, pairs)
            draft = Draft(speller)
            draft.say("Here is what everybody likes:")
            held = []
            for group in range(pairs):
                draft.item(who[group], "entity", group, pool=names)
                draft.say(" likes")
                held.append(draft.item(what[group], "attribute", group, pool=things))
                draft.say("." if group + 1 < pairs else ".\nQuestion: what does")
            draft.item(who[asked], "question", asked, pool=names)
            draft.say(" like?\nAnswer:")
            draft.item(who[asked], "question", asked, pool=names)
            draft.say(" likes")
            draft.ask(what, correct=asked, answer_item=held[asked], pool=things)
            return draft

        task = Task(
            kind=BINDING,
            option="pairs",
            size=self.pairs,
            default=16,
            smallest=2,
            largest=min(len(names.words), len(things.words)),
            place=self.index_answer,
            write=write,
        )
        return fitted(task, speller, tokens=tokens, count=count, seed=seed)


LETTER_LISTS = "letters"


@dataclass(frozen=True)
class Letters:
    """Options of the letter task: pairs of a symbol and a digit, and one of the symbols again.

    Symbols are letters, and pairs of letters where letters do not go round. None comes twice, in the examples
    neither: what is bound to the symbol asked for stands in one place. Digits come about equally often.
    """

    pairs: int | None = field(default=None, metadata={"help": "number of pairs; as many as fit if not given"})
    shots: int = field(default=3, metadata={"help": "solved examples in front"})
    shot_length: int = field(default=12, metadata={"help": "pairs in an example, if there are not fewer"})
    index_answer: int | None = field(default=None, metadata={"help": "which pair is asked for, from 0; all in turn"})

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("pairs", self.pairs, least=2, optional=True)
        check_whole("shots", self.shots, least=0)
        check_whole("shot_length", self.shot_length, least=2)
        check_whole("index_answer", self.index_answer, least=0, optional=True)

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of at most ``tokens`` tokens."""
        letters = Pool.of(speller, LETTERS, answers=False)
        symbols = Pool.of(speller, (*LETTERS, *BIGRAMS), answers=False)
        digits = Pool.of(speller, DIGITS, after="")

        def write(pairs: int, asked: int, rng: random.Random) -> Draft:
            shown = min(pairs, self.shot_length)
            needed = pairs + self.shots * shown
            pool = letters if needed <= len(letters.words) else symbols
            keys = pool.draw(rng, needed)
            draft = Draft(speller)
            draft.say("Pairs:")
            for shot in range(self.shots):
                there, keys = keys[:shown], keys[shown:]
                values = digits.draw_again(rng, shown)
                place = rng.randrange(shown)
                start = len(draft.ids)
                _pairs(draft, there, values, place, pool, digits)
                draft.item(values[place], "digit", place, pool=digits)
                draft.example(shot, start)
                draft.say("\nPairs:")
            first = len(draft.items)
            values = digits.draw_again(rng, pairs)
            _pairs(draft, keys, values, asked, pool, digits)
            draft.ask(
                digits.words,
                correct=digits.words.index(values[asked]),
                answer_item=first + 2 * asked + 1,
                pool=digits,
            )
            return draft

        task = Task(
            kind=LETTER_LISTS,
            option="pairs",
            size=self.pairs,
            default=12,
            smallest=2,
            largest=self._largest(len(symbols.words)) if len(digits.words) > 1 else 0,
            place=self.index_answer,
            write=write,
        )
        return fitted(task, speller, tokens=tokens, count=count, seed=seed)

    def _largest(self, symbols: int) -> int:
        """The most pairs for which there are symbols, those of the examples counted."""
        short = symbols // (self.shots + 1)  # examples as long as the list itself
        return max(min(short, self.shot_length), symbols - self.shots * self.shot_length)


def _pairs(draft: Draft, keys: list[Word], values: list[Word], asked: int, keys_of: Pool, values_of: Pool) -> None:
    for group, (key, value) in enumerate(zip(keys, values, strict=True)):
        draft.item(key, "letter", group, pool=keys_of)
        draft.say("=")
        draft.item(value, "digit", group, pool=values_of)
    draft.say(". Ask:")
    draft.item(keys[asked], "question", asked, pool=keys_of)
    draft.say("=")


NUMBER_LISTS = "numbers"

_ENOUGH = 10
"""Symbols of a single token that are enough to do without longer ones."""


@dataclass(frozen=True)
class Numbers:
    """Options of the number task: a list of symbols and a number m; the answer is the m-th symbol to its left.

    Symbols are letters, and pairs of letters where letters do not go round. They are all different, those of the
    examples too, as long as the tokenizer has enough of a single token.
    """

    length: int | None = field(default=None, metadata={"help": "symbols in the list; as many as fit if not given"})
    shots: int = field(default=3, metadata={"help": "solved examples in front"})
    shot_length: int = field(default=12, metadata={"help": "symbols in an example, if the list is not shorter"})
    index_answer: int | None = field(default=None, metadata={"help": "which symbol is asked for, from 0; all in turn"})

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("length", self.length, least=2, optional=True)
        check_whole("shots", self.shots, least=0)
        check_whole("shot_length", self.shot_length, least=2)
        check_whole("index_answer", self.index_answer, least=0, optional=True)

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of at most ``tokens`` tokens."""
        letters = Pool.of(speller, LETTERS)
        # Counting places is counting tokens only where every symbol is one: better symbols again than longer ones.
        symbols = Pool.of(speller, (*LETTERS, *BIGRAMS)).of_one_token(least=_ENOUGH)

        def write(length: int, asked: int, rng: random.Random) -> Draft:
            shown = min(length, self.shot_length)
            pool = letters if length + self.shots * shown <= len(letters.words) else symbols
            drawn = pool.draw_again(rng, self.shots * shown, length)
            draft = Draft(speller)
            draft.say("List:")
            for shot in range(self.shots):
                there, drawn = drawn[:shown], drawn[shown:]
                place = rng.randrange(shown)
                start = len(draft.ids)
                _list(draft, there, place, pool)
                draft.item(there[place], "letter", place, pool=pool)
                draft.example(shot, start)
                draft.say(".\nList:")
            first = len(draft.items)
            _list(draft, drawn, asked, pool)
            candidates = list(dict.fromkeys(drawn))
            draft.ask(candidates, correct=candidates.index(drawn[asked]), answer_item=first + asked, pool=pool)
            return draft

        task = Task(
            kind=NUMBER_LISTS,
            option="length",
            size=self.length,
            default=12,
            smallest=2,
            largest=None if len(symbols.words) > 1 else len(symbols.words),
            place=self.index_answer,
            write=write,
        )
        return fitted(task, speller, tokens=tokens, count=count, seed=seed)


def _list(draft: Draft, symbols: list[Word], asked: int, pool: Pool) -> None:
    for group, symbol in enumerate(symbols):
        draft.item(symbol, "letter", group, pool=pool)
    draft.say(". Go back")
    draft.say_item(f" {len(symbols) - asked}", "number", asked)
    draft.say(":")


RANDOM_TOKENS = "random"


@dataclass(frozen=True)
class RandomTokens:
    """Options of random tokens: ordinary ones in random order, each once as long as the vocabulary lasts.

    With ``repeat`` 2 the same block comes twice, as induction scores need it. Tokens that do not divide into blocks
    stand in front, as random as the others.
    """

    repeat: int = field(default=1, metadata={"help": "how often the same random block comes, one after the other"})

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        check_whole("repeat", self.repeat, least=1)

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of exactly ``tokens`` tokens."""
        smallest = len(speller.prefix) + self.repeat
        if tokens is None:
            raise ConfigError("random prompts have no length of their own: give tokens")
        if tokens < smallest:
            raise ConfigError(f"tokens is {tokens}: random prompts with repeat {self.repeat} need at least {smallest}")
        ordinary = [index for index in range(speller.vocabulary) if index not in speller.special]
        if not ordinary:
            raise ConfigError("this tokenizer has nothing but special tokens: use another model")
        block, spare = divmod(tokens - len(speller.prefix), self.repeat)
        return [self._draft(speller, ordinary, block, spare, seed, index) for index in range(count)]

    def _draft(self, speller: Speller, ordinary: list[int], block: int, spare: int, seed: int, index: int) -> Draft:
        rng = generator(RANDOM_TOKENS, seed, index)
        drawn: list[int] = []
        while len(drawn) < block + spare:
            drawn += rng.sample(ordinary, min(len(ordinary), block + spare - len(drawn)))
        ids = (*drawn[:spare], *drawn[spare:] * self.repeat)
        draft = Draft(speller)
        draft.add(Word(speller.decode(ids), ids))
        for copy in range(self.repeat):
            start = spare + copy * block
            draft.items.append(Item("block", copy, start, start + block))
        return draft


class Kind(Protocol):
    """Options of a kind of prompt, which can write it."""

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of at most ``tokens`` tokens."""


KINDS: dict[str, type[Any]] = {
    BINDING: Binding,
    NUMBER_LISTS: Numbers,
    LETTER_LISTS: Letters,
    RANDOM_TOKENS: RandomTokens,
}
"""Kinds of prompts by name: frozen dataclasses of their options, each with a default and a ``help``."""


def make(
    kind: str,
    speller: Speller,
    *,
    tokens: int | None = None,
    count: int = 1,
    seed: int = 0,
    **options: Any,
) -> list[Prompt]:
    """Prompts with known key items, the same for the same arguments.

    Args:
        kind: ``"binding"``, ``"numbers"``, ``"letters"`` or ``"random"``.
        speller: The tokenizer.
        tokens: Exact number of tokens of each prompt, the model's prefix included. As many pairs or symbols as fit
            are used, or as many as the options say, and neutral text in front fills the rest. None for no filler.
        count: How many. Answers are in every place about equally often.
        seed: Another seed, other prompts.
        **options: Options of the kind; see `KINDS`.
    """
    check_whole("tokens", tokens, least=1, optional=True)
    check_whole("count", count, least=1)
    check_whole("seed", seed, least=0)
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of prompt '{kind}': {nearest(kind, KINDS)}")
    known = [field.name for field in dataclasses.fields(KINDS[kind])]
    for name in options:
        if name not in known:
            raise ConfigError(f"{kind} prompts have no option '{name}': {nearest(name, known)}")
    task: Kind = KINDS[kind](**options)
    drafts = task.drafts(speller, tokens=tokens, count=count, seed=seed)
    return [
        draft.prompt(name=f"{kind}-{number}", kind=kind, seed=seed, tokens=tokens)
        for number, draft in enumerate(drafts, start=1)
    ]
