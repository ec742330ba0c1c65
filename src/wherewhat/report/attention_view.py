"""Attention of every head on a text: ``show`` in notebooks, the page of ``wherewhat head``, and portraits beside it."""

from __future__ import annotations

import html
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import Tensor

from wherewhat.boundary import output_file, shown
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof, current_proof
from wherewhat.errors import ConfigError, printable
from wherewhat.models.loaded import LoadedModel, NoTokenizer, evaluation, max_positions
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.options import checked
from wherewhat.progress import counted
from wherewhat.report.data import packed_rows, rounded
from wherewhat.report.excerpt import REPEATED, Passage, lower_logits, repeated_tokens, text_pieces
from wherewhat.report.page import attention_page, write_page
from wherewhat.report.result import Result
from wherewhat.report.run_sections import roles
from wherewhat.report.telling import attention_weights
from wherewhat.rules.roles import Place, portraits
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.identity import KnownRuns
from wherewhat.runs.request import MemoryModel, ModelRequest, document_length, document_text, model_request
from wherewhat.runs.results import StoredRun
from wherewhat.runs.subject import ModelSubject, load_model
from wherewhat.text.documents import Document, clean, documents_of, embedded_documents
from wherewhat.text.prompts.kinds import KINDS

MOST_TOKENS = 512
"""Tokens of a text that are shown at most."""

MOST_LOGITS = 3_000_000
"""Logits that a page holds at most, all heads and texts together; two bytes each make a page of 8 MB."""

_WEIGHTS = "shown"
"""Name of the model's weights in the data of a page, which has no others."""

_GENERATED = re.compile(rf"({'|'.join(KINDS)})-\d+")
"""Names of prompts that a measurement generates instead of texts."""

_HEAD = re.compile(r"[Ll](\d{1,6})[Hh](\d{1,6})")


@dataclass(frozen=True)
class Portraits:
    """Sentences about heads, and what they rest on.

    Attributes:
        run: The run of ``heads`` that they are of.
        source: The documents that they were measured on, in words.
    """

    run: StoredRun
    source: str

    @cached_property
    def sentences(self) -> dict[Place, str]:
        """One sentence for each head."""
        return portraits(self.run)

    @classmethod
    def of(cls, run: StoredRun, *, where: str = "") -> Portraits:
        """Return the portraits of a run of ``heads``; ``where`` names the run."""
        tokens, names = run.directory.config.get("tokens"), ", ".join(map(printable, run.documents))
        size = f"{counted(len(run.documents), 'document')}{f' of {tokens} tokens' if tokens else ''}"
        return cls(run, f"{where or 'Measured'} on {size}: {names}.")


