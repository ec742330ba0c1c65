"""A loaded model with its tokenizer, its number of positions, and the names of devices and dtypes."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from wherewhat.errors import ConfigError, LoadError, TextError, as_one_line
from wherewhat.files import ascii_json_sha256
from wherewhat.imports import require
from wherewhat.models.source import Weights
from wherewhat.options import checked

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
"""Supported dtypes by name."""

PROBE = "a"
"""Shortest text, to find out what a tokenizer does."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model and its tokenizer.

    Attributes:
        model: In evaluation mode, without gradients.
        tokenizer: Its tokenizer. Use `encode`, which adds only the tokens that the model expects.
        spec: The model as the user named it.
        name: Short display name.
        weights: Trained weights, or the type of control model.
        seed: Seed of a control model; without effect on trained weights.
        dtype: Dtype of the weights.
        device: Device, or devices joined by "+".
        revision: Commit of a hub model, else None.
        weights_hash: Hash of the source files, type of weights and seed; the same on every machine.
        tokenizer_hash: Hash of the tokenizer.
        prefix: Ids of the tokens in front of every text.
        packages: Packages that it was loaded through besides transformers: ``gguf``, ``peft``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: str
    name: str
    weights: Weights
    seed: int
    dtype: str
    device: str
    revision: str | None
    weights_hash: str
    tokenizer_hash: str
    prefix: tuple[int, ...] = ()
    packages: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kind, weights = type(self.model).__name__, f"{self.weights} weights"
        return f"LoadedModel({self.name!r}, {kind}, {weights}, {self.dtype} on {self.device})"

    @property
    def adds_bos(self) -> bool:
        """Whether every text starts with a token, usually BOS, that the model expects."""
        return bool(self.prefix)

    @checked()
    def encode(
        self, text: str | Sequence[int], *, tokens: int | None = None, allow_beyond: bool = False
    ) -> torch.Tensor:
        """Return the token ids of a text.

        Args:
            text: The text, or its token ids, to which nothing is added.
            tokens: Exact number of ids to return, the prefix included; None for the whole text.
            allow_beyond: Allow more tokens than the model was designed for, if it can compute them.

        Returns:
            Tensor `(n,)` of int64 on the CPU: BOS if the model expects it, then the text, without an end token.
        """
        if isinstance(text, str) and tokens is not None and tokens <= len(self.prefix):
            raise ConfigError(f"tokens={tokens} leaves no token for the text: ask for at least {len(self.prefix) + 1}")
        # Checked before a long text is tokenised.
        self.check_length(tokens or 0, allow_beyond=allow_beyond)
        ids = self.tokenize(text)
        if tokens is not None and len(ids) < tokens:
            raise TextError(f"the text has {len(ids)} tokens, but {tokens} were asked for: use a longer text")
        if tokens is None:
            self.check_length(len(ids), allow_beyond=allow_beyond)
        ids = ids[:tokens]
        return torch.tensor(ids, dtype=torch.int64)

    def tokenize(self, text: str | Sequence[int]) -> list[int]:
        """Return the prefix and all ids of a text, or token ids as they are, checked to be in the vocabulary."""
        return self.encoder.tokenize(text)

    @property
    def encoder(self) -> Encoder:
        """What makes token ids of texts, without the model."""
        return Encoder(self.tokenizer, self.prefix, self.model.get_input_embeddings().weight.shape[0], self.name)

    @checked()
    def check_length(self, count: int, *, allow_beyond: bool = False) -> None:
        """Refuse more tokens than the model has positions, unless ``allow_beyond`` is set and it can compute them."""
        limit, hard = max_positions(self.model)
        if limit is None or count <= limit or (allow_beyond and not hard):
            return
        way_out = "" if hard else ", or allow more with --beyond (beyond=True)"
        raise ConfigError(f"{count} tokens are more than the {limit} positions of {self.name}: ask for fewer{way_out}")


