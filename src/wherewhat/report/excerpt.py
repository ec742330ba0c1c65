"""The excerpt of a model that a report makes in one pass, and the cache that holds it with the outcome of each run."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof
from wherewhat.errors import ConfigError, StoreError
from wherewhat.files import make_folder, write_file
from wherewhat.hashes import config_hash, parse_object, run_folder_name
from wherewhat.measures.measurement import Capacity
from wherewhat.models.loaded import LoadedModel, resolve_device
from wherewhat.models.positions import max_positions
from wherewhat.models.source import resolve
from wherewhat.numerics import new_process_settings, weight_dtypes
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.inputs import document_length, document_text
from wherewhat.runs.profiles import Profile, ProfileFile, profile_name, write_profiles
from wherewhat.runs.provenance import collect_versions
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.subject import ModelSubject
from wherewhat.text.documents import Document, text_hash

ROWS = 48
"""Tokens whose logits are drawn: as many as a small screen resolves."""

_LOGITS, _EXCERPT, _RUNS = "logits.safetensors", "excerpt.json", "runs.json"


@dataclass(frozen=True)
class Excerpt:
    """What one pass over the first text shows.

    Attributes:
        tokens: The first text in pieces, one for each token.
        logits: Lower triangles of the first rows' logits by layer, ``(heads, pairs)``, row after row; NaN where a
            query does not see a key.
        facts: Name, size and type of the model.
        capacity: What the model and the texts allow to be measured.
        seconds: Time of the pass per token, for estimates.
    """

    tokens: list[str]
    logits: dict[int, Tensor]
    facts: dict[str, Any]
    capacity: Capacity
    seconds: float


def take_excerpt(loaded: LoadedModel, texts: Sequence[Document], *, tokens: int, proof: Proof | None = None) -> Excerpt:
    """Run the model once on the first tokens of the first text.

    Args:
        loaded: The model.
        texts: The texts that will be measured.
        tokens: Tokens of each: as many as the decomposition will have, for rotations that depend on the length.
        proof: The model's proof; a new one by default.
    """
    loaded.check_length(tokens)
    shortest = min(document_length(loaded, text) for text in texts)
    ids, *_ = [document_text(loaded, text, tokens).ids[0] for text in texts]  # all are long enough
    logits: dict[int, Tensor] = {}
    kv_heads: set[int] = set()
    planes: list[int] = []
    rows = min(ROWS, len(ids))
    i, j = torch.tril_indices(rows, rows).unbind()

    def keep(attention: LayerAttention) -> None:
        first = slice(0, rows)
        scores = attention.attn_scores(first)[0, :, :, :rows].double().cpu()
        seen = attention.visible(first)[..., :rows].expand(1, attention.heads, rows, rows)[0].cpu()
        logits[attention.layer] = scores.masked_fill(~seen, torch.nan)[:, i, j]
        kv_heads.add(attention.kv_heads)
        if attention.rotation is not None:
            planes.append(attention.rotation.planes)

    subject = ModelSubject(loaded, proof)
    started = time.perf_counter()
    with new_process_settings(weight_dtypes(loaded.model)):
        subject.run(ids[None], keep)
    seconds = (time.perf_counter() - started) / len(ids)
    try:
        trained = subject.trained_length()
    except ConfigError:
        trained = None
    positions, hard_limit = max_positions(loaded.model)
    facts = {
        "name": loaded.name,
        "type": str(loaded.model.config.model_type),
        "weights": loaded.weights,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "positions": positions,
        "kv_heads": sorted(kv_heads),
        "unmeasured": [f"{layer.name}: {layer.reason}" for layer in subject.proof.unmeasured],
        "dtype": loaded.dtype,
    }
    capacity = Capacity(trained, hard_limit, min(planes, default=0), shortest)
    return Excerpt(_pieces(loaded, texts[0], ids), logits, facts, capacity, seconds)


def _pieces(loaded: LoadedModel, document: Document, ids: Tensor) -> list[str]:
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
class ReportCache:
    """The excerpt of one model on some texts, and the outcome of each run, so that a report needs no model again.

    Run directories are named by the hash of the model's weights, which are known only once they are loaded; the cache
    finds them by the state of the model's files instead.

    Attributes:
        path: The folder; its name holds a hash of the model's files, its options, the texts and package versions.
        out: The folder that holds it and the run directories.
    """

    path: Path
    out: Path

    @classmethod
    def of(cls, model: ModelRequest, texts: Sequence[Document], *, tokens: int, out: Path) -> ReportCache:
        """Return the cache of a model, empty or not, without loading or writing anything.

        A model's files are identified by path, size and time of change.
        """
        source = resolve(
            model.model,
            offline=model.offline,
            revision=model.revision,
            with_weights=model.weights != "random",
            with_code=model.trust_remote_code,
        )
        folder = source.folder
        files = [source.gguf] if folder is None else []
        folders = [found for found in (folder, source.adapter) if found is not None]
        files += sorted(file for found in folders for file in found.rglob("*") if file.is_file())
        states = [(file, file.stat()) for file in files if file is not None]
        key = config_hash(
            {
                "files": [[str(file.resolve()), status.st_size, status.st_mtime_ns] for file, status in states],
                "model": {**dataclasses.asdict(model), "model": os.fspath(model.model)},
                "device": str(resolve_device(model.device)) if model.device_map is None else None,
                "texts": text_hash(texts),
                "tokens": tokens,
                "versions": collect_versions(),
            }
        )
        return cls(out / run_folder_name(f"excerpt-{source.name}-{model.weights}", key), out)

    def excerpt(self) -> Excerpt | None:
        """Return the excerpt; None if there is none or it cannot be read."""
        stored = _read(self.path / _EXCERPT)
        try:
            file = ProfileFile(self.path / _LOGITS)
            logits = {layer: file[profile_name(None, layer, "logits")] for layer in stored.pop("layers")}
            return Excerpt(**{**stored, "logits": logits, "capacity": Capacity(**stored["capacity"])})
        except (StoreError, KeyError, TypeError):
            return None

    def keep_excerpt(self, excerpt: Excerpt) -> None:
        """Store the excerpt."""
        make_folder(self.path)
        logits = {
            profile_name(None, layer, "logits"): Profile(values, ("head", "pair"))
            for layer, values in excerpt.logits.items()
        }
        write_profiles(self.path / _LOGITS, logits)
        stored = {
            "tokens": excerpt.tokens,
            "layers": sorted(excerpt.logits),
            "facts": excerpt.facts,
            "capacity": dataclasses.asdict(excerpt.capacity),
            "seconds": excerpt.seconds,
        }
        _write(self.path / _EXCERPT, stored)

    def finished(self, request: Request) -> RunDirectory | str | None:
        """Return the finished run of a request, or why the model has none; None if that is not known."""
        found = _read(self.path / _RUNS).get(_key(request), {})
        if "left_out" in found:
            return str(found["left_out"])
        try:
            return RunDirectory.load(self.out / found["run"])
        except (StoreError, KeyError):
            return None

    def keep(self, request: Request, outcome: RunDirectory | str) -> None:
        """Store the outcome of a request."""
        note = {"left_out": outcome} if isinstance(outcome, str) else {"run": outcome.path.name}
        make_folder(self.path)
        _write(self.path / _RUNS, {**_read(self.path / _RUNS), _key(request): note})


def _key(request: Request) -> str:
    """Return the key of a request; the folder's name holds model and texts, but not the weights of control models."""
    options: Any = json.loads(json.dumps(dict(request.options)))
    what = {name: getattr(request, name) for name in ("measurement", "documents", "tokens", "beyond")}
    return config_hash({**what, "weights": str(request.model.weights), "options": options})


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_object(path.read_bytes()) or {})
    except OSError:
        return {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # Pieces of a text may hold half a character, which only escaped JSON can represent.
    write_file(path, json.dumps(content, ensure_ascii=True).encode("ascii"))
