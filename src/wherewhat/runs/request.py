"""Requests: one measurement of one model on some texts, or a plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import MOST_DOCUMENTS, MOST_TOKENS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.models.source import Weights, not_loaded, torch_name
from wherewhat.options import check_seed, checked, nearest, option
from wherewhat.text.documents import Document, documents_of
from wherewhat.text.prompts.kinds import KINDS

if TYPE_CHECKING:
    from wherewhat.models.loaded import LoadedModel


@checked(model=not_loaded, device=torch_name, dtype=torch_name)
@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model and how to load it; the fields are those of :func:`wherewhat.load`.

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
    offline: bool = option(False, "Do not access the network.")
    trust_remote_code: bool = option(False, "Run the model's own Python code.")
    revision: str | None = option(None, "Branch, tag or commit of a Hugging Face model.")
    attn_implementation: str | None = option(
        None, "sdpa, eager or another implementation of transformers (default: the model's)."
    )

    def __post_init__(self) -> None:
        """Check the seed."""
        check_seed(self.seed, "--seed")


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """A model in memory: measured as it is, or a control model made from it.

    Attributes:
        module: A causal language model of transformers, without wrappers.
        tokenizer: Its tokenizer; None if only token ids are measured.
        model: Name in tables and of run directories; by default the one it was loaded by, or its class.
        weights: ``trained`` for the model as it is, else the control model to make from it.
        seed: Seed of control models, and of prompts.
        loaded: The same model as :func:`wherewhat.load` returned it, which knows its source and the tokens that it puts
            in front of texts. Its weights are hashed like those of other models, since they may have been changed.
    """

    module: Any
    tokenizer: Any = None
    model: str = ""
    weights: Weights = "trained"
    seed: int = 0
    loaded: LoadedModel | None = None

    def __post_init__(self) -> None:
        """Name the model and check that the tokenizer can be its own."""
        from wherewhat.models.loaded import model_name
        from wherewhat.models.memory import check_tokenizer

        if not self.model:
            object.__setattr__(self, "model", model_name(self.module))
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, self.module)

    @property
    def attn_implementation(self) -> str | None:
        """The attention implementation that the model uses."""
        return getattr(self.module.config, "_attn_implementation", None)

    @property
    def revision(self) -> None:
        """None: a model in memory has no revision."""

    def __eq__(self, other: object) -> bool:
        """Compare by identity of model and tokenizer."""
        return isinstance(other, MemoryModel) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return id(self.module), id(self.tokenizer), self.model, self.weights, self.seed


def model_request(model: Any, tokenizer: Any = None) -> Any:
    """Return a model as a request: a name, folder or file, a model in memory, or what :func:`wherewhat.load` returned.

    Args:
        model: A string or path stands for ``ModelRequest(model=name)``; a transformers model, PEFT model, pipeline or
            other wrapper for :class:`MemoryModel`. Requests are returned unchanged.
        tokenizer: Tokenizer of a model in memory; by default a pipeline's own, or none.
    """
    if isinstance(model, str | os.PathLike):
        model = ModelRequest(model=model)
    if isinstance(model, ModelRequest | MemoryModel):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is given with {model.model}, which has its own: leave it out")
        return model
    if not callable(getattr(model, "forward", None)) and not hasattr(model, "model"):
        return model  # no model at all: refused by its type
    from wherewhat.captures.wrappers import transformers_model

    if hasattr(model, "weights_hash"):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is given with {model.name}, which has its own: leave it out")
        return MemoryModel(transformers_model(model.model), model.tokenizer, model=model.name, loaded=model)
    own = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    return MemoryModel(transformers_model(model), own)


def given_options(request: Any, *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """Return the command-line options for the fields of a request that differ from their defaults."""
    words = []
    for known in fields(request):
        value = getattr(request, known.name)
        if "help" not in known.metadata or known.name in leave_out or value == known.default:
            continue
        name = f"--{known.name.replace('_', '-')}"
        for one in value if isinstance(value, tuple) else (value,):
            words += [name] if one is True else [name, str(one)]
    return words


def option_text(value: Any) -> str:
    """Return the value of a measurement's option as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _names(text: Any) -> Any:
    """Return one file, or a list of them, as a tuple of names."""
    listed = (text,) if isinstance(text, str | os.PathLike) else tuple(text) if isinstance(text, list) else text
    if not isinstance(listed, tuple):
        return listed
    if any(isinstance(one, Document) for one in listed):
        raise ConfigError("text holds a Document, but names files or folders: give documents and strings as texts")
    return tuple(os.fspath(one) if isinstance(one, os.PathLike) else one for one in listed)