@dataclass(frozen=True)
class Encoder:
    """Makes token ids of texts for a model. It does not hold the model, so that texts can outlive it.

    Attributes:
        tokenizer: The model's tokenizer.
        prefix: Ids of the tokens in front of every text.
        rows: Number of ids that the model has embeddings for.
        name: Name of the model, for errors.
    """

    tokenizer: PreTrainedTokenizerBase
    prefix: tuple[int, ...]
    rows: int
    name: str

    def tokenize(self, text: str | Sequence[int]) -> list[int]:
        """See :meth:`LoadedModel.tokenize`."""
        if not isinstance(text, str):
            outside = _outside(text, self.rows)
            if outside is not None or not text:
                problem = (
                    "there are no token ids" if outside is None else f"token id {outside} is not in the vocabulary"
                )
                raise TextError(f"{problem}: {self.name} has ids 0 to {self.rows - 1}")
            return list(text)
        with as_one_line(TextError, "the tokenizer cannot read the text"):  # which may hold lone surrogates
            body = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not body:
            raise TextError("the text is empty: it has no tokens")
        ids = [*self.prefix, *body]
        outside = _outside(ids, self.rows)
        if outside is not None:
            raise TextError(f"the tokenizer gave id {outside}, but {self.name} knows only {self.rows} tokens")
        return ids


def _outside(ids: Sequence[int], rows: int) -> int | None:
    """Return the first id that is not in a vocabulary of ``rows`` tokens, None if there is none."""
    if ids and min(ids) >= 0 and max(ids) < rows:
        return None
    return next((index for index in ids if not 0 <= index < rows), None)


def resolve_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name."""
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a name; "auto" is the first CUDA device, or the CPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        available = {"cpu": torch.cpu, "cuda": torch.cuda, "mps": torch.backends.mps}[device.type].is_available()
    except (RuntimeError, TypeError, KeyError):
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if not available:
        kind = device.type.upper()
        raise LoadError(f"device {name!r} was asked for, but this machine has no usable {kind} device: use cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise LoadError(f"device {name!r} was asked for, but only cuda:0 to cuda:{count - 1} exist")
    return device


_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_attention(implementation: str | None) -> None:
    """Refuse an attention implementation whose masks cannot be read."""
    if implementation is not None and "flex_attention" in implementation:
        raise ConfigError(
            f"attn_implementation={implementation!r} cannot be measured, since its masks are functions: use sdpa or "
            "eager"
        )


def check_device_map(device_map: Any, device: str) -> None:
    """Refuse a device map that is given with a device or without accelerate, or is an unknown word or device."""
    if device_map is None:
        return
    if device != "auto":
        raise ConfigError(f"device={device!r} and device_map={device_map!r} were both given: give only one")
    require("accelerate", why="device_map", install="'wherewhat[large]'")
    if isinstance(device_map, str) and device_map not in _DEVICE_MAPS:
        try:
            resolve_device(device_map)
        except ConfigError:
            words = ", ".join(_DEVICE_MAPS)
            raise ConfigError(f"unknown device_map {device_map!r}: use {words} or the name of a device") from None


def model_name(model: Any) -> str:
    """Return the last part of the name that a model was loaded by, or that of its class."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    parts = PurePath("" if name == "None" else name.replace("\\", "/")).parts  # "None" is what a GGUF file leaves
    # A folder of the hub's cache is …/models--organisation--name/snapshots/commit.
    cached = next((part.rsplit("--", 1)[1] for part in reversed(parts) if part.startswith("models--")), "")
    last = parts[-1] if parts and not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", parts[-1]) else ""
    return cached or last or type(model).__name__


def describe_device(model: torch.nn.Module) -> str:
    """Return the device, or the devices joined by "+", of a model's parameters."""
    seen = dict.fromkeys(str(parameter.device) for parameter in model.parameters())
    return "+".join(name if name != "meta" else "offloaded" for name in seen)


def describe_dtype(model: torch.nn.Module) -> str:
    """Return the dtype of a model's weights, which for quantised checkpoints may differ from the requested one."""
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return str(dtype).removeprefix("torch.")


class NoTokenizer:
    """Stands for the tokenizer of a model without one: it shows ids as numbers and reads no text.

    Args:
        problem: Message of the error when a text is given.
    """

    is_fast = False
    bos_token_id = eos_token_id = unk_token_id = None

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def decode(self, ids: list[int]) -> str:
        """Return ids as numbers, each with a leading space."""
        return "".join(f" {index}" for index in ids)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a text."""
        raise ConfigError(self._problem)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse everything else that a tokenizer can do, except private names, which are asked for by copies."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.__call__()


def check_is_tokenizer(tokenizer: Any) -> None:
    """Refuse objects that are no tokenizer."""
    if not callable(tokenizer) or not hasattr(tokenizer, "decode"):
        raise ConfigError(
            f"tokenizer is {type(tokenizer).__name__}: give what AutoTokenizer.from_pretrained returns, or None"
        )


def text_prefix(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts in front of a text: usually BOS or nothing, two tokens for GLM."""
    if isinstance(tokenizer, NoTokenizer):
        return ()
    body = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(PROBE, add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(body) + 1):
        if full[start : start + len(body)] == body:
            return tuple(full[:start])
    return ()


