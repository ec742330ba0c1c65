"""What a number depends on, and the finished runs that have it already.

Everything that reuses results compares what this module returns. There are two states of a request. Before its model is
loaded, the model is known by the state of its files; this is enough to find what was measured earlier. Once it is
loaded, weights, tokens and the attention implementation are known by content, and name the run directory. Nothing here
imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wherewhat.errors import StoreError, WherewhatError
from wherewhat.files import (
    HASH_DIGITS,
    JSON,
    config_hash,
    make_folder,
    parse_object,
    read_object,
    read_regular,
    readable_json,
    remove_temporaries,
    write_file,
)
from wherewhat.imports import package_version
from wherewhat.measures.measurement import Measurement, find_measurement, measurements
from wherewhat.models.source import DRAW, Weights, resolve
from wherewhat.options import build_config, config_values
from wherewhat.runs.code import DECLARED, OwnModules, code_identity, code_module, function_identity, options_code
from wherewhat.runs.directory import COMPLETE, CONFIG, PROVENANCE, RunDirectory
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.text.documents import read_documents, text_hash

if TYPE_CHECKING:
    from wherewhat.models.loaded import LoadedModel
    from wherewhat.runs.request import Input
    from wherewhat.text.documents import Document

_PACKAGES = ("wherewhat", "torch", "transformers")
"""Packages that all numbers depend on."""

_TOKENIZERS = ("tokenizers", "sentencepiece", "tiktoken")
"""Packages that change token ids, which are known by content only once a text is tokenised."""

_ENVIRONMENT = ("USE_HUB_KERNELS", "DISABLE_KERNEL_MAPPING", "XLA_USE_BF16", "XLA_DOWNCAST_BF16")
"""Environment variables that change which code of transformers runs."""

_PLACES = ("transformers.models.", "transformers.modeling_", "transformers.masking_utils", "torch.nn.functional")
"""Beginnings of the names of modules whose functions models run."""

CHOICE = "get_correct_attn_implementation"
"""Method of transformers' models that chooses the attention implementation."""


def run_identity(
    measurement: Measurement, config: Any, *, model: Mapping[str, JSON], **inputs: JSON | None
) -> dict[str, JSON]:
    """Return everything that the numbers of a measurement depend on.

    Args:
        measurement: The measurement.
        config: Its options.
        model: The model: what :func:`loaded_model` or, before it is loaded, :func:`model_files` returned.
        inputs: Texts and how they are run, such as ``tokens``, ``chunk`` and what :func:`texts_identity` returned; None
            for what was not given.
    """
    return {
        **{name: value for name, value in inputs.items() if value is not None},
        "measurement": measurement.name,
        "options": config_values(config),
        **code_identity(measurement, config),
        **model,
    }


def versions(packages: Iterable[str] = ()) -> dict[str, JSON]:
    """Return the versions of the packages that numbers depend on, and of those that a model was loaded through."""
    return {name: package_version(name) for name in (*_PACKAGES, *packages)}


def is_current(
    config: Mapping[str, JSON], measurement: Measurement, code: Mapping[str, JSON], installed: Mapping[str, JSON]
) -> bool:
    """Return whether the run of a configuration was made with today's packages and code of its measurement."""
    stored = config.get("versions")
    if not isinstance(stored, Mapping) or not {*_PACKAGES} <= {*stored} <= {*installed}:
        return False
    if any(installed[name] != version for name, version in stored.items()):
        return False
    if {name: config[name] for name in ("revision", "code") if name in config} != code:
        return False
    if "options_code" not in config:
        return True
    try:
        options = build_config(measurement.config, cast("Mapping[str, Any]", config["options"]))
        return options_code(options).get("options_code") == config["options_code"]
    except WherewhatError:  # options or methods that do not exist any more
        return False


def software(config: Mapping[str, JSON]) -> str | None:
    """Return versions and code of a run in a few words; None for a run without them."""
    stored, code = config.get("versions"), config.get("code")
    if not isinstance(stored, Mapping):
        return None
    words = [f"{name} {version}" for name, version in sorted(stored.items())]
    words += [f"revision {config['revision']}"] if "revision" in config else []
    return ", ".join([*words, f"code {config_hash(code)[:HASH_DIGITS]}"] if isinstance(code, Mapping) else words)


def reused_line(path: Path, config: Mapping[str, JSON]) -> str:
    """Return the line that says that a finished run is reused, and what is not noticed."""
    return f"already measured: {path}{unnoticed(config)}"


def unnoticed(config: Mapping[str, JSON]) -> str:
    """Return in brackets that changes of a run's code are not noticed; empty if they are."""
    if config.get("code") != DECLARED:
        return ""
    return f" (revision {config.get('revision')} declared by its author; changes of its code are not noticed)"


