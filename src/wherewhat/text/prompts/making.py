"""Prompts of any kind by name."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError
from wherewhat.text.prompts import binding, letters, numbers, random_tokens
from wherewhat.text.prompts.draft import Draft
from wherewhat.text.prompts.options import check_whole
from wherewhat.text.prompts.prompt import Prompt
from wherewhat.text.prompts.speller import Speller


class Kind(Protocol):
    """Options of a kind of prompt, which can write it."""

    def drafts(self, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
        """``count`` drafts of at most ``tokens`` tokens."""


KINDS: dict[str, type[Any]] = {
    binding.KIND: binding.Binding,
    numbers.KIND: numbers.Numbers,
    letters.KIND: letters.Letters,
    random_tokens.KIND: random_tokens.RandomTokens,
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

    Raises:
        ConfigError: If the kind or an option is unknown or out of range, or ``tokens`` too small.
        TextError: If the tokenizer cannot spell English.
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
