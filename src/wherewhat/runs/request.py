"""Requests: one measurement of one model on some texts, or a plan."""

from __future__ import annotations

import math
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
    from wherewhat.caches.plan import Unit
    from wherewhat.models.loaded import LoadedModel
    from wherewhat.plans.selectors import Selector


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


@dataclass(frozen=True)
class PlanRequest:
    """What a plan has to reach, and how it is made. The help of each field is that of its command-line option.

    Attributes:
        compare: Other selectors to measure at the same share.
    """

    budget: float | None = option(None, "Share of the groups that see the whole text, 0 to 1 (default: 0.25).")
    _: KW_ONLY
    max_rise: float | None = option(
        None, "Instead: the smallest share with at most this rise of the loss.", metavar="NATS"
    )
    min_found: float | None = option(
        None, "Instead: the smallest share that keeps this part of the retrieval, such as 0.95.", metavar="PART"
    )
    choose: int = option(2, "Number of documents on which heads are scored.")
    documents: int = option(3, "Number of other documents on which the plan is measured; 0 for none.")
    tokens: int = option(512, "Tokens of each document.")
    window: int | None = option(None, "Last keys that limited heads see (default: tokens / 16, at least 64).")
    sinks: int = option(4, "First keys that limited heads see.")
    unit: Unit = option("group", "group (heads that share keys) or head (single query heads, for analysis).")
    selector: Selector = option(
        "ranks",
        "How heads are ranked: ranks, symbolic, distance, output, induction, mass, random; with --costs also costs and "
        "combined, with --greedy also greedy.",
    )
    compare: tuple[Selector, ...] = ("mass", "random")
    curves: bool = option(False, "Measure all selectors at several shares (slow).")
    costs: bool = option(False, "Measure the costs of single heads (slow; use a GPU).")
    greedy: bool = option(False, "Choose step by step, by the measured cost of each choice (slow; use a GPU).")
    beyond: bool = option(False, "Allow texts longer than the model's trained length.")

    def __post_init__(self) -> None:
        """Check the values."""
        for names, kind, what in (
            (("budget", "max_rise", "min_found"), (int, float), "a number"),
            (("tokens", "window", "sinks", "choose", "documents"), int, "a whole number"),
        ):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not (value is None or isinstance(value, kind)):
                    raise ConfigError(f"--{name.replace('_', '-')} is {value!r}: give {what}")
        goals = [name for name in ("budget", "max_rise", "min_found") if getattr(self, name) is not None]
        if "budget" in goals and len(goals) > 1:
            raise ConfigError(f"--budget and --{goals[1].replace('_', '-')} were both given: give a share or a goal")
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise ConfigError(f"--budget is {self.budget:g}: a share is from 0 to 1, such as 0.25")
        if self.max_rise is not None and not 0 < self.max_rise < math.inf:
            raise ConfigError(f"--max-rise is {self.max_rise:g}: give a rise of the loss above 0 nats, such as 0.02")
        if self.min_found is not None and not 0 < self.min_found <= 1:
            raise ConfigError(f"--min-found is {self.min_found:g}: give a part above 0 and up to 1, such as 0.95")
        from wherewhat.plans.selectors import SELECTORS  # imports torch, which other requests do not need

        for selector in (self.selector, *self.compare):
            if selector not in SELECTORS:
                raise ConfigError(f"there is no selector '{selector}': {nearest(selector, SELECTORS)}")
        for name, least in (("choose", 1), ("documents", 0), ("sinks", 0), ("tokens", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name} is {getattr(self, name)}: at least {least} is needed")
        check_at_most(MOST_TOKENS, **{"--tokens": self.tokens, "--window": self.window, "--sinks": self.sinks})
        check_at_most(MOST_DOCUMENTS, **{"--choose": self.choose, "--documents": self.documents})
        if self.curves and self.documents == 0:
            raise ConfigError("--curves measures selectors, but --documents is 0: at least 1 is needed")
        if self.unit not in ("group", "head"):
            raise ConfigError(f"--unit is {self.unit!r}: choose group or head")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--window is {self.window}: at least 1 is needed")
        if self.tokens <= self.keys + self.sinks:
            raise ConfigError(
                f"texts of {self.tokens} tokens are within the window of {self.keys} keys and {self.sinks} first ones: "
                "give more --tokens or a smaller --window"
            )
        if {"costs", "combined"} & set(self.selectors) and not self.costs:
            raise ConfigError("the selectors costs and combined need the costs of single heads: add --costs")
        if "greedy" in self.selectors and not self.greedy:
            raise ConfigError("the selector greedy needs measured costs of each choice: add --greedy")

    @property
    def keys(self) -> int:
        """The window in tokens."""
        return max(64, self.tokens // 16) if self.window is None else self.window

    @property
    def share(self) -> float | None:
        """The share to keep; None if goals determine it."""
        goals = self.max_rise is not None or self.min_found is not None
        return None if goals else 0.25 if self.budget is None else self.budget

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """All selectors to evaluate, the default one first."""
        from wherewhat.plans.selectors import SELECTORS

        slow = {"costs": self.costs, "combined": self.costs, "greedy": self.greedy}
        known = [name for name in SELECTORS if slow.get(name, True)]
        asked = [name for name in ("greedy",) if self.greedy]
        return tuple(dict.fromkeys((self.selector, *(known if self.curves else [*self.compare, *asked]))))

    def shares(self, share: float) -> dict[Selector, list[float]]:
        """Return the shares to evaluate by selector, without 0 and 1, if ``share`` is to be kept."""
        around = {share / 2, share, min(1.0, 2 * share)}
        every = sorted(x for x in around | ({0.1, 0.25, 0.5} if self.curves else set()) if 0 < x < 1)
        return {
            name: every if self.curves or name == self.selector else [x for x in (share,) if 0 < x < 1]
            for name in self.selectors
        }
