"""Fit as many pairs or symbols into a prompt as its length allows, with balanced answer positions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.text.prompts.prompt import Draft
from wherewhat.text.prompts.vocabulary import Speller


def check_whole(name: str, value: object, *, least: int, optional: bool = False) -> None:
    """Refuse what is not a whole number of at least ``least``, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: give a whole number")
    if value < least:
        raise ConfigError(f"{name} is {value}: at least {least} is needed")


@dataclass(frozen=True)
class Task:
    """A kind of prompt with a question, for one tokenizer.

    Attributes:
        kind: The kind.
        option: Name of the option that sets its size.
        size: The size asked for; None for as much as fits.
        default: Size where neither it nor a number of tokens is asked for.
        smallest: Smallest size that makes sense.
        largest: Largest size the tokenizer allows; None where there is none.
        place: Which pair or symbol to ask for, from 0; None for all in turn.
        write: Writes the draft of a given size that asks for a given place.
    """

    kind: str
    option: str
    size: int | None
    default: int
    smallest: int
    largest: int | None
    place: int | None
    write: Callable[[int, int, random.Random], Draft]


def fitted(task: Task, speller: Speller, *, tokens: int | None, count: int, seed: int) -> list[Draft]:
    """Drafts of one size, none longer than ``tokens`` with the model's prefix."""
    _check_size(task)
    smallest = max(task.smallest, 0 if task.place is None else task.place + 1)
    if task.size is not None or tokens is None:
        usual = task.default if task.largest is None else min(task.default, task.largest)
        size = max(smallest, usual) if task.size is None else task.size
        drafts = _drafts(task, size, count, seed)
        _check_room(task, drafts, size, speller, tokens)
        return drafts
    room = tokens - len(speller.prefix)
    _check_room(task, _drafts(task, smallest, count, seed), smallest, speller, tokens)
    # One prompt tells how much fits; where words differ in length, the others may need a little less.
    size = _largest_fitting(task, smallest, room, seed)
    while size > smallest:
        drafts = _drafts(task, size, count, seed)
        longest = max(len(draft.ids) for draft in drafts)
        if longest <= room:
            return drafts
        each = longest / size
        size = max(smallest, size - max(1, int((longest - room) / each)))
    return _drafts(task, smallest, count, seed)


def balanced(size: int, count: int, rng: random.Random) -> list[int]:
    """``count`` places from 0 to ``size - 1`` in random order, each as often as any other, within one.

    What is left over from full rounds is spread evenly over the places.
    """
    rounds, rest = divmod(count, size)
    places = list(range(size)) * rounds
    places += [rng.randrange(part * size // rest, (part + 1) * size // rest) for part in range(rest)]
    rng.shuffle(places)
    return places


def generator(kind: str, seed: int, what: int | str) -> random.Random:
    """Random numbers of their own for each prompt: the first prompts do not depend on how many follow."""
    return random.Random(f"{kind} {seed} {what}")  # noqa: S311 - reproducible, not secret


def _drafts(task: Task, size: int, count: int, seed: int) -> list[Draft]:
    rng = generator(task.kind, seed, "places")
    places = balanced(size, count, rng) if task.place is None else [task.place] * count
    return [task.write(size, place, generator(task.kind, seed, index)) for index, place in enumerate(places)]


def _largest_fitting(task: Task, low: int, room: int, seed: int) -> int:
    """The largest size whose first prompt has at most ``room`` tokens, by doubling and halving."""

    def fits(size: int) -> bool:
        return len(_drafts(task, size, 1, seed)[0].ids) <= room

    high = low + 1
    while (task.largest is None or high <= task.largest) and fits(high):
        low, high = high, 2 * high
    if task.largest is not None:
        high = min(high, task.largest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_size(task: Task) -> None:
    name, size = task.option, task.size
    if task.largest is not None and task.largest < task.smallest:
        raise ConfigError(
            f"this tokenizer tells only {task.largest} words apart that {task.kind} prompts could use, "
            f"of at least {task.smallest}: use a model whose tokenizer knows English"
        )
    if size is not None and size < task.smallest:
        raise ConfigError(f"{name} is {size}: {task.kind} prompts need at least {task.smallest}")
    if task.largest is not None and size is not None and size > task.largest:
        raise ConfigError(f"{name} is {size}: with this tokenizer, {task.kind} prompts have at most {task.largest}")
    limit = task.largest if size is None else size
    if task.place is not None and (task.place < 0 or (limit is not None and task.place >= limit)):
        last = "" if limit is None else f" to {limit - 1}"
        raise ConfigError(f"index_answer is {task.place}: choose from 0{last}")


def _check_room(task: Task, drafts: list[Draft], size: int, speller: Speller, tokens: int | None) -> None:
    needed = len(speller.prefix) + max(len(draft.ids) for draft in drafts)
    if tokens is not None and needed > tokens:
        raise ConfigError(
            f"tokens is {tokens}: {task.kind} prompts with {task.option} {size} need at least {needed} tokens"
        )