def loaded_model(loaded: LoadedModel) -> dict[str, JSON]:
    """Return what identifies a loaded model: weights, tokenizer, dtype, device, attention and versions."""
    from wherewhat.runs.subject import device_type  # imports torch, as the model did

    return {
        "model": loaded.name,
        "weights": loaded.weights,
        "weights_hash": loaded.weights_hash,
        "tokenizer_hash": loaded.tokenizer_hash,
        "seed": loaded.seed,
        "dtype": loaded.dtype,
        "device": device_type(loaded),
        "attention": _attention(loaded.model),
        **_replaced(),
        "versions": versions(_packages(loaded)),
    }


def _packages(loaded: LoadedModel) -> list[str]:
    """Return the packages that a model was loaded through, or whose modules it has."""
    adapted = any(type(module).__module__.startswith("peft.") for module in loaded.model.modules())
    return sorted({*loaded.packages, *(["peft"] if adapted else [])})


def _attention(model: Any) -> JSON:
    """Return the attention implementation that a model uses, by part of its config where they differ."""
    config = model.config
    parts = {name: getattr(config, name, None) for name in ("", *getattr(config, "sub_configs", {}))}
    parts[""] = config
    by_part = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items() if part is not None}
    replaced = {name: code for name, code in replaced_attention().items() if name in by_part.values()}
    kinds = sorted({str(kind) for kind in by_part.values() if kind is not None})
    named: JSON = kinds[0] if len(kinds) == 1 else {name or "model": kind for name, kind in by_part.items()}
    return {"implementation": named, "code": replaced} if replaced else named