@checked(model=model_request, text=_names, texts=documents_of)
@dataclass(frozen=True)
class Request:
    """One measurement of one model on some texts. The help of each field is that of its command-line option.

    Attributes:
        measurement: Name of the measurement.
        model: The model: a name, folder or file stands for ``ModelRequest(model=name)``; a model in memory (of
            transformers, PEFT, a pipeline) for :class:`MemoryModel`.
        texts: Texts in place of files: strings, documents, token ids, or a column of a dataset.
        options: Options of the measurement, by name.
    """

    measurement: str
    _: KW_ONLY
    model: ModelRequest | MemoryModel = field(default_factory=ModelRequest)
    text: tuple[str, ...] | None = option(
        None,
        "A text file, a folder, a .jsonl file, or - ; repeat for several (default: embedded prose).",
        metavar="FILE",
    )
    texts: tuple[Document, ...] | None = None
    prompts: str | None = option(
        None, "Generated prompts instead of texts: binding, numbers, letters, random.", metavar="KIND"
    )
    items: str | None = option(
        None,
        "Questions with alternatives: a task such as arc_easy or boolq/rc_5shot, or a .jsonl file.",
        metavar="TASK",
    )
    documents: int | None = option(
        None, "Number of documents or items (default: all given; embedded text and prompts: 4, tasks: 100)."
    )
    tokens: int | None = option(
        None, "Tokens of each document (default: 512, or as many as the shortest document has)."
    )
    beyond: bool = option(False, "Allow texts longer than the model's trained length.")
    chunk: int | None = option(
        None, "Run longer documents in chunks of this many tokens through the key-value cache, such as 512."
    )
    offload: bool = option(False, "With --chunk: keep queries and outputs in main memory instead of GPU memory.")
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        if self.tokens is not None and self.tokens < 2:
            raise ConfigError(
                f"--tokens is {self.tokens}: attention needs at least 2 tokens, and most measurements more, such as 16"
            )
        if self.documents is not None and self.documents < 1:
            raise ConfigError(f"--documents is {self.documents}: at least 1 is needed")
        check_at_most(MOST_TOKENS, **{"--tokens": self.tokens, "--chunk": self.chunk})
        check_at_most(MOST_DOCUMENTS, **{"--documents": self.documents})
        if self.chunk is not None:
            from wherewhat.captures.chunks import check_chunk

            check_chunk(self.chunk)
        if self.offload and self.chunk is None:
            raise ConfigError("--offload needs --chunk: give it as well, such as --chunk 512")
        if self.prompts is not None and self.given_texts:
            raise ConfigError("--text and --prompts exclude each other: give one of them")
        if self.text is not None and self.texts is not None:
            raise ConfigError("text (files) and texts (strings or token ids) were both given: give one of them")
        if self.prompts is not None and self.prompts not in KINDS:
            raise ConfigError(f"there is no kind of prompt '{self.prompts}': {nearest(self.prompts, KINDS)}")

    @property
    def given_texts(self) -> bool:
        """Whether texts were given, as files or in memory."""
        return self.text is not None or self.texts is not None

    def command(self) -> str | None:
        """Return the command that makes the same run; None if its model or texts are only in memory."""
        if not isinstance(self.model, ModelRequest) or self.texts is not None:
            return None
        words = ["wherewhat", self.measurement, os.fspath(self.model.model)]
        words += given_options(self) + given_options(self.model, leave_out=("model",))
        for name, value in self.options.items():
            words += ["--set", f"{name}={option_text(value)}"]
        return shlex.join(words)

    def with_weights(self, weights: Weights) -> Request:
        """Return the same request on a control model, or on the trained one."""
        return replace(self, model=replace(self.model, weights=weights))
