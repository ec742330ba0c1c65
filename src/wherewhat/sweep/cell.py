"""A cell of a sweep: one request, with a name that says what it is and a hash that says that it is this one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from wherewhat.models.source import EMBEDDED
from wherewhat.pipeline.request import ModelRequest, Request
from wherewhat.store.hashing import JSON, canonical_json, text_sha256
from wherewhat.store.naming import HASH_DIGITS, slug

_MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(ModelRequest))
_REQUEST_FIELDS = tuple(f.name for f in dataclasses.fields(Request) if f.name != "model")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement of one model on one text.

    Attributes:
        request: What is measured; paths are as they were written.
        text: Name of the text for people; None where the measurement makes its own or is measured on items.
        checkpoint: Revision or checkpoint folder; None where there is only one.
        inputs: What identifies the texts or items and a local model's files, so that a changed one is another cell.
    """

    request: Request
    text: str | None = None
    checkpoint: str | None = None
    inputs: Mapping[str, JSON] = field(default_factory=dict)

    @cached_property
    def id(self) -> str:
        """Name of the cell's record: readable, then a hash of everything it depends on."""
        key = request_json(self.request)
        del key["text"]  # a text is known by its content, wherever it lies
        key["items"] = None  # so are items; the key stays, as names of other cells hold it
        digest = text_sha256(canonical_json({"request": key, "inputs": self.inputs}))
        model = Path(str(self.request.model.model)).name
        readable = slug(f"{self.request.measurement}-{model}-{self.request.model.weights}", fallback="cell")
        return f"{readable}-{digest[:HASH_DIGITS]}"

    @property
    def described(self) -> str:
        """The cell in a few words."""
        model = self.request.model
        at = "" if self.checkpoint is None else f" at {self.checkpoint}"
        seed = f", seed {model.seed}" if model.weights != "trained" or model.seed else ""
        on = "" if self.text is None else f" on {self.text}"
        return f"{self.request.measurement} of {Path(str(model.model)).name}{at} ({model.weights}{seed}){on}"

    def json(self) -> dict[str, Any]:
        """The cell in ``sweep.json``: the request's fields in one level, and the names of its places on the axes."""
        return {
            **request_json(self.request),
            "text_name": self.text,
            "checkpoint": self.checkpoint,
            "inputs": dict(self.inputs),
            "described": self.described,
        }


def request_json(request: Request) -> dict[str, Any]:
    """A request as plain values, in one level."""
    values = {name: getattr(request, name) for name in _REQUEST_FIELDS}
    values |= {name: getattr(request.model, name) for name in _MODEL_FIELDS}
    values["model"] = os.fspath(request.model.model)
    values["text"] = None if request.text is None else list(request.text)
    values["options"] = dict(request.options)
    return values


def request_from_json(values: Mapping[str, Any]) -> Request:
    """The request that :func:`request_json` wrote."""
    model = ModelRequest(**{name: values[name] for name in _MODEL_FIELDS})
    named = {name: values[name] for name in _REQUEST_FIELDS}
    named["text"] = None if named["text"] is None else tuple(named["text"])
    return Request(model=model, **named)


def located(request: Request) -> Request:
    """The same request with absolute paths, for workers that were started elsewhere."""
    model = os.fspath(request.model.model)
    path = Path(model).expanduser()
    if model != EMBEDDED and path.exists():
        model = str(path.absolute())
    text = None if request.text is None else tuple(str(Path(name).absolute()) for name in request.text)
    items = request.items
    if items is not None and Path(items).is_file():
        items = str(Path(items).absolute())
    located_model = dataclasses.replace(request.model, model=model)
    return dataclasses.replace(request, model=located_model, text=text, items=items)