class AttentionView:
    """Attention of heads on texts, as an interactive page; a notebook displays it.

    Attributes:
        name: Name of the model.
        passages: The texts with their logits, by name.
        sinks: Logit of each head's sink, by layer; only layers that have sinks.
        head: Layer and head that the page begins with.
        portraits: Sentences about heads; None if they are not known.
        notes: What was left out of the texts, one sentence each.

    Examples:
        >>> view = wherewhat.show(model, "The cat sat on the mat, and the cat")
        >>> view.save("attention.html")
    """

    def __init__(
        self,
        name: str,
        passages: Mapping[str, Passage],
        *,
        sinks: Mapping[int, Sequence[float]],
        head: Place,
        portraits: Portraits | None,
        notes: Sequence[str],
    ) -> None:
        """Use :func:`show`."""
        self.name, self.passages, self.sinks, self.head = name, dict(passages), dict(sinks), head
        self.portraits, self.notes = portraits, list(notes)

    @property
    def heads(self) -> dict[int, int]:
        """Number of heads by layer."""
        logits = next(iter(self.passages.values())).logits
        return {layer: int(logits[layer].shape[0]) for layer in sorted(logits)}

    @checked()
    def pattern(self, layer: int, head: int, text: str | None = None) -> Tensor:
        """Return the attention weights ``(tokens, tokens)`` of a head on a text; on the first by default."""
        check_head(self.name, self.heads, (layer, head))
        if text is not None and text not in self.passages:
            raise ConfigError(f"there is no text {shown(text)}: the texts are {', '.join(map(shown, self.passages))}")
        passage = self.passages[text] if text is not None else next(iter(self.passages.values()))
        return attention_weights(passage.logits[layer][head], self._sink(layer, head))[0]

    @cached_property
    def html(self) -> str:
        """The page: one file that opens offline. Text is in its data only; the script inserts it as text."""
        return attention_page(self._data())

    @checked()
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page atomically and return its path."""
        return write_page(output_file(path, name="the page"), self.html)

    def __repr__(self) -> str:
        texts = ", ".join(f"{counted(len(x.tokens), 'token')} of {name}" for name, x in self.passages.items())
        return f"AttentionView({self.name}: {counted(sum(self.heads.values()), 'head')}, {texts})"

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, whose names and styles do not meet those of the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'title="Attention of every head" style="width:100%;height:52rem;border:0"></iframe>'
        )

    def _sink(self, layer: int, head: int) -> float | None:
        return self.sinks[layer][head] if layer in self.sinks else None

    def _records(self, layer: int) -> list[dict[str, Any]]:
        maps = zip(*(packed_rows(passage.logits[layer], bits=16) for passage in self.passages.values()), strict=True)
        records: list[dict[str, Any]] = [{"documents": [{"map": pack} for pack in of_head]} for of_head in maps]
        for head, record in enumerate(records):
            if (sink := self._sink(layer, head)) is not None:
                record["sink"] = rounded(sink)
        return records

    def _data(self) -> dict[str, Any]:
        """Return what the page shows, as a report stores it of one model."""
        heads, known = self.heads, self.portraits
        model = {
            "model": {"name": self.name, "weights": _WEIGHTS, "layers": list(heads), "heads": list(heads.values())},
            "records": [self._records(layer) for layer in heads],
            "texts": [
                {"document": printable(name), "tokens": passage.tokens} for name, passage in self.passages.items()
            ],
            "roles": None if known is None else roles({_WEIGHTS: known.run}, list(heads)),
            "metrics": [],
            "swaps": None,
        }
        first = [list(heads).index(self.head[0]), self.head[1]]
        return {
            "models": [model],
            "first": first,
            "notes": self.notes,
            "source": "" if known is None else known.source,
        }


def _prompts(prompt: Any) -> Any:
    """Return prompts as documents; a single string has the name "prompt"."""
    return (Document("prompt", clean(prompt, where="prompt")),) if isinstance(prompt, str) else documents_of(prompt)


@checked(prompt=_prompts)
def show(
    model: Any,
    prompt: tuple[Document, ...] | None = None,
    *,
    tokenizer: Any = None,
    head: str | None = None,
    layers: Collection[int] | None = None,
    heads: Result | str | os.PathLike[str] | None = None,
) -> AttentionView:
    """Show the attention of every head on a text: pattern, and the text coloured by the attention of a token.

    The capture is verified, as everywhere, or the model is refused. At most 512 tokens of a text are shown, fewer where
    the page would exceed 8 MB; fewer ``layers`` leave space for more.

    Args:
        model: A model of transformers, a PEFT model, a pipeline, what :func:`wherewhat.load` returned, or a name,
            folder or file.
        prompt: A string, a document, token ids, or several of them; by default the beginning of the embedded prose and
            a sequence of random tokens that comes twice, in which induction heads show a stripe.
        tokenizer: Tokenizer of a model in memory.
        head: Head to begin with, such as ``L17H3``.
        layers: Layers to show; all by default.
        heads: A result of ``heads`` of the same model, or its run directory, for a sentence about each head.

    Returns:
        The view, which a notebook displays; ``save("page.html")`` writes it as one file that opens offline.

    Examples:
        >>> wherewhat.show(model, "The cat sat on the mat, and the cat", tokenizer=tokenizer)
    """
    request = model_request(model, tokenizer)
    if not isinstance(request, ModelRequest | MemoryModel):
        raise ConfigError(f"model is of type {type(model).__name__}: give a model of transformers, or a name or folder")
    first = None if head is None else parse_head(head)
    loaded = load_model(request, hashed=False)
    known = _portraits(heads)
    if prompt is None:
        texts, tokens = default_texts(loaded), default_tokens(loaded)
    else:
        texts, tokens = list(prompt), MOST_TOKENS
    view = view_attention(loaded, texts, head=first, layers=layers, portraits=known, tokens=tokens)
    measured = None if known is None else known.run.directory.config
    # The hash of a model's files is not that of the same model in memory, so that only names can be compared.
    if measured is not None and (measured["model"], measured["weights"]) != (loaded.name, loaded.weights):
        of = f"{printable(str(measured['model']))} with {measured['weights']} weights"
        view.notes.append(f"The sentences about heads are of a run of {of}, and the attention is of {loaded.name}.")
    return view


def view_attention(
    loaded: LoadedModel,
    texts: Sequence[Document],
    *,
    head: Place | None = None,
    layers: Collection[int] | None = None,
    portraits: Portraits | None = None,
    proof: Proof | None = None,
    tokens: int = MOST_TOKENS,
) -> AttentionView:
    """Run a model once on each text and return the view of its attention.

    Args:
        loaded: The model.
        texts: The texts.
        head: Layer and head to begin with.
        layers: Layers to show; all by default.
        portraits: Sentences about heads.
        proof: Proof of the model; by default its last one, or a new one.
        tokens: Largest number of tokens of a text.
    """
    sinks: dict[int, list[float]] = {}

    def see(attention: LayerAttention) -> None:
        if attention.sinks is not None:
            sinks[attention.layer] = attention.sinks.double().cpu().flatten().tolist()

    with evaluation(loaded.model), new_process_settings(weight_dtypes(loaded.model)):
        subject = ModelSubject(loaded, current_proof(loaded.model, proof))
        counts = head_counts(subject.proof)
        if head is not None:
            check_head(loaded.name, counts, head)
        if portraits is not None and any(number >= counts.get(layer, 0) for layer, number in portraits.sentences):
            raise ConfigError(f"heads is of another model, with other heads than {loaded.name}: give a run of this one")
        asked_for: Collection[Any] = layers or ()
        wrong = [x for x in asked_for if isinstance(x, bool) or not isinstance(x, Integral)]
        if wrong:
            raise ConfigError(f"layers holds {printable(repr(wrong[0]))[:60]}: give whole numbers, such as [0, 5]")
        chosen = sorted(counts if layers is None else set(layers))
        absent = next((layer for layer in chosen if layer not in counts), None)
        if absent is not None or not chosen:
            asked = "is empty" if absent is None else f"holds {absent}"
            raise ConfigError(f"layers {asked}: {loaded.name} has {min(counts)} to {max(counts)}")
        if head is not None and head[0] not in chosen:
            raise ConfigError(f"head is L{head[0]}H{head[1]}, and layers does not hold {head[0]}: add it")
        passages, notes = {}, []
        most = shown_rows(sum(counts[layer] for layer in chosen), len(texts))
        for text in texts:
            length, limit = document_length(loaded, text), max_positions(loaded.model)[0]
            used = min(length, tokens, limit or length)
            rows = min(used, most)
            if rows < length:
                notes.append(f"{printable(text.name)} has {length:,} tokens; the first {rows:,} are shown.")
            ids = document_text(loaded, text, used).ids[0]
            pieces = text_pieces(loaded, text, ids)[:rows]
            passages[text.name] = Passage(pieces, lower_logits(subject, ids, rows, see, layers=chosen))
    first = head or (chosen[0], 0)
    return AttentionView(loaded.name, passages, sinks=sinks, head=first, portraits=portraits, notes=notes)


def shown_rows(heads: int, texts: int) -> int:
    """Return the tokens of each of several texts that a page holds for a number of heads."""
    pairs = MOST_LOGITS // (heads * texts)
    return max(1, min(MOST_TOKENS, (math.isqrt(8 * pairs + 1) - 1) // 2))


def default_texts(loaded: LoadedModel) -> list[Document]:
    """Return embedded prose, if the model has a tokenizer, and random tokens that come twice, if it has positions."""
    prose = [] if isinstance(loaded.tokenizer, NoTokenizer) else embedded_documents(1)
    repeated = repeated_tokens(loaded)
    return [*prose, *([] if repeated is None else [repeated])]


def default_tokens(loaded: LoadedModel) -> int:
    """Return how many tokens of each of :func:`default_texts` are shown."""
    return len(loaded.prefix) + 2 * REPEATED


def parse_head(name: str) -> Place:
    """Return layer and head of a name such as ``L17H3``."""
    match = _HEAD.fullmatch(name.strip())
    if match is None:
        raise ConfigError(f"{shown(name)} is not the name of a head: write layer and head as in L17H3")
    return int(match[1]), int(match[2])


def head_counts(proof: Proof) -> dict[int, int]:
    """Return the number of heads of every captured layer."""
    return {layer.layout.layer: layer.heads for layer in proof.layers}


def check_head(model: str, heads: Mapping[int, int], head: Place) -> None:
    """Refuse a head that a model with these numbers of heads by layer does not have, and say which it has."""
    layer, number = head
    if layer in heads and 0 <= number < heads[layer]:
        return
    if layer in heads:
        known = f"layer {layer} has the heads L{layer}H0 to L{layer}H{heads[layer] - 1}"
    else:
        numbers = sorted(heads)
        whole = numbers == list(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
        most = sorted({count - 1 for count in heads.values()})
        known = f"it has the layers {listed}, each with the heads 0 to {' or '.join(map(str, most))}"
    raise ConfigError(f"{printable(model)} has no head L{layer}H{number}: {known}")


def heads_run(out: Path, loaded: LoadedModel) -> StoredRun | None:
    """Return the finished run of ``heads`` on texts of a loaded model in a folder, the one with the most tokens."""
    best: tuple[int, Path] | None = None
    for path, config in KnownRuns(out).finished():  # the newest first
        if config["measurement"] != "heads":
            continue
        if any(config.get(name) != getattr(loaded, name) for name in ("weights", "weights_hash")):
            continue
        documents: Any = config.get("documents")
        if any(_GENERATED.fullmatch(document["name"]) for document in documents):
            continue
        size = len(documents) * int(str(config.get("tokens", 1)))
        if best is None or size > best[0]:
            best = (size, path)
    return None if best is None else StoredRun(RunDirectory.load(best[1]))


def _portraits(heads: Result | str | os.PathLike[str] | None) -> Portraits | None:
    """Return the portraits of a result of ``heads``, or of its run directory."""
    if heads is None:
        return None
    result = heads if isinstance(heads, Result) else Result.load(heads)
    if result.measurement != "heads":
        raise ConfigError(f"heads is a run of {result.measurement}, which has no portraits: give a run of 'heads'")
    return Portraits.of(result.stored)
