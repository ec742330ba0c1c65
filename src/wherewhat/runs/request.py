"""What a user asks for: one measurement of one model on some texts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.models.source import Weights, not_loaded, torch_name
from wherewhat.options import check_seed, checked, nearest, option
from wherewhat.text.documents import Document
from wherewhat.text.prompts.kinds import KINDS


@checked(model=not_loaded, device=torch_name, dtype=torch_name)
@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Which model, in which form and where; the fields are those of :func:`wherewhat.load`.

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
    offline: bool = option(False, "Never open a connection.")
    trust_remote_code: bool = option(False, "Run the model's own Python code.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face model.")
    attn_implementation: str | None = option(
        None, "sdpa, eager or another implementation of transformers (default: the model's)."
    )

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
    """One measurement of one model on some texts. The help of each field is that of its command-line option.

    Attributes:
        measurement: Name of the measurement.
        model: The model; a name, folder or file stands for ``ModelRequest(model=name)``.
        options: Options of the measurement, by name.
    """

    measurement: str
    model: ModelRequest = field(default_factory=ModelRequest)
    text: tuple[str, ...] | None = option(
        None,
        "A text file, a folder, a .jsonl file, or - ; repeat for several (default: embedded prose).",
        metavar="FILE",
    )
    prompts: str | None = option(
        None, "Prompts made for the model instead of texts: binding, numbers, letters, random.", metavar="KIND"
    )
    items: str | None = option(
        None,
        "Questions with alternatives: a task such as arc_easy or boolq/rc_5shot, or a .jsonl file.",
        metavar="TASK",
    )
    documents: int | None = option(
        None, "Number of documents or items (default: all given; embedded text and prompts: 4, tasks: 100)."
    )
    tokens: int = option(512, "Tokens of each document.")
    beyond: bool = option(False, "Go beyond the positions the model was made for.")
    chunk: int | None = option(
        None, "Run longer documents in chunks of this many tokens through the key-value cache, such as 512."
    )
    offload: bool = option(False, "With --chunk: keep queries and outputs in main memory meanwhile.")
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
