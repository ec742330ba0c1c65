"""What a user asks for: one measurement of one model on some texts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.models.loaded import Weights, torch_name
from wherewhat.models.source import not_loaded
from wherewhat.options import check_seed, checked, nearest
from wherewhat.text.documents import Document
from wherewhat.text.prompts.kinds import KINDS


@checked(model=not_loaded, device=torch_name, dtype=torch_name)
@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model, in which form and where; the fields are those of :func:`wherewhat.load`."""

    model: str | os.PathLike[str] = "smollm2"
    weights: Weights = "trained"
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    device_map: str | None = None
    offline: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        """Refuse a seed that makes no sense."""
        check_seed(self.seed, "--seed")


def model_request(model: Any) -> Any:
    """A model's name, folder or file as a request with everything else by default; anything else as it is."""
    return ModelRequest(model=model) if isinstance(model, str | os.PathLike) else model


def _names(text: Any) -> Any:
    """One file, or a list of them, as a tuple of names."""
    listed = (text,) if isinstance(text, str | os.PathLike) else tuple(text) if isinstance(text, list) else text
    if not isinstance(listed, tuple):
        return listed
    if any(isinstance(one, Document) for one in listed):
        raise ConfigError("text holds a Document: give names of files or folders, such as one its text is written to")
    return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in listed)


@checked(model=model_request, text=_names)
@dataclass(frozen=True, kw_only=True)
class Request:
    """One measurement of one model on some texts.

    Attributes:
        measurement: Name of the measurement.
        model: The model; a name, folder or file stands for ``ModelRequest(model=name)``.
        text: Names of files or folders, or ``-``; None for the embedded text.
        prompts: Kind of prompts to make in place of reading texts.
        items: Task or file of questions with alternatives, for measurements of those.
        documents: How many documents to use; None for all given (embedded and prompts: 4, items of a task: 100).
        tokens: Tokens of each document.
        beyond: Also go beyond the positions the model was made for, where it can compute them.
        chunk: Run longer documents in chunks of so many tokens through the key-value cache; None for one pass.
        offload: Keep what chunks leave in main memory.
        options: Options of the measurement, by name.
    """

    measurement: str
    model: ModelRequest = field(default_factory=ModelRequest)
    text: tuple[str, ...] | None = None
    prompts: str | None = None
    items: str | None = None
    documents: int | None = None
    tokens: int = 512
    beyond: bool = False
    chunk: int | None = None
    offload: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.tokens < 2:
            raise ConfigError(
                f"--tokens is {self.tokens}: attention needs at least 2 tokens, and most measurements more, such as 16"
            )
        if self.documents is not None and self.documents < 1:
            raise ConfigError(f"--documents is {self.documents}: at least 1 is needed")
        if self.chunk is not None:
            from wherewhat.captures.chunks import check_chunk

            check_chunk(self.chunk)
        if self.offload and self.chunk is None:
            raise ConfigError("--offload is about what chunks leave: give --chunk as well, such as --chunk 512")
        if self.prompts is not None and self.text is not None:
            raise ConfigError("--text and --prompts both say what to read: give one of them")
        if self.prompts is not None and self.prompts not in KINDS:
            raise ConfigError(f"there is no kind of prompt '{self.prompts}': {nearest(self.prompts, KINDS)}")

    def with_weights(self, weights: Weights) -> Request:
        """Return the same request on a control model, or on the trained one."""
        return replace(self, model=replace(self.model, weights=weights))
