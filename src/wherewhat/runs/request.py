"""Requests: one measurement of one model on some texts; and their texts in the tokens of the model."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import MOST_DOCUMENTS, MOST_TOKENS, check_at_most
from wherewhat.errors import ConfigError, TextError
from wherewhat.measures.measurement import (
    Choices,
    ChoicesMeasurement,
    Measurement,
    Question,
    QuestionMeasurement,
    Spans,
    Text,
)
from wherewhat.models.source import Weights, not_loaded, torch_name
from wherewhat.options import check_seed, checked, flag_of, nearest, option
from wherewhat.text.documents import Document, check_count, documents_of, read_documents

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.models.loaded import Encoder, LoadedModel
    from wherewhat.text.prompts.prompt import Prompt
    from wherewhat.text.questions import ChoiceItem


@checked(model=not_loaded, device=torch_name, dtype=torch_name)
@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model and how to load it; the fields are those of :func:`wherewhat.load`.

    The help of each field is that of its command-line option. A new loader option is a field here and its use in
    :mod:`wherewhat.models.loader`.
    """

    model: str | os.PathLike[str] = option(
        "smollm2", "smollm2 (embedded), a Hugging Face id, a folder (model or LoRA adapter), or a .gguf file."
    )
    weights: Weights = option(
        "trained", "trained, random (freshly initialised) or shuffled (query and key entries permuted)."
    )
    seed: int = option(0, "Seed of the control models, and of prompts.")
    device: str = option("auto", "auto, cpu, cuda or cuda:N.")
    dtype: str = option("float32", "float32, bfloat16, float16 or float64.")
    device_map: str | None = option(None, "auto distributes a model over several GPUs (needs accelerate).")
    offline: bool = option(False, "Do not access the network.")
    trust_remote_code: bool = option(False, "Run the model's own Python code.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face model.")
    attn_implementation: str | None = option(
        None, "sdpa, eager or another implementation of transformers (default: the model's)."
    )

    def __post_init__(self) -> None:
        """Check the seed."""
        check_seed(self.seed, "--seed")


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """A model in memory: measured as it is, or a control model made from it.

    Attributes:
        module: A causal language model of transformers, without wrappers.
        tokenizer: Its tokenizer; None if only token ids are measured.
        model: Name in tables and of run directories; by default the one it was loaded by, or its class.
        weights: ``trained`` for the model as it is, else the control model to make from it.
        seed: Seed of control models, and of prompts.
        loaded: The same model as :func:`wherewhat.load` returned it, which knows its source and the tokens that it puts
            in front of texts. Its weights are hashed like those of other models, since they may have been changed.
    """

    module: Any
    tokenizer: Any = None
    model: str = ""
    weights: Weights = "trained"
    seed: int = 0
    loaded: LoadedModel | None = None

    def __post_init__(self) -> None:
        """Name the model and check that the tokenizer can be its own."""
        from wherewhat.models.loaded import model_name
        from wherewhat.models.memory import check_tokenizer

        if not self.model:
            object.__setattr__(self, "model", model_name(self.module))
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, self.module)

    @property
    def attn_implementation(self) -> str | None:
        """The attention implementation that the model uses."""
        return getattr(self.module.config, "_attn_implementation", None)

    @property
    def revision(self) -> None:
        """None: a model in memory has no revision."""

    def __eq__(self, other: object) -> bool:
        """Compare by identity of model and tokenizer."""
        return isinstance(other, MemoryModel) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return id(self.module), id(self.tokenizer), self.model, self.weights, self.seed


def model_request(model: Any, tokenizer: Any = None) -> Any:
    """Return a model as a request: a name, folder or file, a model in memory, or what :func:`wherewhat.load` returned.

    Args:
        model: A string or path stands for ``ModelRequest(model=name)``; a transformers model, PEFT model, pipeline or
            other wrapper for :class:`MemoryModel`. Requests are returned unchanged.
        tokenizer: Tokenizer of a model in memory; by default a pipeline's own, or none.
    """
    if isinstance(model, str | os.PathLike):
        model = ModelRequest(model=model)
    if isinstance(model, ModelRequest | MemoryModel):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is given with {model.model}, which has its own: leave it out")
        return model
    if not callable(getattr(model, "forward", None)) and not hasattr(model, "model"):
        return model  # no model at all: refused by its type
    from wherewhat.captures.structure import transformers_model

    if hasattr(model, "weights_hash"):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is given with {model.name}, which has its own: leave it out")
        return MemoryModel(transformers_model(model.model), model.tokenizer, model=model.name, loaded=model)
    own = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    return MemoryModel(transformers_model(model), own)


