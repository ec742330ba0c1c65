"""The study as a file: encodings, seeds, text, model, training, what is recorded and what is measured afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from wherewhat.errors import ConfigError
from wherewhat.extend.methods import METHODS, find_method
from wherewhat.lab.config import EncodingName, LabConfig
from wherewhat.lab.language import VOCABULARY, LanguageConfig
from wherewhat.measures.perturb.measurement import KINDS
from wherewhat.options import build_config, check_seed, config_values, nearest, option, read_recipe_file

ENCODINGS: tuple[str, ...] = get_args(EncodingName)


@dataclass(frozen=True)
class WatchConfig:
    """What is recorded while a model learns, on fixed held-out bytes."""

    records: int = option(40, "number of records, at logarithmically spaced steps")
    loss_windows: int = option(32, "windows of the context's length that the loss is known from")
    documents: int = option(8, "how many of them heads are looked at on")
    plane_documents: int = option(2, "how many of those RoPE's planes are looked at on")
    rank_documents: int = option(2, "how many of those the effective rank of queries and keys is known from")
    queries: int = option(4, "queries of each, spread evenly up to the last, whose keys are swapped")
    repeats: int = option(2, "sequences of random bytes that repeat themselves, for induction")
    seed: int = option(0, "seed of the windows and of the random bytes")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for f in fields(self):
            least = {"seed": 0, "records": 2}.get(f.name, 1)
            if getattr(self, f.name) < least:
                raise ConfigError(f"{f.name} is {getattr(self, f.name)}: at least {least} is needed")
        check_seed(self.seed)
        if not max(self.plane_documents, self.rank_documents) <= self.documents <= self.loss_windows:
            raise ConfigError(
                f"documents={self.documents} must be among the {self.loss_windows} loss_windows, and hold the "
                f"{self.plane_documents} plane_documents and {self.rank_documents} rank_documents"
            )


@dataclass(frozen=True)
class AfterConfig:
    """What is measured once a model is trained."""

    times: int = option(16, "how many times the context the longest text has")
    length_documents: int = option(8, "long texts")
    methods: tuple[str, ...] = option(tuple(METHODS), "length methods, those that apply are used")
    kinds: tuple[str, ...] = option(
        ("words", "adjacent_words", "adjacent_tokens", "position_jitter"), "kinds of perturbation"
    )
    rates: tuple[float, ...] = option((0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), "shares of units to disturb")
    draws: int = option(2, "draws of each, averaged")
    perturb_documents: int = option(12, "texts to disturb")
    strengths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "values of λ on what is not additive")
    residual_documents: int = option(12, "texts for the residual")
    seed: int = option(1, "seed of the windows: other texts than those recorded on")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in ("times", "length_documents", "perturb_documents", "residual_documents", "draws"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        check_seed(self.seed)
        for name in self.methods:
            find_method(name)
        for kind in self.kinds:
            if kind not in KINDS or kind in ("letters", "sentences", "features"):
                raise ConfigError(f"there is no kind of perturbation of bytes '{kind}': {nearest(kind, KINDS)}")


@dataclass(frozen=True)
class Recipe:
    """What a study consists of.

    Attributes:
        encodings: Encodings of the models.
        seeds: Seeds of their weights.
        text: File of the text; None for the embedded prose.
        text_bytes: Use only so many of its first bytes; 0 for all.
        held_out: Share of the text, at its end, that is never trained on.
        model: The model, whatever its encoding.
        training: How it is trained.
        watch: What is recorded meanwhile.
        after: What is measured afterwards.
    """

    encodings: tuple[str, ...] = ENCODINGS
    seeds: tuple[int, ...] = (0, 1)
    text: Path | None = None
    text_bytes: int = 0
    held_out: float = 0.05
    model: LabConfig = field(
        default_factory=lambda: LabConfig(vocabulary=VOCABULARY, layers=6, heads=6, width=384, dropout=0.0)
    )
    training: LanguageConfig = field(
        default_factory=lambda: LanguageConfig(steps=2000, batch=128, warmup=100, save_every=1000)
    )
    watch: WatchConfig = field(default_factory=WatchConfig)
    after: AfterConfig = field(default_factory=AfterConfig)

    @classmethod
    def of(cls, values: Mapping[str, Any], *, folder: Path | None = None) -> Recipe:
        """A recipe from plain values.

        Args:
            values: Top-level names, and tables ``model``, ``training``, ``watch`` and ``after``.
            folder: Where a relative name of a text starts.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"a recipe has no '{name}': {nearest(name, known)}")
        standard = cls()
        found: dict[str, Any] = {}
        for name in ("model", "training", "watch", "after"):
            own = values.get(name, {})
            if not isinstance(own, Mapping):
                raise ConfigError(f"in a recipe, {name} is a table: write [{name}]")
            for given in ("encoding", "seed", "vocabulary") if name == "model" else ("seed",) * (name == "training"):
                if given in own:
                    raise ConfigError(f"{given} does not belong in [{name}]: encodings, seeds and bytes say it")
            start = getattr(standard, name)
            found[name] = build_config(type(start), {**config_values(start), **own})
        encodings = tuple(_listed(values, "encodings", str, standard.encodings))
        for encoding in encodings:
            check_encoding(encoding)
        seeds = tuple(_listed(values, "seeds", int, standard.seeds))
        for seed in seeds:
            check_seed(seed, "a seed of the recipe")
        text = values.get("text")
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"text={text!r} is not the name of a file")
        return cls(
            encodings=encodings,
            seeds=seeds,
            text=None if text is None else (folder or Path()) / text,
            text_bytes=int(_number(values, "text_bytes", standard.text_bytes)),
            held_out=float(_number(values, "held_out", standard.held_out)),
            **found,
        )

    def model_for(self, encoding: str, seed: int) -> LabConfig:
        """The model with an encoding and initial weights."""
        values = config_values(self.model) | {"encoding": encoding, "seed": seed, "positions": self.training.context}
        config: LabConfig = build_config(LabConfig, values | {"vocabulary": VOCABULARY})
        return config

    def training_for(self, seed: int) -> LanguageConfig:
        """The training of a seed; the data's order is that of all others."""
        return replace(self.training, seed=seed)

    def values(self) -> dict[str, Any]:
        """All that numbers depend on besides encoding, seed, text and device, as plain values."""
        tables = {name: config_values(getattr(self, name)) for name in ("model", "training", "watch", "after")}
        for name in ("encoding", "seed", "positions", "vocabulary"):
            del tables["model"][name]
        del tables["training"]["seed"]
        return {"held_out": self.held_out, **tables}