_MOST_IDS = 2**24
"""Largest number of token ids of a tokenizer: writing its rules takes memory for each id, even one without a token."""


def tokenizer_hash(tokenizer: Any, prefix: tuple[int, ...]) -> str:
    """Return the hash of a tokenizer's prefix and rules, or of its vocabulary if its rules cannot be serialised.

    It is "none" for a model without a tokenizer.
    """
    if isinstance(tokenizer, NoTokenizer):
        return "none"
    ids = tokenizer.get_vocab().values()
    if max(ids, default=0) >= _MOST_IDS:
        raise LoadError(
            f"the tokenizer has {len(ids):,} tokens, and one with the id {max(ids):,}: ids below {_MOST_IDS:,} work"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None and hasattr(backend, "to_str") else ""
    vocabulary = sorted(tokenizer.get_vocab().items()) if not rules else None
    return ascii_json_sha256({"rules": rules, "vocabulary": vocabulary, "prefix": list(prefix)})


# Attributes in which causal models store one row per position. Such a table is a hard limit: position n of a table
# with n rows is an index error.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")


def max_positions(model: Any) -> tuple[int | None, bool]:
    """Return the largest number of tokens of a causal language model of transformers.

    Returns:
        `(limit, hard)`. `limit` is None if there is none (ALiBi). `hard` is True if a longer text cannot be computed:
        learned positions (GPT-2, OPT), the sine table of GPT-J and CodeGen, the bias table of MPT. Otherwise the limit
        is the length the model was designed for (RoPE).
    """
    config = _text_config(model)
    stated = _stated_length(config)
    kind = getattr(config, "model_type", None)
    if kind == "mpt":
        return stated, True
    if kind == "bloom" or getattr(config, "alibi", False):
        return None, False
    tables = _tables(model)
    if not tables:
        return stated, False
    return min(tables if stated is None else [*tables, stated]), True


_known_tables: weakref.WeakKeyDictionary[Any, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
"""Rows of the position tables of models, and the number of modules that they were looked up in."""


def _tables(model: Any) -> list[int]:
    """Return the number of usable rows of each position table of a model, looked up again if modules were added."""
    count = sum(1 for _ in model.modules())
    known = _known_tables.get(model)
    if known is None or known[0] != count:
        named = model.named_modules()
        known = (count, [rows for name, module in named if (rows := _table_rows(name, module)) is not None])
        _known_tables[model] = known
    return known[1]


def hard_limit(model: Any) -> int | None:
    """Return the number of tokens beyond which a model cannot be computed; None if there is no such limit."""
    limit, hard = max_positions(model)
    return limit if hard else None


def trained_length(model: Any) -> int:
    """Return the training length in the model's configuration, limited by its number of positions."""
    length = known_length(model)
    if length is None:
        raise ConfigError(
            f"{type(model).__name__} does not state its training length: give the method's window, or its trained and "
            "factor"
        )
    return length


def known_length(model: Any) -> int | None:
    """Return the same; None if the model does not state it."""
    return hard_limit(model) or _stated_length(_text_config(model))


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _stated_length(config: Any) -> int | None:
    for name in _LENGTHS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _table_rows(name: str, module: torch.nn.Module) -> int | None:
    """Return the number of usable rows of a module's position table; None if it has no table."""
    if any(part in name for part in ("vision", "audio", "image", "visual")):
        return None
    if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _TABLES:
        rows = int(module.num_embeddings)
        if isinstance(offset := getattr(module, "offset", None), int):
            return rows - offset  # OPT and BART do not use the first rows
        # Models like RoBERTa start after the padding row.
        return rows if module.padding_idx is None else rows - module.padding_idx - 1
    for table in _TABLES:
        buffer = getattr(module, table, None)
        # GPT-J and CodeGen store (positions, rotary size), CTRL (positions, hidden size), as plain tensors.
        if isinstance(buffer, torch.Tensor) and buffer.ndim == 2:
            return int(buffer.shape[0])
    return None


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the context, without gradients, then restore the mode of each module.

    Another thread that wants the same model waits.
    """
    with _guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        before = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in before.items():
                module.training = training


_guard = threading.Lock()
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
