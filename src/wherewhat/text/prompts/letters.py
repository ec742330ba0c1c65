"""Letters, the one-hop Retrieval task: letters with digits, and a question for the digit of one letter.

The letter task of Urrutia et al., 2026 (arXiv 2605.31558) in words. Symbols decide, places do not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from wherewhat.text.prompts.draft import Draft
from wherewhat.text.prompts.fitting import Task, fitted
from wherewhat.text.prompts.options import check_whole
from wherewhat.text.prompts.pool import Pool, Word
from wherewhat.text.prompts.speller import Speller
from wherewhat.text.prompts.symbols import BIGRAMS, DIGITS, LETTERS

KIND = "letters"


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
            kind=KIND,
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
