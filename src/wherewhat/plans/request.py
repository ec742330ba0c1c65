"""What a plan has to reach, and how it is made."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from wherewhat.boundary import MOST_DOCUMENTS, MOST_TOKENS, check_at_most, size_in_bytes
from wherewhat.errors import ConfigError
from wherewhat.options import nearest, option

if TYPE_CHECKING:
    from wherewhat.caches.plan import Unit
    from wherewhat.plans.selectors import Selector


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
    choose: int | None = option(
        None, "Number of documents on which heads are scored (default: 2; with the selector auto 4)."
    )
    documents: int = option(3, "Number of other documents on which the plan is measured; 0 for none.")
    tokens: int = option(512, "Tokens of each document.")
    window: int | None = option(None, "Last keys that limited heads see (default: tokens / 16, at least 64).")
    sinks: int = option(4, "First keys that limited heads see.")
    unit: Unit = option("group", "group (heads that share keys), layer, or head (single query heads, for analysis).")
    selector: Selector = option(
        "auto",
        "How heads are ranked: ranks, symbolic, distance, output, induction, mass; auto takes the one of them that "
        "costs least on the documents for choosing, or reaches a goal with the smallest share; also random; with "
        "--costs also costs and combined, with --greedy also greedy, of layers also interleaved and ends.",
    )
    compare: tuple[Selector, ...] = ("mass", "random")
    curves: bool = option(False, "Measure all selectors at several shares (slow).")
    costs: bool = option(False, "Measure the costs of single heads (slow; use a GPU).")
    greedy: bool = option(False, "Choose step by step, by the measured cost of each choice (slow; use a GPU).")
    beyond: bool = option(False, "Allow texts longer than the model's trained length.")
    context: int | None = option(
        None, "Tokens of a text whose cache is computed (default: the model's trained length)."
    )
    memory: str | None = option(
        None, "Memory that weights and caches share (default: that of the GPU), such as 80GB.", metavar="SIZE"
    )

    def __post_init__(self) -> None:
        """Check the values."""
        for names, kind, what in (
            (("budget", "max_rise", "min_found"), (int, float), "a number"),
            (("tokens", "window", "sinks", "choose", "documents", "context"), int, "a whole number"),
            (("memory",), str, "a size such as 80GB"),
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
        from wherewhat.plans.selectors import PLACED, SELECTORS  # imports torch, which other requests do not need

        for selector in (self.selector, *self.compare):
            if selector not in SELECTORS:
                raise ConfigError(f"there is no selector '{selector}': {nearest(selector, SELECTORS)}")
        for name, least in (("choose", 1), ("documents", 0), ("sinks", 0), ("tokens", 2), ("context", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name} is {value}: at least {least} is needed")
        check_at_most(MOST_TOKENS, **{"--tokens": self.tokens, "--window": self.window, "--sinks": self.sinks})
        check_at_most(MOST_TOKENS, **{"--context": self.context})
        _ = self.memory_bytes
        check_at_most(MOST_DOCUMENTS, **{"--choose": self.choose, "--documents": self.documents})
        if self.curves and self.documents == 0:
            raise ConfigError("--curves measures selectors, but --documents is 0: at least 1 is needed")
        from wherewhat.caches.plan import UNITS

        if self.unit not in UNITS:
            raise ConfigError(f"--unit is {self.unit!r}: choose group, layer or head")
        if "auto" in (self.selector, *self.compare) and self.choosing < 2:
            raise ConfigError(
                "the selector auto measures each document for choosing with scores of the others, but --choose is 1: "
                "give 2 or more, or name a --selector"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"--window is {self.window}: at least 1 is needed")
        if self.tokens <= self.keys + self.sinks:
            raise ConfigError(
                f"texts of {self.tokens} tokens are within the window of {self.keys} keys and {self.sinks} first ones: "
                "give more --tokens or a smaller --window"
            )
        if {"costs", "combined"} & set(self.selectors) and not self.costs:
            raise ConfigError("the selectors costs and combined need the costs of single heads: add --costs")
        placed = [name for name in (self.selector, *self.compare) if name in PLACED]
        if placed and self.unit != "layer":
            raise ConfigError(f"the selector {placed[0]} chooses whole layers: add --unit layer")
        if "greedy" in self.selectors and not self.greedy:
            raise ConfigError("the selector greedy needs measured costs of each choice: add --greedy")

    @property
    def keys(self) -> int:
        """The window in tokens."""
        return max(64, self.tokens // 16) if self.window is None else self.window

    @property
    def memory_bytes(self) -> int | None:
        """The memory that weights and caches share; None for that of the GPU."""
        return None if self.memory is None else size_in_bytes(self.memory, name="--memory")

    @property
    def choosing(self) -> int:
        """The number of documents for choosing."""
        return self.choose or (4 if self.selector == "auto" else 2)

    @property
    def share(self) -> float | None:
        """The share to keep; None if goals determine it."""
        goals = self.max_rise is not None or self.min_found is not None
        return None if goals else 0.25 if self.budget is None else self.budget

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """All selectors to evaluate, that of the plan first."""
        from wherewhat.plans.selectors import PLACED, SELECTORS

        layers = self.unit == "layer"
        possible = {"costs": self.costs, "combined": self.costs, "greedy": self.greedy, "auto": self.choosing > 1}
        possible |= dict.fromkeys(PLACED, layers)
        known = [name for name in SELECTORS if possible.get(name, True)]
        asked = [name for name in ("greedy", *PLACED) if possible[name]]
        return tuple(dict.fromkeys((self.selector, *(known if self.curves else [*self.compare, *asked]))))

    def shares(self, share: float) -> dict[Selector, list[float]]:
        """Return the shares to evaluate by selector, without 0 and 1, if ``share`` is to be kept."""
        around = {share / 2, share, min(1.0, 2 * share)}
        every = sorted(x for x in around | ({0.1, 0.25, 0.5} if self.curves else set()) if 0 < x < 1)
        return {
            name: every if self.curves or name == self.selector else [x for x in (share,) if 0 < x < 1]
            for name in self.selectors
        }
