"""The options of training on text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wherewhat.errors import ConfigError
from wherewhat.measure.base import option
from wherewhat.multihop.config import Training, at_least

VOCABULARY = 256
"""Bytes are tokens."""


@dataclass(frozen=True)
class LanguageConfig(Training):
    """How a laboratory model is trained on text."""

    steps: int = option(5000, "training steps")
    batch: int = option(128, "sequences of a step")
    learning_rate: float = option(1e-3, "learning rate after the warm-up")
    warmup: int = option(200, "steps over which the learning rate rises from 0; afterwards it falls to 0 as a cosine")
    beta1: float = option(0.9, "AdamW's decay of the gradient's mean")
    beta2: float = option(0.95, "AdamW's decay of the gradient's square")
    weight_decay: float = option(0.1, "AdamW's weight decay, of all weights")
    data_seed: int = option(0, "seed of the order of the text")
    seed: int = option(0, "seed of what training itself draws; nothing so far")
    context: int = option(512, "tokens that a sequence gives the model")
    clip: float | None = option(1.0, "length that the gradient is cut down to; none for any")
    precision: Literal["bfloat16", "float32"] = option("bfloat16", "products; weights and sums are float32")
    compile: bool = option(True, "fuse small kernels by torch.compile, on a GPU")

    def __post_init__(self) -> None:
        """Refuse values that train nothing.

        Raises:
            ConfigError: If one is out of range.
        """
        super().__post_init__()
        at_least("context", self.context, 1)
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise ConfigError(f"clip is {self.clip}: give a positive number, or none")

    @property
    def cosine(self) -> bool:
        """Whether the learning rate falls along a cosine, in place of a line."""
        return True

    @property
    def half(self) -> bool:
        """Whether products, though not weights and sums, are bfloat16."""
        return self.precision == "bfloat16"

    @property
    def fused(self) -> bool:
        """Whether small GPU kernels are fused by ``torch.compile``."""
        return self.compile

    @property
    def longest_gradient(self) -> float | None:
        """Length that the gradient of all weights together is cut down to; None for any."""
        return self.clip
