"""The kinds of prompts: binding, letters, numbers and random tokens."""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.options import check_integer, nearest
from wherewhat.text.prompts.prompt import (
    SMALLEST,
    UNLIMITED,
    Prompt,
    PromptBuilder,
    PromptItem,
    PromptTask,
    generator,
)
from wherewhat.text.prompts.vocabulary import BIGRAMS, DIGITS, LETTERS, NAMES, THINGS, PieceTokenizer, Pool, Word

_ENOUGH_SYMBOLS = 10
"""Number of single-token symbols from which longer ones are not used."""


def _option(default: int | None, least: int, text: str) -> Any:
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True)
class PromptKind(ABC):
    """Options of a kind of prompt: fields with a default, a ``help`` and a ``least`` value."""

    def __post_init__(self) -> None:
        """Refuse values below the least one."""
        for option in dataclasses.fields(self):
            least, optional = option.metadata["least"], option.default is None
            check_integer(option.name, getattr(self, option.name), least=least, optional=optional)

    @abstractmethod
    def builders(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """Return ``count`` prompts of at most ``tokens`` tokens."""


@dataclass(frozen=True)
class Binding(PromptKind):
    """Entity–attribute pairs, all different, and a question about one entity."""

    pairs: int | None = _option(None, SMALLEST, "number of pairs; as many as fit if not given")
    index_answer: int | None = _option(None, 0, "which pair is asked for, from 0; all in turn")

    def builders(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """See :meth:`PromptKind.builders`."""
        names, things = Pool.of(tokenizer, NAMES), Pool.of(tokenizer, THINGS)

        def write(pairs: int, asked: int, rng: random.Random) -> PromptBuilder:
            entities, attributes = names.draw(rng, pairs), things.draw(rng, pairs)
            builder = PromptBuilder(tokenizer)
            builder.add_text("Here is what everybody likes:")
            items = []
            for group in range(pairs):
                builder.add_pool_item(names, entities[group], "entity", group)
                builder.add_text(" likes")
                items.append(builder.add_pool_item(things, attributes[group], "attribute", group))
                builder.add_text("." if group + 1 < pairs else ".\nQuestion: what does")
            builder.add_pool_item(names, entities[asked], "question", asked)
            builder.add_text(" like?\nAnswer:")
            builder.add_pool_item(names, entities[asked], "question", asked)
            builder.add_text(" likes")
            builder.set_question(things, attributes, correct=asked, answer_item=items[asked])
            return builder

        largest = min(len(names.words), len(things.words))
        task = PromptTask("binding", "pairs", self.pairs, 16, largest, self.index_answer, write)
        return task.fitted(tokenizer, tokens=tokens, count=count, seed=seed)


@dataclass(frozen=True)
class Letters(PromptKind):
    """Pairs of a symbol and a digit, and one of the symbols again.

    Symbols are letters, or also pairs of letters if there are not enough letters. Every symbol occurs once, solved
    examples included, so that only one position holds the answer. Digits occur about equally often.
    """

    pairs: int | None = _option(None, SMALLEST, "number of pairs; as many as fit if not given")
    shots: int = _option(3, 0, "solved examples in front")
    shot_length: int = _option(12, SMALLEST, "pairs in an example, if there are not fewer")
    index_answer: int | None = _option(None, 0, "which pair is asked for, from 0; all in turn")

    def builders(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """See :meth:`PromptKind.builders`."""
        letters = Pool.of(tokenizer, LETTERS, answers=False)
        symbols = Pool.of(tokenizer, (*LETTERS, *BIGRAMS), answers=False)
        digits = Pool.of(tokenizer, DIGITS, after="")

        def write(pairs: int, asked: int, rng: random.Random) -> PromptBuilder:
            shown = min(pairs, self.shot_length)
            needed = pairs + self.shots * shown
            pool = letters if needed <= len(letters.words) else symbols
            keys = pool.draw(rng, needed)
            builder = PromptBuilder(tokenizer)

            def add_pairs(keys: list[Word], values: list[Word], asked: int) -> None:
                for group, (key, value) in enumerate(zip(keys, values, strict=True)):
                    builder.add_pool_item(pool, key, "letter", group)
                    builder.add_text("=")
                    builder.add_pool_item(digits, value, "digit", group)
                builder.add_text(". Ask:")
                builder.add_pool_item(pool, keys[asked], "question", asked)
                builder.add_text("=")

            builder.add_text("Pairs:")
            for shot in range(self.shots):
                example, keys = keys[:shown], keys[shown:]
                values = digits.draw_lists(rng, shown)
                index = rng.randrange(shown)
                start = len(builder.ids)
                add_pairs(example, values, index)
                builder.add_pool_item(digits, values[index], "digit", index)
                builder.merge_example(shot, start)
                builder.add_text("\nPairs:")
            first = len(builder.items)
            values = digits.draw_lists(rng, pairs)
            add_pairs(keys, values, asked)
            correct = digits.words.index(values[asked])
            builder.set_question(digits, digits.words, correct=correct, answer_item=first + 2 * asked + 1)
            return builder

        # As many pairs as there are symbols for, those of the examples counted, which are no longer than the list.
        equal = len(symbols.words) // (self.shots + 1)
        largest = max(min(equal, self.shot_length), len(symbols.words) - self.shots * self.shot_length)
        largest = largest if len(digits.words) > 1 else 0
        task = PromptTask("letters", "pairs", self.pairs, 12, largest, self.index_answer, write)
        return task.fitted(tokenizer, tokens=tokens, count=count, seed=seed)


@dataclass(frozen=True)
class Numbers(PromptKind):
    """A list of symbols and a number m; the answer is the m-th symbol from the right.

    Symbols are letters, or also pairs of letters if there are not enough letters. They are all different, those of the
    examples included, if the tokenizer has enough of a single token.
    """

    length: int | None = _option(None, SMALLEST, "symbols in the list; as many as fit if not given")
    shots: int = _option(3, 0, "solved examples in front")
    shot_length: int = _option(12, SMALLEST, "symbols in an example, if the list is not shorter")
    index_answer: int | None = _option(None, 0, "which symbol is asked for, from 0; all in turn")

    def builders(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """See :meth:`PromptKind.builders`."""
        letters = Pool.of(tokenizer, LETTERS)
        # A symbol's index is its distance in tokens only if every symbol is one token: repetition is preferred.
        symbols = Pool.of(tokenizer, (*LETTERS, *BIGRAMS)).of_one_token(least=_ENOUGH_SYMBOLS)

        def write(length: int, asked: int, rng: random.Random) -> PromptBuilder:
            shown = min(length, self.shot_length)
            pool = letters if length + self.shots * shown <= len(letters.words) else symbols
            drawn = pool.draw_lists(rng, self.shots * shown, length)
            builder = PromptBuilder(tokenizer)

            def add_list(listed: list[Word], asked: int) -> None:
                for group, symbol in enumerate(listed):
                    builder.add_pool_item(pool, symbol, "letter", group)
                builder.add_text(". Go back")
                number = f" {len(listed) - asked}"
                builder.add_item(Word(number, tokenizer.encode_piece(number)), "number", asked)
                builder.add_text(":")

            builder.add_text("List:")
            for shot in range(self.shots):
                example, drawn = drawn[:shown], drawn[shown:]
                index = rng.randrange(shown)
                start = len(builder.ids)
                add_list(example, index)
                builder.add_pool_item(pool, example[index], "letter", index)
                builder.merge_example(shot, start)
                builder.add_text(".\nList:")
            first = len(builder.items)
            add_list(drawn, asked)
            candidates = list(dict.fromkeys(drawn))
            correct = candidates.index(drawn[asked])
            builder.set_question(pool, candidates, correct=correct, answer_item=first + asked)
            return builder

        largest = UNLIMITED if len(symbols.words) > 1 else len(symbols.words)
        task = PromptTask("numbers", "length", self.length, 12, largest, self.index_answer, write)
        return task.fitted(tokenizer, tokens=tokens, count=count, seed=seed)


@dataclass(frozen=True)
class RandomTokens(PromptKind):
    """Ordinary tokens in random order, without repetition while the vocabulary suffices.

    With ``repeat`` 2 the same block occurs twice, as induction scores need it. Tokens that do not divide into blocks
    are put in front and drawn in the same way.
    """

    repeat: int = _option(1, 1, "how often the same random block comes, one after the other")

    def builders(self, tokenizer: PieceTokenizer, *, tokens: int | None, count: int, seed: int) -> list[PromptBuilder]:
        """Return ``count`` prompts of exactly ``tokens`` tokens."""
        smallest = len(tokenizer.prefix) + self.repeat
        if tokens is None:
            raise ConfigError("random prompts have no default length: give tokens")
        if tokens < smallest:
            raise ConfigError(f"tokens is {tokens}: random prompts with repeat {self.repeat} need at least {smallest}")
        ordinary = [index for index in range(tokenizer.vocabulary) if index not in tokenizer.special]
        if not ordinary:
            raise ConfigError("this tokenizer has nothing but special tokens: use another model")
        block, spare = divmod(tokens - len(tokenizer.prefix), self.repeat)

        def build(number: int) -> PromptBuilder:
            rng = generator("random", seed, number)
            drawn: list[int] = []
            while len(drawn) < block + spare:
                drawn += rng.sample(ordinary, min(len(ordinary), block + spare - len(drawn)))
            ids = (*drawn[:spare], *drawn[spare:] * self.repeat)
            builder = PromptBuilder(tokenizer)
            builder.add_word(Word(tokenizer.decode(ids), ids))
            for copy in range(self.repeat):
                start = spare + copy * block
                builder.items.append(PromptItem("block", copy, start, start + block))
            return builder

        return [build(number) for number in range(count)]


KINDS: dict[str, type[PromptKind]] = {
    "binding": Binding,
    "numbers": Numbers,
    "letters": Letters,
    "random": RandomTokens,
}
"""Kinds of prompts by name."""


def make_prompts(
    kind: str, tokenizer: PieceTokenizer, *, tokens: int | None = None, count: int = 1, seed: int = 0, **options: Any
) -> list[Prompt]:
    """Return prompts with known key items, the same for the same arguments.

    Args:
        kind: ``"binding"``, ``"numbers"``, ``"letters"`` or ``"random"``.
        tokenizer: The tokenizer.
        tokens: Exact number of tokens of each prompt, the model's prefix included. As many pairs or symbols as fit are
            used, or as many as the options specify, with neutral text in front. None for no filler.
        count: Number of prompts. Answers are at every position about equally often.
        seed: Seed of the prompts.
        **options: Options of the kind; see `KINDS`.
    """
    check_integer("tokens", tokens, least=1, optional=True)
    check_integer("count", count, least=1)
    check_integer("seed", seed, least=0)
    if kind not in KINDS:
        raise ConfigError(f"there is no kind of prompt '{kind}': {nearest(kind, KINDS)}")
    known = [option.name for option in dataclasses.fields(KINDS[kind])]
    for name in options:
        if name not in known:
            raise ConfigError(f"{kind} prompts have no option '{name}': {nearest(name, known)}")
    built = KINDS[kind](**options).builders(tokenizer, tokens=tokens, count=count, seed=seed)
    return [
        builder.build(name=f"{kind}-{number}", kind=kind, seed=seed, tokens=tokens)
        for number, builder in enumerate(built, start=1)
    ]
