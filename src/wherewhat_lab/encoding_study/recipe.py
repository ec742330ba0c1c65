"""The recipe of the study: encodings, seeds, text, model, training, records, and measurements after training."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from wherewhat import options
from wherewhat.boundary import check_at_most, check_distinct, user_path
from wherewhat.errors import ConfigError
from wherewhat.lengths import METHODS, find_method
from wherewhat.measures.perturb import KINDS
from wherewhat.options import build_config, check_integer, check_seed, config_values, nearest, option
from wherewhat_lab.config import EncodingName, LabConfig
from wherewhat_lab.language import VOCABULARY, LanguageConfig

_MOST = 1000
"""Largest number of records, windows and documents."""

ENCODINGS: tuple[str, ...] = get_args(EncodingName)


@dataclass(frozen=True)
class RecordConfig:
    """What is recorded during training, on fixed held-out bytes."""

    records: int = option(40, "number of records, at logarithmically spaced steps")
    loss_windows: int = option(32, "windows of the context's length for the loss")
    documents: int = option(8, "number of those windows for scores of heads")
    plane_documents: int = option(2, "number of those documents for scores of RoPE planes")
    rank_documents: int = option(2, "number of those documents for the effective rank of queries and keys")
    queries: int = option(4, "evenly spaced queries of each document for swap scores, the last one included")
    repeats: int = option(2, "sequences of repeated random bytes, for induction")
    seed: int = option(0, "seed of the windows and of the random bytes")

    def __post_init__(self) -> None:
        """Check the options."""
        for f in fields(self):
            check_integer(f.name, getattr(self, f.name), least={"seed": 0, "records": 2}.get(f.name, 1))
        check_at_most(_MOST, **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "seed"})
        check_seed(self.seed)
        if not max(self.plane_documents, self.rank_documents) <= self.documents <= self.loss_windows:
            raise ConfigError(
                f"documents={self.documents} must be among the {self.loss_windows} loss_windows, and hold the "
                f"{self.plane_documents} plane_documents and {self.rank_documents} rank_documents"
            )


_PUBLISHED = tuple(name for name in METHODS if name != "near-far")
"""Length methods of other projects, which the study compares."""


@dataclass(frozen=True)
class AfterConfig:
    """What is measured after training."""

    times: int = option(16, "length of the longest text, in multiples of the context")
    length_documents: int = option(8, "number of long texts")
    methods: tuple[str, ...] = option(_PUBLISHED, "length methods; those that apply are used")
    kinds: tuple[str, ...] = option(
        ("words", "adjacent_words", "adjacent_tokens", "position_jitter"), "kinds of perturbation"
    )
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to perturb")
    draws: int = option(2, "random draws of each perturbation, averaged")
    perturb_documents: int = option(12, "number of texts to perturb")
    strengths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "values of λ, the weight of the residual")
    residual_documents: int = option(12, "number of texts for the residual")
    seed: int = option(1, "seed of the windows, which differ from the recorded ones")

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("times", "length_documents", "perturb_documents", "residual_documents", "draws"):
            check_integer(name, getattr(self, name), least=1)
            check_at_most(_MOST, **{name: getattr(self, name)})
        check_seed(self.seed)
        for name in self.methods:
            find_method(name)
        for kind in self.kinds:
            if kind not in KINDS or kind in ("letters", "sentences", "features"):
                raise ConfigError(f"there is no kind of perturbation of bytes '{kind}': {nearest(kind, KINDS)}")


_TABLES = ("model", "training", "watch", "after")


@dataclass(frozen=True)
class EncodingRecipe:
    """A study of position encodings.

    Attributes:
        encodings: Encodings of the models.
        seeds: Seeds of their weights.
        text: File of the text; None for the embedded prose.
        text_bytes: Number of bytes to use, from the start of the text; 0 for all.
        held_out: Share of the text, at its end, that is never trained on.
        model: The model; its encoding, seed, vocabulary and number of positions follow from the rest of the recipe.
        training: The training; its seed is that of the weights.
        watch: What is recorded during training.
        after: What is measured after training.
    """

    encodings: tuple[str, ...] = ENCODINGS
    seeds: tuple[int, ...] = (0, 1)
    text: Path | None = None
    text_bytes: int = 0
    held_out: float = 0.05
    model: LabConfig = field(
        default_factory=lambda: LabConfig(vocabulary=VOCABULARY, layers=6, heads=6, width=384, dropout=0.0),
        metadata={"derived": ("encoding", "seed", "vocabulary")},
    )
    training: LanguageConfig = field(
        default_factory=lambda: LanguageConfig(steps=2000, batch=128, warmup=100, save_every=1000),
        metadata={"derived": ("seed",)},
    )
    watch: RecordConfig = field(default_factory=RecordConfig)
    after: AfterConfig = field(default_factory=AfterConfig)

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("encodings", "seeds"):
            check_distinct(name, getattr(self, name))
        for encoding in self.encodings:
            check_encoding(encoding)
        for seed in self.seeds:
            check_seed(seed, "a seed of the recipe")
        for name in ("text_bytes", "held_out"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} must not be negative")

    def model_for(self, encoding: str, seed: int) -> LabConfig:
        """Return the model with an encoding and a seed of the weights."""
        values = config_values(self.model) | {"encoding": encoding, "seed": seed, "positions": self.training.context}
        config: LabConfig = build_config(LabConfig, values)
        return config

    def training_for(self, seed: int) -> LanguageConfig:
        """Return the training with a seed; the order of the data is the same for all seeds."""
        return replace(self.training, seed=seed)

    def values(self) -> dict[str, Any]:
        """Return everything that results depend on besides encoding, seed, text and device, as plain values."""
        tables = {name: config_values(getattr(self, name)) for name in _TABLES}
        for name in ("encoding", "seed", "positions", "vocabulary"):
            del tables["model"][name]
        del tables["training"]["seed"]
        return {"held_out": self.held_out, **tables}


def read_recipe(path: Path) -> EncodingRecipe:
    """Read a recipe from a TOML, YAML or JSON file; the name of its text is relative to the file's folder."""
    path = user_path(path, name="the recipe")
    recipe = options.read_recipe(path, EncodingRecipe)
    return recipe if recipe.text is None else replace(recipe, text=path.parent / recipe.text)


def parse_only(recipe: EncodingRecipe, only: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return pairs of encoding and seed from words such as ``rope:0`` or ``alibi``; all of the recipe without words."""
    if not only:
        return [(encoding, seed) for seed in recipe.seeds for encoding in recipe.encodings]
    pairs: list[tuple[str, int]] = []
    for word in only:
        encoding, colon, seed = word.partition(":")
        check_encoding(encoding)
        if colon and not re.fullmatch("[0-9]{1,19}", seed):
            raise ConfigError(f"--only {word!r} is not of the form encoding:seed, such as rope:0")
        if encoding not in recipe.encodings:
            raise ConfigError(f"--only {word!r}: the recipe's encodings are {', '.join(recipe.encodings)}")
        if colon and int(seed) not in recipe.seeds:
            raise ConfigError(f"--only {word!r}: the recipe's seeds are {', '.join(map(str, recipe.seeds))}")
        pairs += [(encoding, number) for number in ((int(seed),) if colon else recipe.seeds)]
    return list(dict.fromkeys(pairs))


def check_encoding(name: str) -> None:
    """Check that there is an encoding of that name."""
    if name not in ENCODINGS:
        raise ConfigError(f"there is no encoding '{name}': {nearest(name, ENCODINGS)}")