def given_options(request: Any, *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """Return the command-line options for the fields of a request that differ from their defaults."""
    words = []
    for known in fields(request):
        value = getattr(request, known.name)
        if "help" not in known.metadata or known.name in leave_out or value == known.default:
            continue
        name = f"--{flag_of(known)}"
        for item in value if isinstance(value, tuple) else (value,):
            words += [name] if item is True else [name, str(item)]
    return words


def option_text(value: Any) -> str:
    """Return the value of a measurement's option as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def file_names(files: Any) -> Any:
    """Return one file, or a list of them, as a tuple of names."""
    listed = (files,) if isinstance(files, str | os.PathLike) else tuple(files) if isinstance(files, list) else files
    if not isinstance(listed, tuple):
        return listed
    if any(isinstance(entry, Document) for entry in listed):
        raise ConfigError("files holds a Document: give documents and strings as texts")
    if not listed:
        raise ConfigError("files is empty: give at least one, or leave it out for the embedded prose")
    return tuple(os.fspath(entry) if isinstance(entry, os.PathLike) else entry for entry in listed)


@checked(model=model_request, files=file_names, texts=documents_of)
@dataclass(frozen=True)
class Request:
    """One measurement of one model on some texts. The help of each field is that of its command-line option.

    Attributes:
        measurement: Name of the measurement.
        model: The model: a name, folder or file stands for ``ModelRequest(model=name)``; a model in memory (of
            transformers, PEFT, a pipeline) for :class:`MemoryModel`.
        texts: Texts in place of files: strings, documents, token ids, or a column of a dataset.
        options: Options of the measurement, by name.
    """

    measurement: str
    _: KW_ONLY
    model: ModelRequest | MemoryModel = field(default_factory=ModelRequest)
    files: tuple[str, ...] | None = option(
        None,
        "A text file, a folder, a .jsonl file, or - ; repeat for several (default: embedded prose).",
        metavar="FILE",
        flag="text",
    )
    texts: tuple[Document, ...] | None = None
    prompts: str | None = option(
        None, "Generated prompts instead of texts: binding, numbers, letters, random.", metavar="KIND"
    )
    items: str | None = option(
        None,
        "Questions with alternatives: a task such as arc_easy or boolq/rc_5shot, or a .jsonl file.",
        metavar="TASK",
    )
    documents: int | None = option(
        None, "Number of documents, prompts or items (default: all given; embedded text and --prompts: 4, tasks: 100)."
    )
    tokens: int | None = option(
        None, "Tokens of each document (default: 512, or as many as the shortest document has)."
    )
    beyond: bool = option(False, "Allow texts longer than the model's trained length.")
    chunk: int | None = option(
        None, "Run longer documents in chunks of this many tokens through the key-value cache, such as 512."
    )
    offload: bool = option(False, "With --chunk: keep queries and outputs in main memory instead of GPU memory.")
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(
                f"--tokens is {self.tokens}: attention needs at least 2 tokens, and most measurements more, such as 16"
            )
        if self.documents is not None and self.documents < 1:
            raise ConfigError(f"--documents is {self.documents}: at least 1 is needed")
        check_at_most(MOST_TOKENS, **{"--tokens": self.tokens, "--chunk": self.chunk})
        check_at_most(MOST_DOCUMENTS, **{"--documents": self.documents})
        if self.chunk is not None:
            from wherewhat.captures.chunks import check_chunk

            check_chunk(self.chunk)
        if self.offload and self.chunk is None:
            raise ConfigError("--offload needs --chunk: give it as well, such as --chunk 512")
        if self.prompts is not None and self.given_texts:
            raise ConfigError("--text and --prompts exclude each other: give one of them")
        if self.files is not None and self.texts is not None:
            raise ConfigError("files and texts (or ids) were both given: give one of them")
        if self.prompts is not None:
            from wherewhat.text.prompts.kinds import KINDS

            if self.prompts not in KINDS:
                raise ConfigError(f"there is no kind of prompt '{self.prompts}': {nearest(self.prompts, KINDS)}")

    @property
    def given_texts(self) -> bool:
        """Whether texts were given, as files or in memory."""
        return self.files is not None or self.texts is not None

    def command(self) -> str | None:
        """Return the command that makes the same run; None if its model or texts are only in memory."""
        if not isinstance(self.model, ModelRequest) or self.texts is not None:
            return None
        words = ["wherewhat", self.measurement, os.fspath(self.model.model)]
        words += given_options(self) + given_options(self.model, leave_out=("model",))
        for name, value in self.options.items():
            words += ["--set", f"{name}={option_text(value)}"]
        return shlex.join(words)

    def with_weights(self, weights: Weights, *, draw: int = 0) -> Request:
        """Return the same request on a control model, or on the trained one; ``draw`` is added to the seed."""
        return replace(self, model=replace(self.model, weights=weights, seed=self.model.seed + draw))


def item_choices(loaded: LoadedModel, item: ChoiceItem, *, beyond: bool = False) -> Choices:
    """Return an item in tokens, split between context and alternatives as lm-evaluation-harness does.

    Each alternative is tokenised with its context; its tokens are those after as many tokens as the context alone has.
    White space at the end of the context belongs to the alternatives.
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
        raise TextError(
            f"item '{item.name}': alternative {number + 1} adds no token to the context; leave the item out"
        )
    return Choices(
        context=with_spans(loaded.encoder, context, ids),
        continuations=continuations,
        lengths=tuple(len(text.removeprefix(" ")) for text in item.continuations),
        gold=item.gold,
        blank=blank(loaded),
        seed=text_seed(context),
    )


def blank(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the tokens of an empty text: the model's prefix, else BOS or EOS; none if it has neither."""
    named = (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id)
    return loaded.prefix or tuple(token for token in named if token is not None)[:1]


def text_seed(text: str) -> int:
    """Return a seed that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:5], "big")


DEFAULT_DOCUMENTS = 4
"""Number of embedded documents or prompts by default."""

DEFAULT_TOKENS = 512
"""Tokens of a document by default, if it has as many."""


@dataclass(frozen=True)
class Input:
    """One text in the tokens of a model.

    Attributes:
        document: Its name and text.
        text: The text in tokens.
        question: The question at its end, for question measurements.
        choices: The question and its alternatives, for choices measurements; the text is then the question's.
    """

    document: Document
    text: Text
    question: Question | None = None
    choices: Choices | None = None


def read_texts(request: Request, measurement: Measurement) -> list[Document]:
    """Return the documents of a request; none where the run is on prompts or items."""
    makes_own, on_items = (isinstance(measurement, kind) for kind in (QuestionMeasurement, ChoicesMeasurement))
    if (makes_own or on_items) and (request.given_texts or request.prompts is not None):
        what = "makes its own texts" if makes_own else "is measured on items"
        raise ConfigError(f"{measurement.name} {what}: leave --text and --prompts out")
    if on_items and request.items is None:
        raise ConfigError(f"{measurement.name} needs --items: a task such as arc_easy or boolq, or a .jsonl file")
    if request.items is not None and not on_items:
        raise ConfigError(f"{measurement.name} is not measured on items: leave --items out")
    if on_items or makes_own or request.prompts is not None:
        return []
    count = request.documents
    if not request.given_texts and count is None:
        count = max(DEFAULT_DOCUMENTS, measurement.least_documents)
    if request.texts is not None:
        check_count(count, len(request.texts))
        texts = list(request.texts[:count])
    else:
        texts = read_documents(request.files, count=count)
    if len(texts) < (least := measurement.least_documents):
        raise TextError(
            f"{measurement.name} compares documents: at least {least} are needed and 8 or more are better, but "
            f"there are {len(texts)}; give more with --text or --documents"
        )
    return texts


def model_inputs(
    request: Request,
    measurement: Measurement,
    config: Any,
    loaded: LoadedModel,
    texts: Sequence[Document],
    *,
    known: dict[tuple[Document, int], Text] | None = None,
) -> list[Input]:
    """Return the texts in the model's tokens, or the prompts of the request or the measurement.

    Texts of documents by number of tokens are kept in ``known``, for other requests of the same model.
    """
    if isinstance(measurement, ChoicesMeasurement):
        from wherewhat.text.questions import read_items

        assert request.items is not None
        return [_chosen(loaded, item, request) for item in read_items(request.items, count=request.documents)]
    if not isinstance(measurement, QuestionMeasurement) and request.prompts is None:
        tokens = request.tokens or common_length(loaded, texts, beyond=request.beyond)
        known = {} if known is None else known
        loaded.check_length(tokens, allow_beyond=request.beyond)
        for text in texts:
            if (text, tokens) not in known:
                known[text, tokens] = document_text(loaded, text, tokens, beyond=request.beyond)
        return [Input(text, known[text, tokens]) for text in texts]
    from wherewhat.text.prompts.kinds import make_prompts
    from wherewhat.text.prompts.vocabulary import PieceTokenizer

    tokenizer = PieceTokenizer.of(loaded.tokenizer, loaded.prefix, vocabulary=loaded.encoder.rows)
    seed = request.model.seed
    if not isinstance(measurement, QuestionMeasurement):
        assert request.prompts is not None
        count, tokens = request.documents or DEFAULT_DOCUMENTS, request.tokens or DEFAULT_TOKENS
        loaded.check_length(tokens, allow_beyond=request.beyond)
        named = [(p.name, p) for p in make_prompts(request.prompts, tokenizer, tokens=tokens, count=count, seed=seed)]
    else:
        named = [
            (f"{prompt_set.name}-{number}", prompt)
            for prompt_set in measurement.prompts(config)
            for number, prompt in enumerate(
                make_prompts(prompt_set.kind, tokenizer, count=prompt_set.count, seed=seed, **prompt_set.options), 1
            )
        ]
        if request.documents is not None:
            if request.documents > len(named):
                raise ConfigError(
                    f"--documents is {request.documents}, but {measurement.name} makes {len(named)} prompts: ask for "
                    "fewer, or for more with --set count=N"
                )
            # Spread evenly over kinds and sizes.
            named = [named[number * len(named) // request.documents] for number in range(request.documents)]
    for _, prompt in named:
        loaded.check_length(len(prompt.ids), allow_beyond=request.beyond)
    return [_input(loaded, name, prompt) for name, prompt in named]


def _input(loaded: LoadedModel, name: str, prompt: Prompt) -> Input:
    import torch

    ids = torch.tensor(prompt.ids, dtype=torch.int64)
    document = Document(name, prompt.text, f"{prompt.kind} prompts")
    text = with_spans(loaded.encoder, prompt.text, ids)
    if not prompt.asks:
        return Input(document, text)
    role = prompt.items[prompt.answer_item].role
    # Only items with the answer's role are alternatives; items of solved examples have another role.
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
    # The document's text holds the alternatives and the right one, so that its hash depends on them.
    return Input(Document(item.name, item.text, item.source), choices.context, choices=choices)


def document_text(loaded: LoadedModel, document: Document, tokens: int, *, beyond: bool = False) -> Text:
    """Return the first ``tokens`` tokens of a document, the model's prefix included."""
    try:
        ids = loaded.encode(content(document), tokens=tokens, allow_beyond=beyond)
    except TextError as error:
        raise TextError(f"document '{document.name}': {error}") from error
    if document.ids is None:
        return with_spans(loaded.encoder, document.text, ids)
    has_prefix = document.ids[: len(loaded.prefix)] == loaded.prefix
    return Text(ids[None], len(loaded.prefix) if has_prefix else 0)


def content(document: Document) -> str | tuple[int, ...]:
    """Return the text of a document, or its token ids."""
    return document.text if document.ids is None else document.ids


def document_length(loaded: LoadedModel, document: Document) -> int:
    """Return the number of tokens of a document, the model's prefix included."""
    try:
        return len(loaded.tokenize(content(document)))
    except TextError as error:
        raise TextError(f"document '{document.name}': {error}") from error


def common_length(loaded: LoadedModel, texts: Sequence[Document], *, beyond: bool = False) -> int:
    """Return the default number of tokens: as many as the shortest document has, of texts at most 512.

    Texts are also limited by the model's positions, unless ``beyond`` is set; token ids are used whole.
    """
    lengths = [document_length(loaded, text) for text in texts]
    if any(text.ids is None for text in texts):
        from wherewhat.models.loaded import max_positions

        limit, hard = max_positions(loaded.model)
        lengths += [DEFAULT_TOKENS, *([limit] if limit is not None and (hard or not beyond) else [])]
    return min(lengths)


_ENDS = re.compile(r"[.!?][\"'”’)\]_*]*$")
_ABBREVIATED = re.compile(r"(^|\W)(Mr|Mrs|Ms|Dr|St|Capt|Col|Messrs|[A-Z])\.$")
_LETTERS = re.compile(r"[^\W\d_]+")

Ranges = tuple[tuple[int, int], ...]


def with_spans(encoder: Encoder, text: str, ids: Tensor) -> Text:
    """Return token ids ``(n,)`` of a text with its words and sentences, which are found on first use.

    Words are separated by white space; tokens of white space only belong to no word. A sentence is a sequence of whole
    words up to one that ends in ``.``, ``!`` or ``?``, with closing marks after it allowed; abbreviated titles do not
    end one, and an incomplete sentence at the end of the text is left out. Both are None where the tokenizer has no
    character offsets, or where it tokenises the text differently from ``ids``.
    """
    prefix = len(encoder.prefix)
    return Text(ids[None], prefix, lambda: _spans(encoder, text, ids), lambda other: encoder.tokenize(other)[prefix:])


def _spans(encoder: Encoder, text: str, ids: Tensor) -> Spans:
    prefix = len(encoder.prefix)
    if not getattr(encoder.tokenizer, "is_fast", False):
        return Spans()
    encoding = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    count = len(ids) - prefix
    if list(encoding["input_ids"][:count]) != ids[prefix:].tolist():
        return Spans()
    tokens, characters = find_words(text, encoding["offset_mapping"][:count])
    # A word cut off by the end of the text is left out.
    if tokens and tokens[-1][1] == count and text[characters[-1][1] :][:1].strip():
        tokens, characters = tokens[:-1], characters[:-1]
    words = tuple((start + prefix, end + prefix) for start, end in tokens)
    sentences = find_sentences(words, [text[start:end] for start, end in characters])
    return Spans(words, sentences, _respellings(encoder, text, ids, words, characters))


def find_words(text: str, offsets: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return words as spans of tokens, and as spans of characters.

    Offsets are the first character of each token and one past its last, with or without leading white space.
    """
    tokens: list[tuple[int, int]] = []
    characters: list[tuple[int, int]] = []
    for index, (start, end) in enumerate(offsets):
        piece = text[start:end]
        if not piece.strip():
            continue
        first, last = start + len(piece) - len(piece.lstrip()), end - (len(piece) - len(piece.rstrip()))
        # Tokens that share a character, such as the bytes of an accented letter, belong to one word.
        begins = (first == 0 or text[first - 1].isspace()) and (not characters or first >= characters[-1][1])
        if begins or not tokens:
            tokens.append((index, index + 1))
            characters.append((first, last))
        else:
            tokens[-1] = (tokens[-1][0], index + 1)
            characters[-1] = (characters[-1][0], last)
    return tokens, characters


def find_sentences(words: Ranges, texts: list[str]) -> Ranges:
    """Return whole sentences as spans of tokens, from the spans ``(start, end)`` and texts of words."""
    sentences = []
    start: int | None = None
    for (first, end), word in zip(words, texts, strict=True):
        start = first if start is None else start
        if _ENDS.search(word) and not _ABBREVIATED.search(word):
            sentences.append((start, end))
            start = None
    return tuple(sentences)


def transpose_letters(word: str, chooser: random.Random) -> str | None:
    """Return the word with two adjacent, different inner letters transposed; None if there are none."""
    run = max(_LETTERS.finditer(word), key=lambda match: match.end() - match.start(), default=None)
    if run is None:
        return None
    indices = [i for i in range(run.start() + 1, run.end() - 2) if word[i] != word[i + 1]]
    if not indices:
        return None
    i = chooser.choice(indices)
    return word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _respellings(
    encoder: Encoder, text: str, ids: Tensor, words: Ranges, characters: list[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word with two letters transposed; empty where it has no such spelling."""
    chooser = random.Random(0)  # noqa: S311 - a choice of letters, reproducible
    unknown = encoder.tokenizer.unk_token_id

    def encode(piece: str) -> tuple[int, ...]:
        return tuple(encoder.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    respellings: list[tuple[int, ...]] = []
    for (first, end), (start, stop) in zip(words, characters, strict=True):
        changed = transpose_letters(text[start:stop], chooser)
        spelled: tuple[int, ...] = ()
        # A word is respelled only where its unchanged form has the same tokens alone as in the text.
        for lead in dict.fromkeys((text[start - 1 : start], "")):
            if changed is not None and encode(lead + text[start:stop]) == tuple(ids[first:end].tolist()):
                spelled = encode(lead + changed)
                break
        usable = bool(spelled) and max(spelled) < encoder.rows and unknown not in spelled
        respellings.append(spelled if usable else ())
    return tuple(respellings)
