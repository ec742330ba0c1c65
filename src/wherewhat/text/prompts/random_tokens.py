"""Random tokens: text without meaning, once or repeated, and no question."""

from __future__ import annotations

from dataclasses import dataclass, field

from wherewhat.errors import ConfigError
from wherewhat.text.prompts.draft import Draft
from wherewhat.text.prompts.fitting import generator
from wherewhat.text.prompts.options import check_whole
from wherewhat.text.prompts.pool import Word
from wherewhat.text.prompts.prompt import Item
from wherewhat.text.prompts.speller import Speller

KIND = "random"


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
        """``count`` drafts of exactly ``tokens`` tokens.

        Raises:
            ConfigError: If no number of tokens is given, or too small a one.
        """
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
        rng = generator(KIND, seed, index)
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
