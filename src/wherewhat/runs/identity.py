"""What a number depends on. Everything that reuses results compares what this module returns.

There are two states of a request. Before its model is loaded, the model is known by the state of its files; this is
enough to find what was measured earlier. Once it is loaded, weights, tokens and the attention implementation are known
by content, and name the run directory. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wherewhat.errors import WherewhatError
from wherewhat.hashes import HASH_DIGITS, JSON, config_hash
from wherewhat.imports import package_version
from wherewhat.measures.measurement import Measurement
from wherewhat.models.source import DRAW, resolve
from wherewhat.options import build_config, config_values
from wherewhat.runs.code import DECLARED, code_identity, code_module, function_identity, options_code
from wherewhat.runs.request import ModelRequest
from wherewhat.runs.sources import OwnModules

if TYPE_CHECKING:
    from wherewhat.models.loaded import LoadedModel
    from wherewhat.runs.inputs import Input
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


def installed_versions() -> dict[str, JSON]:
    """Return the versions of all packages that runs can name."""
    return versions(("gguf", "peft"))


def is_current(
    config: Mapping[str, JSON],
    measurement: Measurement,
    code: Mapping[str, JSON],
    installed: Mapping[str, JSON] | None = None,
) -> bool:
    """Return whether a run was made with today's packages and code.

    Args:
        config: Configuration of the run.
        measurement: Its measurement.
        code: What :func:`code_identity` returned for the measurement.
        installed: What :func:`installed_versions` returned, for many runs; by default it is called.
    """
    stored, installed = config.get("versions"), installed or installed_versions()
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
    found = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items() if part is not None}
    replaced = {name: code for name, code in replaced_attention().items() if name in found.values()}
    kinds = sorted({str(kind) for kind in found.values() if kind is not None})
    named: JSON = kinds[0] if len(kinds) == 1 else {name or "model": kind for name, kind in found.items()}
    return {"implementation": named, "code": replaced} if replaced else named


def replaced_attention() -> dict[str, JSON]:
    """Return hashes of attention functions that are not those of transformers, by name; none if it is not loaded.

    So is the method by which transformers chooses the implementation of a model.
    """
    module = sys.modules.get("transformers.modeling_utils")
    if module is None:
        return {}
    functions = {**module.ALL_ATTENTION_FUNCTIONS, CHOICE: getattr(module.PreTrainedModel, CHOICE, None)}
    found: dict[str, JSON] = {}
    for name, function in sorted(functions.items()):
        if function is None:
            continue
        top = str(getattr(function, "__module__", "")).partition(".")[0]
        if top not in ("transformers", "wherewhat"):
            found[name] = function_identity(function)
    return found


def replaced_functions() -> dict[str, JSON]:
    """Return hashes of the user's functions and classes in place of those that models run, by name.

    Such are functions of modules of transformers that are loaded, methods of their classes, and entries of tables.
    """
    found: dict[str, JSON] = {}
    own = OwnModules("__main__")
    for place, module in sorted(sys.modules.items()):
        if not place.startswith(_PLACES):
            continue
        for name, value in sorted(vars(module).items()):
            inside: Mapping[Any, Any] = value if type(value) is dict else {}  # not those that import on access
            if isinstance(value, type) and value.__module__ == place:
                inside = vars(value)
            for member, function in (("", value), *((f".{key}", one) for key, one in inside.items())):
                if not isinstance(function, types.FunctionType | type):
                    continue
                if code_module(function) in own:
                    found[f"{place}.{name}{member}"] = function_identity(function)
    return found


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
    for made in listed:
        question, choices = made.question, made.choices
        asked = None if question is None else [list(question.candidates), question.correct]
        given = None if choices is None else [[list(one) for one in choices.continuations], list(choices.blank)]
        ids.append([made.text.ids.tolist(), made.text.prefix, asked, given])
    return texts_identity([made.document for made in listed], ids)
