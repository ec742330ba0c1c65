"""Numbers, the one-hop Index task: a number says how many places back the answer is.

The number task of Urrutia et al., 2026 (arXiv 2605.31558) in words. Places decide, symbols do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from wherewhat.text.prompts.draft import Draft
from wherewhat.text.prompts.fitting import Task, fitted
from wherewhat.text.prompts.options import check_whole
from wherewhat.text.prompts.pool import Pool, Word
from wherewhat.text.prompts.speller import Speller
from wherewhat.text.prompts.symbols import BIGRAMS, LETTERS

KIND = "numbers"

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
            kind=KIND,
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
