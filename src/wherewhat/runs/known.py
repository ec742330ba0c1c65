"""Outcomes of earlier requests, found without loading a model.

Run directories are named by a hash of the model's weights and tokens, which are known only once the model is loaded.
Here requests are identified by the state of the model's files instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wherewhat.errors import StoreError, WherewhatError
from wherewhat.files import make_folder, read_regular, remove_temporaries, write_file
from wherewhat.hashes import JSON, config_hash, parse_object, read_object, readable_json
from wherewhat.measures.registry import find_measurement, measurements
from wherewhat.models.source import Weights
from wherewhat.options import build_config
from wherewhat.runs.code import code_identity
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.identity import (
    CHOICE,
    installed_versions,
    is_current,
    model_files,
    replaced_attention,
    run_identity,
)
from wherewhat.runs.layout import COMPLETE, CONFIG, PROVENANCE
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import text_hash
from wherewhat.text.files import read_documents
from wherewhat.text.questions import read_items

_FOLDER = ".requests"
_UNFINISHED = 3600.0  # seconds after which an unfinished note was left by a terminated process
_STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Controlled:
    """Finished runs of a model and its control models.

    Attributes:
        runs: Run directory by weights, the model itself first.
        left_out: Why a control model is missing, by its weights.
    """

    runs: dict[str, RunDirectory]
    left_out: dict[str, str]


class KnownRuns:
    """Outcomes of requests in a folder of run directories."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def find(self, request: Request) -> RunDirectory | str | None:
        """Return the finished run of a request, or why the model has none; None if neither is known."""
        path = self.path(request) if (self.out / _FOLDER).is_dir() else None
        if path is None:
            return None
        try:
            found = parse_object(read_regular(path)) or {}
        except OSError:
            return None
        if "left_out" in found:
            return str(found["left_out"])
        try:
            return RunDirectory.load(self.out / str(found["run"]))
        except (StoreError, KeyError):
            return None

    def find_all(self, request: Request, controls: Iterable[Weights]) -> Controlled | None:
        """Return the finished runs of a model and its control models, and why one cannot be made; None if not known."""
        runs: dict[str, RunDirectory] = {}
        left_out: dict[str, str] = {}
        for weights in (request.model.weights, *controls):
            found = self.find(request.with_weights(weights))
            if found is None or (isinstance(found, str) and not runs):  # the model itself is tried again
                return None
            if isinstance(found, str):
                left_out[weights] = found
            else:
                runs[weights] = found
        return Controlled(runs, left_out)

    def keep(self, request: Request, outcome: RunDirectory | str) -> None:
        """Store the outcome of a request."""
        self.write(self.path(request), outcome, command=request.command())

    def write(self, path: Path | None, outcome: RunDirectory | str, *, command: str | None) -> None:
        """Store an outcome, and the command that leads to it, in what :meth:`path` returned."""
        if path is None:
            return
        note: dict[str, JSON] = {"left_out": outcome} if isinstance(outcome, str) else {"run": outcome.path.name}
        note["command"] = command
        with suppress(StoreError, OSError):  # a folder that cannot be written only costs time
            make_folder(path.parent)
            remove_temporaries(path.parent, older_than=_UNFINISHED)
            write_file(path, readable_json(note))

    def path(self, request: Request) -> Path | None:
        """Return the file of a request in the present state of its inputs; None for what is only in memory."""
        try:
            key = _key(request)
        except (WherewhatError, OSError):  # wrong input, which the run itself names
            key = None
        return None if key is None else self.out / _FOLDER / f"{request.measurement}-{key[:24]}.json"

    def command(self, run: RunDirectory) -> str | None:
        """Return the command that made a run; None if it is not known, as for a model in memory."""
        for path in sorted((self.out / _FOLDER).glob(f"{run.config['measurement']}-*.json")):
            note = read_object(path) or {}
            if note.get("run") == run.path.name and note.get("command"):
                return str(note["command"])
        return None

    def finished(self) -> list[tuple[Path, dict[str, JSON]]]:
        """Return folder and configuration of every finished run, the newest first, without verifying its files.

        Runs of measurements that do not exist any more, and of another version of their code or of the packages that
        all numbers depend on, are left out.
        """
        known, codes, found = measurements(), dict[str, dict[str, JSON]](), []
        installed = installed_versions()
        for path in sorted(self.out.iterdir()) if self.out.is_dir() else []:
            config = read_object(path / CONFIG) if (path / COMPLETE).is_file() else None
            made = known.get(str(config.get("measurement"))) if config is not None else None
            if config is None or made is None:
                continue
            if made.name not in codes:
                codes[made.name] = code_identity(made)
            if is_current(config, made, codes[made.name], installed):
                ended = (read_object(path / PROVENANCE) or {}).get("finished")
                found.append((str(ended), path, config))
        return [(path, config) for _, path, config in sorted(found, key=lambda one: one[0], reverse=True)]


def _key(request: Request) -> str | None:
    """Return the hash of everything that the outcome of a request depends on; None for what is only in memory."""
    if not isinstance(request.model, ModelRequest) or (request.text and _STANDARD_INPUT in request.text):
        return None
    if CHOICE in replaced_attention():  # which implementation it chooses is known only once the model is loaded
        return None
    measurement = find_measurement(request.measurement)
    texts = request.texts if request.text is None else read_documents(request.text)
    items = None if request.items is None else read_items(request.items, count=request.documents)
    fields = ("prompts", "documents", "tokens", "beyond", "chunk", "offload")
    return config_hash(
        run_identity(
            measurement,
            build_config(measurement.config, request.options),
            model=model_files(request.model),
            **{name: getattr(request, name) for name in fields},
            texts=None if texts is None else text_hash(texts),
            questions=None if items is None else [item.text for item in items],
        )
    )
