"""What a report has found out about a model so far, kept so that a finished report is made again without the model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import StoreError
from wherewhat.files import make_folder, write_file
from wherewhat.hashes import config_hash, parse_object, run_folder_name
from wherewhat.measures.measurement import Capacity
from wherewhat.models.loaded import resolve_device
from wherewhat.models.source import resolve
from wherewhat.report.excerpt import Look
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.profiles import Profile, ProfileFile, profile_name, write_profiles
from wherewhat.runs.provenance import collect_versions
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import Document, text_hash

_LOGITS, _SEEN, _RUNS = "logits.safetensors", "seen.json", "runs.json"


@dataclass(frozen=True)
class Notes:
    """A folder with what was seen of one model on some texts, and which runs were finished.

    Attributes:
        path: The folder; its name holds a hash of everything that decides what is in it.
        out: The folder that holds it and the run directories.
    """

    path: Path
    out: Path

    @classmethod
    def of(cls, model: ModelRequest, texts: Sequence[Document], *, tokens: int, out: Path) -> Notes:
        """The notes on a model, whether there are any yet or not; nothing is loaded and nothing is written.

        A model's files are told apart by name, size and time of change, as `make` does.
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
        key = config_hash(
            {
                "files": [_state(file) for file in files if file is not None],
                "model": {**dataclasses.asdict(model), "model": os.fspath(model.model)},
                "device": str(resolve_device(model.device)) if model.device_map is None else None,
                "texts": text_hash(texts),
                "tokens": tokens,
                "versions": collect_versions(),
            }
        )
        return cls(out / run_folder_name(f"look-{source.name}-{model.weights}", key), out)

    def look(self) -> Look | None:
        """What was seen; None if nothing was, or it cannot be read any more."""
        seen = _read(self.path / _SEEN)
        try:
            file = ProfileFile(self.path / _LOGITS)
            logits = {layer: file[profile_name(None, layer, "logits")] for layer in seen["layers"]}
            return Look(seen["tokens"], logits, seen["facts"], Capacity(**seen["capacity"]), seen["seconds"])
        except (StoreError, KeyError, TypeError):
            return None

    def keep_look(self, look: Look) -> None:
        """Keep what was seen."""
        make_folder(self.path)
        logits = {
            profile_name(None, layer, "logits"): Profile(values, ("head", "pair"))
            for layer, values in look.logits.items()
        }
        write_profiles(self.path / _LOGITS, logits)
        seen = {
            "tokens": look.tokens,
            "layers": sorted(look.logits),
            "facts": look.facts,
            "capacity": dataclasses.asdict(look.capacity),
            "seconds": look.seconds,
        }
        _write(self.path / _SEEN, seen)

    def finished(self, request: Request) -> RunDirectory | str | None:
        """The finished run of a request, or why the model has none; None if that is not known."""
        found = _read(self.path / _RUNS).get(_key(request), {})
        if "left_out" in found:
            return str(found["left_out"])
        try:
            return RunDirectory.load(self.out / found["run"])
        except (StoreError, KeyError):
            return None

    def keep(self, request: Request, outcome: RunDirectory | str) -> None:
        """Keep what became of a request."""
        known = _read(self.path / _RUNS)
        note = {"left_out": outcome} if isinstance(outcome, str) else {"run": outcome.path.name}
        make_folder(self.path)
        _write(self.path / _RUNS, {**known, _key(request): note})


def _key(request: Request) -> str:
    """Return the key of a request; model and texts are in the folder's name, but not the weights."""
    options: Any = json.loads(json.dumps(dict(request.options)))
    what = {name: getattr(request, name) for name in ("measurement", "documents", "tokens", "beyond")}
    return config_hash({**what, "weights": str(request.model.weights), "options": options})


def _state(file: Path) -> list[Any]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_object(path.read_bytes()) or {})
    except OSError:
        return {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    # Pieces of a text may hold half a character, which only escaped JSON can.
    write_file(path, json.dumps(content, ensure_ascii=True).encode("ascii"))