def replaced_attention() -> dict[str, JSON]:
    """Return hashes of attention functions that are not those of transformers, by name; none if it is not loaded.

    So is the method by which transformers chooses the implementation of a model.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return {}
    functions = {**module.ALL_ATTENTION_FUNCTIONS, CHOICE: getattr(module.PreTrainedModel, CHOICE, None)}
    hashes: dict[str, JSON] = {}
    for name, function in sorted(functions.items()):
        if function is None:
            continue
        top = str(getattr(function, "__module__", "")).partition(".")[0]
        if top not in ("transformers", "wherewhat"):
            hashes[name] = function_identity(function)
    return hashes


def replaced_functions() -> dict[str, JSON]:
    """Return hashes of the user's functions and classes in place of those that models run, by name.

    Such are functions of modules of transformers that are loaded, methods of their classes, and entries of tables.
    """
    hashes: dict[str, JSON] = {}
    own = OwnModules("__main__")
    kinds = types.FunctionType | type
    for place, module in [(place, module) for place, module in [*sys.modules.items()] if place.startswith(_PLACES)]:
        space = vars(module)
        for name, value in [*space.items()]:
            found = [("", value)] if isinstance(value, kinds) else []
            # Not tables that import on access.
            if type(value) is dict or (isinstance(value, type) and value.__module__ == place):
                inside = value if type(value) is dict else vars(value)
                found += [(f".{key}", member) for key, member in inside.items() if isinstance(member, kinds)]
            for member, function in found:
                # Most are defined where they are found.
                if getattr(function, "__globals__", None) is not space and code_module(function) in own:
                    hashes[f"{place}.{name}{member}"] = function_identity(function)
    return hashes


def model_files(model: ModelRequest) -> dict[str, JSON]:
    """Return what identifies a model before it is loaded: options, and path, size and time of change of its files."""
    source = resolve(
        model.model,
        offline=model.offline,
        revision=model.revision,
        with_weights=model.weights != "random",
        with_code=model.trust_remote_code,
    )
    files = [source.gguf] if source.gguf is not None else []
    folders = [folder for folder in (source.folder, source.adapter) if folder is not None]
    files += sorted(file for folder in folders for file in folder.rglob("*") if file.is_file())
    states = [(file, file.stat()) for file in files]
    through = ["gguf"] * (source.gguf is not None) + ["peft"] * (source.adapter is not None)
    return {
        **({"draw": DRAW} if model.weights == "random" else {}),
        "model": source.name,
        "files": [[str(file.resolve()), status.st_size, status.st_mtime_ns] for file, status in states],
        "request": {**dataclasses.asdict(model), "model": os.fspath(model.model)},
        # What "auto" stands for, without importing torch.
        "devices": [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        **attention_settings(),
        "versions": versions([*through, *_TOKENIZERS]),
    }


def attention_settings() -> dict[str, JSON]:
    """Return what changes the attention of a model that will be loaded: environment, and replaced functions."""
    return {
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        "attention": replaced_attention(),
        **_replaced(),
    }


def _replaced() -> dict[str, JSON]:
    functions = replaced_functions()
    return {"replaced": functions} if functions else {}


def texts_identity(documents: Iterable[Document], ids: Iterable[Any]) -> dict[str, JSON]:
    """Return what identifies texts in tokens: names and hashes of the texts in order, and a hash of all token ids.

    The ids notice another version of the tokenizer's library, which the hash of the tokenizer does not.
    """
    digest = hashlib.sha256()
    for document in ids:
        digest.update(repr(document).encode())
    return {
        "documents": [{"name": document.name, "sha256": document.sha256} for document in documents],
        "token_ids": digest.hexdigest(),
    }


def inputs_identity(inputs: Iterable[Input]) -> dict[str, JSON]:
    """Return what identifies the texts, prompts or items of a run in tokens, with their alternatives."""
    listed = list(inputs)
    ids = []
    for item in listed:
        question, choices = item.question, item.choices
        asked = None if question is None else [list(question.candidates), question.correct]
        options = None if choices is None else [[list(tokens) for tokens in choices.continuations], list(choices.blank)]
        ids.append([item.text.ids.tolist(), item.text.prefix, asked, options])
    return texts_identity([item.document for item in listed], ids)


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
    """Outcomes of requests in a folder of run directories.

    Attributes:
        out: The folder of run directories.
        folder: The folder of the outcomes; unfinished files in it are removed after an hour.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / _FOLDER

    def find(self, request: Request) -> RunDirectory | str | None:
        """Return the finished run of a request, or why the model has none; None if neither is known."""
        path = self.path(request) if self.folder.is_dir() else None
        if path is None:
            return None
        try:
            content = parse_object(read_regular(path)) or {}
        except OSError:
            return None
        if "left_out" in content:
            return str(content["left_out"])
        try:
            return RunDirectory.load(self.out / str(content["run"]))
        except (StoreError, KeyError):
            return None

    def find_all(self, request: Request, controls: Iterable[Weights]) -> Controlled | None:
        """Return the finished runs of a model and its control models, and why one cannot be made; None if not known."""
        runs: dict[str, RunDirectory] = {}
        left_out: dict[str, str] = {}
        for weights in (request.model.weights, *controls):
            run = self.find(request.with_weights(weights))
            if run is None or (isinstance(run, str) and not runs):  # the model itself is tried again
                return None
            if isinstance(run, str):
                left_out[weights] = run
            else:
                runs[weights] = run
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
        return None if key is None else self.folder / f"{request.measurement}-{key[:24]}.json"

    def command(self, run: RunDirectory) -> str | None:
        """Return the command that made a run; None if it is not known, as for a model in memory."""
        for path in sorted(self.folder.glob(f"{run.config['measurement']}-*.json")):
            note = read_object(path) or {}
            if note.get("run") == run.path.name and note.get("command"):
                return str(note["command"])
        return None

    def finished(self) -> list[tuple[Path, dict[str, JSON]]]:
        """Return folder and configuration of every finished run, the newest first, without verifying its files.

        Runs of measurements that do not exist any more, and of another version of their code or of the packages that
        all numbers depend on, are left out.
        """
        known, codes, runs = measurements(), dict[str, dict[str, JSON]](), []
        installed = versions(("gguf", "peft"))  # of all packages that runs can name
        for path in sorted(self.out.iterdir()) if self.out.is_dir() else []:
            config = read_object(path / CONFIG) if (path / COMPLETE).is_file() else None
            measurement = known.get(str(config.get("measurement"))) if config is not None else None
            if config is None or measurement is None:
                continue
            if measurement.name not in codes:
                codes[measurement.name] = code_identity(measurement)
            if is_current(config, measurement, codes[measurement.name], installed):
                ended = (read_object(path / PROVENANCE) or {}).get("finished")
                runs.append((str(ended), path, config))
        return [(path, config) for _, path, config in sorted(runs, key=lambda run: run[0], reverse=True)]


def _key(request: Request) -> str | None:
    """Return the hash of everything that the outcome of a request depends on; None for what is only in memory."""
    if not isinstance(request.model, ModelRequest) or (request.files and _STANDARD_INPUT in request.files):
        return None
    if CHOICE in replaced_attention():  # which implementation it chooses is known only once the model is loaded
        return None
    measurement = find_measurement(request.measurement)
    texts = request.texts if request.files is None else read_documents(request.files)
    questions = None
    if request.items is not None:
        from wherewhat.text.questions import read_items

        questions = [item.text for item in read_items(request.items, count=request.documents)]
    fields = ("prompts", "documents", "tokens", "beyond", "chunk", "offload")
    return config_hash(
        run_identity(
            measurement,
            build_config(measurement.config, request.options),
            model=model_files(request.model),
            **{name: getattr(request, name) for name in fields},
            texts=None if texts is None else text_hash(texts),
            questions=questions,
        )
    )
