"""Options of ``wherewhat extend``."""

from __future__ import annotations

from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.extend import METHODS, LengthMethod, find
from wherewhat.measure.base import option

_NAMES = tuple(method.name for method in METHODS)


@dataclass(frozen=True)
class ExtendConfig:
    """Options of the extend measurement."""

    methods: tuple[str, ...] = option(_NAMES, "length methods to compare; none is the untouched model")
    trained: int | None = option(None, "length the model was trained on; what the model says if not given")
    window: int | None = option(None, "window of methods that have one; each method's own if not given")
    depths: tuple[int, ...] = option((0, 25, 50, 75, 100), "where runs are planted, in percent of the text; 0 is first")
    run: int = option(16, "tokens of a planted run, a quarter of which is the cue")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in self.methods:
            find(name)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise ConfigError(f"methods={self.methods}: give one or more, each once")
        for name in ("trained", "window"):
            value = getattr(self, name)
            if value is not None and value < 4:
                raise ConfigError(f"{name} is {value}: give at least 4 tokens")
        if not self.depths or len(set(self.depths)) < len(self.depths):
            raise ConfigError(f"depths={self.depths}: give one or more, each once")
        if min(self.depths) < 0 or max(self.depths) > 100:
            raise ConfigError(f"depths={self.depths}: percentages are from 0 to 100")
        if self.run < 2:
            raise ConfigError(f"run is {self.run}: a planted run is a cue and what follows, 2 tokens at least")

    def method(self, name: str, *, trained: int, length: int) -> LengthMethod:
        """The method of that name for texts of a length."""
        kind = find(name)
        own = {"window": self.window} if self.window is not None and "window" in kind.__dataclass_fields__ else {}
        return kind(**own).fitted(trained=trained, length=length)
