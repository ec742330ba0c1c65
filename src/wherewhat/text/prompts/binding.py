"""Binding: who likes what, and a question about one of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from wherewhat.text.prompts.draft import Draft
from wherewhat.text.prompts.fitting import Task, fitted
from wherewhat.text.prompts.options import check_whole
from wherewhat.text.prompts.pool import Pool
from wherewhat.text.prompts.speller import Speller
from wherewhat.text.prompts.words import NAMES, THINGS

KIND = "binding"


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
            kind=KIND,
            option="pairs",
            size=self.pairs,
            default=16,
            smallest=2,
            largest=min(len(names.words), len(things.words)),
            place=self.index_answer,
            write=write,
        )
        return fitted(task, speller, tokens=tokens, count=count, seed=seed)
