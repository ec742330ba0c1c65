"""A question with alternatives in a model's tokens."""

from __future__ import annotations

import hashlib

from wherewhat.errors import ConfigError, TextError
from wherewhat.evaluate.items import Item
from wherewhat.measure.choices.answering import Choices
from wherewhat.models import LoadedModel
from wherewhat.pipeline.spans import with_spans


def item_choices(loaded: LoadedModel, item: Item, *, beyond: bool = False) -> Choices:
    """An item in tokens, cut between context and alternatives as lm-evaluation-harness does.

    Each alternative is tokenised with its context and is what comes behind as many tokens as the context has by
    itself; white space at the end of the context counts to the alternatives.

    Raises:
        TextError: If the item gives no tokens.
        ConfigError: If it has more tokens than the model has positions.
    """
    context = item.context.rstrip()
    space = item.context[len(context) :]
    try:
        ids = loaded.encode(context, allow_beyond=beyond)
        whole = [loaded.encode(context + space + text, allow_beyond=beyond).tolist() for text in item.continuations]
    except (TextError, ConfigError) as error:
        raise type(error)(f"item '{item.name}': {error}") from error
    continuations = tuple(tuple(tokens[len(ids) :]) for tokens in whole)
    if not all(continuations):
        number = [bool(tokens) for tokens in continuations].index(False)
        raise TextError(f"item '{item.name}': alternative {number + 1} has no tokens of its own; leave the item out")
    return Choices(
        context=with_spans(loaded, context, ids),
        continuations=continuations,
        lengths=tuple(len(text.removeprefix(" ")) for text in item.continuations),
        gold=item.gold,
        blank=blank(loaded),
        seed=text_seed(context),
    )


def blank(loaded: LoadedModel) -> tuple[int, ...]:
    """Tokens that stand for no text: what the model puts in front of one, else BOS or EOS; empty if it has none."""
    named = (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id)
    return loaded.prefix or tuple(token for token in named if token is not None)[:1]


def text_seed(text: str) -> int:
    """A number for a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:5], "big")
