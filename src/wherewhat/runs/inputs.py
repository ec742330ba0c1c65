"""What a run measures: documents cut to size, prompts for the tokenizer, or questions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wherewhat.errors import ConfigError, TextError
from wherewhat.measures.choices.answers import Choices
from wherewhat.measures.measurement import ChoicesMeasurement, Measurement, Question, QuestionMeasurement, Text
from wherewhat.models.loaded import LoadedModel
from wherewhat.runs.request import Request
from wherewhat.runs.words import with_spans
from wherewhat.text.documents import Document
from wherewhat.text.files import read_documents
from wherewhat.text.prompts.kinds import make_prompts
from wherewhat.text.prompts.prompt import Prompt
from wherewhat.text.prompts.vocabulary import PieceTokenizer
from wherewhat.text.questions import ChoiceItem, read_items


def item_choices(loaded: LoadedModel, item: ChoiceItem, *, beyond: bool = False) -> Choices:
    """An item in tokens, cut between context and alternatives as lm-evaluation-harness does.

    Each alternative is tokenised with its context and is what comes behind as many tokens as the context has by
    itself; white space at the end of the context counts to the alternatives.
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


DEFAULT_DOCUMENTS = 4
"""Embedded documents or prompts used by default: enough for an interval, few enough for a laptop."""


@dataclass(frozen=True)
class Input:
    """One text as a model sees it.

    Attributes:
        document: Its name and text.
        text: The text in tokens.
        question: What is asked at its end, for measurements of answers.
        choices: The question and its alternatives, for measurements of items; the text is then the question's.
    """

    document: Document
    text: Text
    question: Question | None = None
    choices: Choices | None = None


def read_texts(request: Request, measurement: Measurement) -> list[Document]:
    """The documents a request names; none where prompts are made for the model, or items are read for it."""
    makes_own, on_items = (isinstance(measurement, kind) for kind in (QuestionMeasurement, ChoicesMeasurement))
    if makes_own and (request.text is not None or request.prompts is not None):
        raise ConfigError(f"{measurement.name} makes its own texts: leave --text and --prompts out")
    if on_items and (request.text is not None or request.prompts is not None):
        raise ConfigError(f"{measurement.name} is measured on items: leave --text and --prompts out")
    if on_items and request.items is None:
        raise ConfigError(f"{measurement.name} needs --items: a task such as arc_easy or boolq, or a .jsonl file")
    if request.items is not None and not on_items:
        raise ConfigError(f"{measurement.name} is not measured on items: leave --items out")
    if on_items or makes_own or request.prompts is not None:
        return []
    count = request.documents
    if request.text is None and count is None:
        count = max(DEFAULT_DOCUMENTS, measurement.least_documents)
    texts = read_documents(request.text, count=count)
    if len(texts) < (least := measurement.least_documents):
        raise TextError(
            f"{measurement.name} compares documents: at least {least} are needed and 8 or more are better, but "
            f"{len(texts)} is all there is; give more with --text or --documents"
        )
    return texts


def model_inputs(
    request: Request, measurement: Measurement, config: Any, loaded: LoadedModel, texts: Sequence[Document]
) -> list[Input]:
    """The texts in the model's tokens, or the prompts that the request or the measurement asks for."""
    if isinstance(measurement, ChoicesMeasurement):
        assert request.items is not None
        return [_chosen(loaded, item, request) for item in read_items(request.items, count=request.documents)]
    if not isinstance(measurement, QuestionMeasurement) and request.prompts is None:
        return [Input(text, with_spans(loaded, text.text, _encode(loaded, text, request))) for text in texts]
    rows = loaded.model.get_input_embeddings().weight.shape[0]
    tokenizer = PieceTokenizer.of(loaded.tokenizer, loaded.prefix, vocabulary=rows)
    seed = request.model.seed
    if not isinstance(measurement, QuestionMeasurement):
        assert request.prompts is not None
        count = request.documents or DEFAULT_DOCUMENTS
        named = [
            (p.name, p) for p in make_prompts(request.prompts, tokenizer, tokens=request.tokens, count=count, seed=seed)
        ]
    else:
        named = [
            (f"{made.name}-{number}", prompt)
            for made in measurement.prompts(config)
            for number, prompt in enumerate(
                make_prompts(made.kind, tokenizer, count=made.count, seed=seed, **made.options), 1
            )
        ]
    for _, prompt in named:
        loaded.check_length(len(prompt.ids), allow_beyond=request.beyond)
    return [_input(loaded, name, prompt) for name, prompt in named]


def _input(loaded: LoadedModel, name: str, prompt: Prompt) -> Input:
    ids = torch.tensor(prompt.ids, dtype=torch.int64)
    document = Document(name, prompt.text, f"{prompt.kind} prompts")
    text = with_spans(loaded, prompt.text, ids)
    if not prompt.asks:
        return Input(document, text)
    role = prompt.items[prompt.answer_item].role
    # Items of solved examples are not among the alternatives: those come with the answer's own role, once a group.
    alternatives = [item for item in prompt.items if item.role == role]
    place = alternatives.index(prompt.items[prompt.answer_item])
    question = Question(
        ids=text.ids,
        candidates=prompt.candidates,
        correct=prompt.correct,
        kind=prompt.kind,
        size=len(alternatives),
        place=place / max(1, len(alternatives) - 1),
    )
    return Input(document, text, question)


def _chosen(loaded: LoadedModel, item: ChoiceItem, request: Request) -> Input:
    choices = item_choices(loaded, item, beyond=request.beyond)
    # Alternatives and which is right are part of what the numbers depend on.
    return Input(Document(item.name, item.text, item.source), choices.context, choices=choices)


def _encode(loaded: LoadedModel, text: Document, request: Request) -> Tensor:
    try:
        return loaded.encode(text.text, tokens=request.tokens, allow_beyond=request.beyond)
    except TextError as error:
        raise TextError(f"document '{text.name}': {error}") from error
