"""The excerpt of a model that a report makes with one pass per text, and the file that stores it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof
from wherewhat.captures.structure import turns_by_length
from wherewhat.errors import ConfigError, StoreError, TextError
from wherewhat.files import JSON, config_hash, file_sha256, make_folder, read_sealed, run_folder_name, write_sealed
from wherewhat.models.loaded import LoadedModel, NoTokenizer, evaluation, known_length, max_positions
from wherewhat.models.memory import weight_sample
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.report.views import Capacity
from wherewhat.runs.execution import LastModel
from wherewhat.runs.identity import loaded_model, model_files
from wherewhat.runs.request import MemoryModel, ModelRequest, document_length, document_text
from wherewhat.runs.schema import ProfileFile, profile_name, write_profiles
from wherewhat.runs.subject import ModelSubject
from wherewhat.scores import Column
from wherewhat.text.documents import Document, text_hash
from wherewhat.text.prompts.kinds import make_prompts
from wherewhat.text.prompts.vocabulary import PieceTokenizer

ROWS, FURTHER_ROWS = 48, 24
"""Tokens of the first and of each further document whose logits are drawn: what a small screen resolves, and what keeps
the page of a model with 1,024 heads below 15 MB."""

PASSAGES = 3
"""Largest number of documents whose logits are drawn."""

REPEATED = 24
"""Random tokens that are followed by themselves: an induction head attends along a stripe there, which prose hides."""

REPEATED_NAME = "repeated random tokens"
"""Name of that text."""

_LOGITS, _EXCERPT, _REPEATED = "logits.safetensors", "excerpt.json", "repeated"


@dataclass(frozen=True)
class Passage:
    """The first tokens of one text.

    Attributes:
        tokens: The first document, or the drawn tokens of another text, in pieces, one for each token.
        logits: Lower triangles of the first rows' logits by layer, ``(heads, pairs)``, row after row; NaN where a
            query does not see a key.
    """

    tokens: list[str]
    logits: dict[int, Tensor]


@dataclass(frozen=True)
class Excerpt:
    """What one pass over each of the first documents, and over repeated random tokens, shows.

    Attributes:
        passages: One for each of the first documents.
        sinks: Logit of each head's sink, by layer; only layers that have sinks.
        facts: Name, size and type of the model.
        capacity: What the model and the texts allow to be measured.
        seconds: Time of the passes per token, for estimates.
        repeated: Random tokens that come twice; None where the model has too few positions.
    """

    passages: list[Passage]
    sinks: dict[int, list[float]]
    facts: dict[str, Any]
    capacity: Capacity
    seconds: float
    repeated: Passage | None = None

    @property
    def logits(self) -> dict[int, Tensor]:
        """Logits of the first document by layer."""
        return self.passages[0].logits


def take_excerpt(loaded: LoadedModel, texts: Sequence[Document], *, tokens: int, proof: Proof | None = None) -> Excerpt:
    """Run the model once on the first tokens of each of the first documents, and on repeated random tokens.

    The first document, by which the speed is known, has as many tokens as the decomposition will have; so have the
    others if rotations depend on the length.
    """
    loaded.check_length(tokens)
    shortest = min(document_length(loaded, text) for text in texts)
    ids = [document_text(loaded, text, tokens).ids[0] for text in texts][:PASSAGES]  # all texts are long enough
    repeated = repeated_tokens(loaded)
    passages: list[Passage] = []
    sinks: dict[int, list[float]] = {}
    kv_heads: set[int] = set()
    planes: list[int] = []

    def see(attention: LayerAttention) -> None:
        if attention.sinks is not None:
            sinks[attention.layer] = attention.sinks.double().cpu().flatten().tolist()
        kv_heads.add(attention.kv_heads)
        if attention.rotation is not None:
            planes.append(attention.rotation.planes)

    subject = ModelSubject(loaded, proof)
    seconds = 0.0
    with new_process_settings(weight_dtypes(loaded.model)), evaluation(loaded.model):
        for number, document in enumerate(ids):
            rows = min(FURTHER_ROWS if number else ROWS, tokens)
            pieces = text_pieces(loaded, texts[number], document)
            whole = number == 0 or turns_by_length(loaded.model.config.get_text_config())
            started = time.perf_counter()
            logits = lower_logits(subject, document if whole else document[:rows], rows, see)
            seconds = seconds or (time.perf_counter() - started) / tokens
            passages.append(Passage(pieces[:rows] if number else pieces, logits))
        drawn = None
        if repeated is not None:
            random_ids = document_text(loaded, repeated, len(repeated.ids or ())).ids[0]
            logits = lower_logits(subject, random_ids, len(random_ids))
            drawn = Passage(text_pieces(loaded, repeated, random_ids), logits)
    trained = known_length(loaded.model)
    positions, hard_limit = max_positions(loaded.model)
    config = loaded.model.config.get_text_config()
    facts = {
        "name": loaded.name,
        "type": str(loaded.model.config.model_type),
        "weights": loaded.weights,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "positions": positions,
        "kv_heads": sorted(kv_heads),
        "unmeasured": [f"{layer.name}: {layer.reason}" for layer in subject.proof.unmeasured],
        "dtype": loaded.dtype,
        "width": getattr(config, "hidden_size", None),
        "vocabulary": getattr(config, "vocab_size", None),
        "sample": weight_sample(loaded.model),
    }
    capacity = Capacity(trained, hard_limit, min(planes, default=0), shortest)
    return Excerpt(passages, sinks, facts, capacity, seconds, drawn)


def lower_logits(
    subject: ModelSubject,
    ids: Tensor,
    rows: int,
    see: Callable[[LayerAttention], None] | None = None,
    *,
    layers: Collection[int] | None = None,
) -> dict[int, Tensor]:
    """Run a model on ``ids`` ``(n,)`` and return the logits of the first tokens by layer, as a passage has them.

    Args:
        subject: The model.
        ids: Token ids.
        rows: Number of queries and keys.
        see: Called with each layer.
        layers: The layers to return; all by default.
    """
    i, j = torch.tril_indices(rows, rows).unbind()
    logits = {}

    def keep(attention: LayerAttention) -> None:
        if see is not None:
            see(attention)
        if layers is not None and attention.layer not in layers:
            return
        first = slice(0, rows)
        scores = attention.attn_scores(first)[0, :, :, :rows].double().cpu()
        seen = attention.visible(first)[..., :rows].expand(1, attention.heads, rows, rows)[0].cpu()
        logits[attention.layer] = scores.masked_fill(~seen, torch.nan)[:, i, j]

    subject.run(ids[None], keep)
    return logits


def repeated_tokens(loaded: LoadedModel) -> Document | None:
    """Return the model's prefix and :data:`REPEATED` random tokens, twice; fewer where it has few positions.

    None where it has too few for any, and where its tokenizer has no ordinary tokens.
    """
    limit, _ = max_positions(loaded.model)
    most = len(loaded.prefix) + 2 * REPEATED
    tokens = most if limit is None else min(most, limit)
    vocabulary = loaded.encoder.rows
    if isinstance(loaded.tokenizer, NoTokenizer):
        tokenizer = PieceTokenizer(lambda _: (), lambda ids: loaded.tokenizer.decode(list(ids)), vocabulary)
    else:
        tokenizer = PieceTokenizer.of(loaded.tokenizer, loaded.prefix, vocabulary=vocabulary)
    with suppress(ConfigError, TextError):
        (prompt,) = make_prompts("random", tokenizer, tokens=tokens - (tokens - len(loaded.prefix)) % 2, repeat=2)
        return Document(REPEATED_NAME, "", ids=tuple(prompt.ids))
    return None


def text_pieces(loaded: LoadedModel, document: Document, ids: Tensor) -> list[str]:
    """Return the text in pieces, one per token; together they are the text if the tokenizer has character offsets."""
    prefix, text = len(loaded.prefix) if document.ids is None else 0, document.text
    names = [str(loaded.tokenizer.decode([index])) for index in ids[:prefix].tolist()]
    body = ids[prefix:].tolist()
    if document.ids is not None or not getattr(loaded.tokenizer, "is_fast", False):
        return [*names, *(str(loaded.tokenizer.decode([index])) for index in body)]
    encoded = loaded.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    end = 0
    for _, stop in encoded["offset_mapping"][: len(body)]:
        # A character of several tokens belongs to the first of them, characters between tokens to the next one.
        names.append(text[end : max(end, stop)])
        end = max(end, stop)
    return names


@dataclass(frozen=True)
class ExcerptFile:
    """The stored excerpt of one model on some texts, so that a report needs no model again.

    Attributes:
        path: The folder; its name holds a hash of the model's files, its options, the texts and package versions.
        model: Name of the model.
    """

    path: Path
    model: str

    @classmethod
    def of(
        cls,
        model: ModelRequest | MemoryModel,
        texts: Sequence[Document],
        *,
        tokens: int,
        out: Path,
        models: LastModel | None = None,
    ) -> ExcerptFile:
        """Return the file of a model, stored or not, without reading or writing anything.

        A model's files are identified by path, size and time of change, a model in memory, which ``models`` keeps, by
        its weights.
        """
        if isinstance(model, MemoryModel):
            state = loaded_model((models or LastModel()).loaded(model))
        else:
            state = model_files(model)
        drawn: list[JSON] = [ROWS, FURTHER_ROWS, PASSAGES, REPEATED]
        key = config_hash({**state, "texts": text_hash(texts), "tokens": tokens, "passages": drawn})
        name = str(state["model"])
        return cls(out / run_folder_name(f"excerpt-{name}-{model.weights}", key), name)

    def read(self) -> Excerpt | None:
        """Return the excerpt; None if there is none or its files are damaged."""
        sealed = read_sealed(self.path / _EXCERPT)
        try:
            if sealed is None or file_sha256(self.path / _LOGITS) != sealed["logits"]:
                return None
            stored = json.loads(str(sealed["excerpt"]))
            file = ProfileFile(self.path / _LOGITS)
            layers = stored.pop("layers")

            def passage(name: str, tokens: list[str]) -> Passage:
                return Passage(tokens, {layer: file[profile_name(name, layer, "logits")] for layer in layers})

            passages = [passage(str(number), tokens) for number, tokens in enumerate(stored.pop("tokens"))]
            repeated = stored.pop("repeated")
            stored["repeated"] = None if repeated is None else passage(_REPEATED, repeated)
            stored["facts"]["sample"]  # excerpts of earlier versions have none
            sinks = {int(layer): values for layer, values in stored.pop("sinks").items()}
            capacity = Capacity(**stored.pop("capacity"))
            return Excerpt(passages=passages, sinks=sinks, capacity=capacity, **stored)
        except (StoreError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def write(self, excerpt: Excerpt) -> None:
        """Store the excerpt."""
        make_folder(self.path)
        passages = {str(number): passage for number, passage in enumerate(excerpt.passages)}
        if excerpt.repeated is not None:
            passages[_REPEATED] = excerpt.repeated
        logits = {
            profile_name(name, layer, "logits"): Column(values, ("head", "pair"))
            for name, passage in passages.items()
            for layer, values in passage.logits.items()
        }
        written = write_profiles(self.path / _LOGITS, logits)
        stored = {
            "tokens": [passage.tokens for passage in excerpt.passages],
            "repeated": None if excerpt.repeated is None else excerpt.repeated.tokens,
            "layers": sorted(excerpt.logits),
            "sinks": excerpt.sinks,
            "facts": excerpt.facts,
            "capacity": dataclasses.asdict(excerpt.capacity),
            "seconds": excerpt.seconds,
        }
        # Pieces of a text may hold half a character, which only escaped JSON can represent.
        sealed = {"excerpt": json.dumps(stored, ensure_ascii=True), "logits": written["sha256"]}
        write_sealed(self.path / _EXCERPT, sealed)