def read_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file; the text it names is looked for from the file's folder."""
    return Recipe.of(read_recipe_file(path), folder=path.parent)


def parse_only(recipe: Recipe, only: tuple[str, ...]) -> list[tuple[str, int]]:
    """Encodings with seeds to run, from words such as ``rope:0`` or ``alibi``; all of the recipe if there are none."""
    if not only:
        return [(encoding, seed) for seed in recipe.seeds for encoding in recipe.encodings]
    found: list[tuple[str, int]] = []
    for word in only:
        encoding, colon, seed = word.partition(":")
        check_encoding(encoding)
        if colon and not seed.isdecimal():
            raise ConfigError(f"--only {word!r} is not of the form encoding:seed, such as rope:0")
        if encoding not in recipe.encodings:
            raise ConfigError(f"--only {word!r}: the recipe's encodings are {', '.join(recipe.encodings)}")
        if colon and int(seed) not in recipe.seeds:
            raise ConfigError(f"--only {word!r}: the recipe's seeds are {', '.join(map(str, recipe.seeds))}")
        found += [(encoding, one) for one in ((int(seed),) if colon else recipe.seeds)]
    return list(dict.fromkeys(found))


def check_encoding(name: str) -> None:
    """Refuse an encoding that there is not."""
    if name not in ENCODINGS:
        raise ConfigError(f"there is no encoding '{name}': {nearest(name, ENCODINGS)}")


def _listed(values: Mapping[str, Any], name: str, kind: type, standard: tuple[Any, ...]) -> list[Any]:
    given = values.get(name, standard)
    right = isinstance(given, list | tuple) and all(type(x) is kind for x in given)
    if not right or not given or len(set(given)) < len(given):
        what = {int: "whole numbers", str: "names"}[kind]
        raise ConfigError(f"{name}={given!r} must be a list of one or more {what}, each once")
    return list(given)


def _number(values: Mapping[str, Any], name: str, standard: float) -> float:
    given = values.get(name, standard)
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise ConfigError(f"{name}={given!r} must be a number from 0 on")
    return given
