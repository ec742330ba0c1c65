"""Loss and retrieval beyond the trained length, per length method: options."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherewhat.boundary import MOST_TOKENS, check_at_most, read_user_file
from wherewhat.errors import ConfigError
from wherewhat.lengths import METHODS, find_method
from wherewhat.options import option

if TYPE_CHECKING:
    from wherewhat.caches.plan import Plan
    from wherewhat.lengths.method import LengthMethod

LADDER = (1.25, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Multiples of the trained length up to which losses are averaged, each from the previous one."""


@dataclass(frozen=True)
class ExtendConfig:
    """Options of the extend measurement."""

    methods: tuple[str, ...] = option(tuple(METHODS), "length methods to compare; none is the unmodified model")
    trained: int | None = option(None, "trained length; that of the model's configuration if not given")
    window: int | None = option(None, "window of methods that have one; each method's default if not given")
    depths: tuple[int, ...] = option((0, 25, 50, 75, 100), "depths of planted sequences, percent of the text, 0 first")
    run: int = option(16, "tokens of a planted sequence, a quarter of which is the cue")
    retrieval: bool = option(
        False, "also measure a second copy of the text, a pass key and four codes stated in it", later=True
    )
    plan: str | None = option(
        None, "file of a plan: its heads with full attention look far under near-far, not all", later=True
    )
    top: int | None = option(
        None, "far keys that a query sees under near-far; the method's default if not given", later=True
    )
    distance: int | None = option(
        None, "distance at which far keys are seen under near-far; its window if not given", later=True
    )

    def __post_init__(self) -> None:
        """Check the values."""
        for name in self.methods:
            find_method(name)
        for name in ("methods", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name}={values}: give one or more, each once")
        for name in ("trained", "window"):
            value = getattr(self, name)
            if value is not None and value < 4:
                raise ConfigError(f"{name} is {value}: give at least 4 tokens")
        if min(self.depths) < 0 or max(self.depths) > 100:
            raise ConfigError(f"depths={self.depths}: percentages are from 0 to 100")
        most = {name: getattr(self, name) for name in ("trained", "window", "run", "top", "distance")}
        check_at_most(MOST_TOKENS, **most)
        if self.top is not None and self.top < 1:
            raise ConfigError(f"top is {self.top}: give at least 1 far key")
        if self.distance is not None and self.distance < 1:
            raise ConfigError(f"distance is {self.distance}: give at least 1 token")
        if self.plan is not None and not _HASHED.search(self.plan):
            object.__setattr__(self, "plan", f"{self.plan}@{_file_hash(self.plan)}")
        if self.run < 2:
            raise ConfigError(f"run is {self.run}: a planted sequence is a cue and its continuation, at least 2 tokens")

    @property
    def code(self) -> dict[str, type[LengthMethod]]:
        """The methods that are not of this package, by name: the numbers depend on their code."""
        return {name: find_method(name) for name in self.methods if name not in METHODS}

    def loaded_plan(self) -> Plan | None:
        """Return the plan, if there is one, from its file."""
        if self.plan is None:
            return None
        from wherewhat.caches.plan import Plan

        path, _, known = self.plan.rpartition("@")
        if _file_hash(path) != known:
            raise ConfigError(f"the plan {path} is no longer the file it was: give it again")
        return Plan.load(path)

    def method(self, name: str, *, trained: int, length: int, plan: Plan | None = None) -> LengthMethod:
        """Return the method of that name, fitted to texts of ``length`` tokens."""
        kind = find_method(name)
        own: dict[str, Any] = {}
        if self.window is not None and "window" in kind.__dataclass_fields__:
            own["window"] = self.window
        if "plan" in kind.__dataclass_fields__:
            given = {"plan": plan, "top": self.top, "distance": self.distance}
            own |= {name: value for name, value in given.items() if value is not None}
        return kind(**own).fitted(trained=trained, length=length)


_HASHED = re.compile("@[0-9a-f]{12}$")
"""End of a plan's name with the hash of its file, so that runs with another plan of the same name are not reused."""


def _file_hash(path: str) -> str:
    return hashlib.sha256(read_user_file(path, name="the plan")).hexdigest()[:12]
