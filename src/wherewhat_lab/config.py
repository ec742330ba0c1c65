"""Options of a laboratory model and of its training; the defaults are those of arXiv 2605.31558."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from wherewhat.boundary import MOST_LAYERS, MOST_REPEATS, check_at_most
from wherewhat.errors import ConfigError
from wherewhat.options import check_integer, check_seed, option

EncodingName = Literal["rope", "p-rope", "partial", "alibi", "learned", "nope", "pope"]
BlockName = Literal["parallel", "sequential", "llama"]
"""GPT-J: attention and MLP in parallel; GPT-2: in sequence; Llama: in sequence, with RMSNorm and SwiGLU."""
Biases = Literal["all", "inner", "none"]
Precision = Literal["highest", "high", "medium"]
"""torch's names: float32; TF32 products on a GPU; also bfloat16 products on CPUs that support them."""


_MOST_PARAMETERS = 10**9
_MOST_STEPS = 10**8
_MOST_SEQUENCES = 10**7
_MOST_DRAWS = 10**9


@dataclass(frozen=True)
class LabConfig:
    """Options of a small GPT-J; ``norm``, ``mlp``, ``residual``, ``scale`` and ``angles`` are for constructions."""

    vocabulary: int = option(136, "number of tokens; determined by the task")
    layers: int = option(12, "number of layers")
    heads: int = option(1, "attention heads of each layer")
    width: int = option(128, "dimensions of the residual stream, divided among the heads")
    encoding: EncodingName = option("rope", "position encoding: rope, p-rope, partial, alibi, learned, nope or pope")
    base: float = option(10_000.0, "RoPE's base: the frequencies are base^(-2i/d), of PoPE base^(-i/d)")
    rotary_share: float | None = option(
        None, "share of frequencies (p-rope, 0.75) or of dimensions (partial, 0.25) that rotate"
    )
    frequencies: tuple[str, ...] = option(
        (), "planes that heads may use, as layer.head:planes, such as *.*:0-15 or 2.0:0+4-7; all by default"
    )
    positions: int = option(512, "positions of the learned encoding, and of exported Hugging Face models")
    dropout: float = option(0.1, "dropout of embeddings, attention weights, and outputs of attention and MLP")
    seed: int = option(0, "seed of the initial weights")
    norm: bool = option(True, "LayerNorm before each layer and before the output")
    mlp: bool = option(True, "an MLP beside each layer's attention")
    residual: bool = option(True, "use residual connections")
    scale: float | None = option(None, "factor on the dot products; 1/√d by default")
    angles: tuple[float, ...] = option((), "RoPE's angles per position of the first planes; from base by default")
    block: BlockName = option("parallel", "layers: parallel (GPT-J), sequential (GPT-2) or llama (RMSNorm and SwiGLU)")
    biases: Biases = option(
        "all", "all (GPT-J), inner (norms and MLPs, not the output) or none; llama has no inner ones"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("vocabulary", "layers", "heads", "width", "positions"):
            check_integer(name, getattr(self, name), least=1)
        check_at_most(MOST_LAYERS, layers=self.layers)
        parameters = self.width * (self.vocabulary + self.positions + 12 * self.layers * self.width)
        if parameters > _MOST_PARAMETERS:
            raise ConfigError(
                f"width={self.width}, layers={self.layers}, vocabulary={self.vocabulary} and "
                f"positions={self.positions} give {parameters:.1e} parameters: at most {_MOST_PARAMETERS:.0e} work"
            )
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width {self.width} does not give each of {self.heads} heads an even number of dimensions"
            )
        check_seed(self.seed)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}: give a number from 0 to below 1")
        if not self.base > 0:
            raise ConfigError(f"base is {self.base}: give a positive number")
        if self.rotary_share is not None:
            if self.encoding not in ("p-rope", "partial"):
                raise ConfigError(f"rotary_share is for the encodings p-rope and partial, not for {self.encoding}")
            if not 0 < self.rotary_share <= 1:
                raise ConfigError(f"rotary_share is {self.rotary_share}: give a number above 0, up to 1")
        if self.angles and (self.encoding != "rope" or len(self.angles) > self.head_width // 2):
            raise ConfigError(
                f"{len(self.angles)} angles do not fit {self.encoding} with {self.head_width // 2} planes: give rope, "
                "and up to as many as there are planes"
            )

    @property
    def head_width(self) -> int:
        """Dimensions of a head."""
        return self.width // self.heads

    @property
    def inner_bias(self) -> bool:
        """Whether norms and MLPs have biases."""
        return self.biases != "none" and self.block != "llama"


class Arithmetic(NamedTuple):
    """How the steps of a training compute.

    Attributes:
        products: Precision of float32 matrix products.
        half: Whether products are bfloat16; weights and sums are float32.
        fused: Whether small GPU kernels are fused by ``torch.compile``.
        clip_norm: Largest norm of the gradient; None for no clipping.
    """

    products: Precision = "highest"
    half: bool = False
    fused: bool = False
    clip_norm: float | None = None


@dataclass(frozen=True)
class Training:
    """Options of every training of a laboratory model; see its subclasses.

    Attributes:
        cosine: Whether the learning rate falls along a cosine instead of linearly.
    """

    cosine: ClassVar[bool] = False

    steps: int = option(6750, "training steps; 6,750 are one epoch of 432,000 sequences")
    batch: int = option(64, "sequences of a step")
    learning_rate: float = option(1e-4, "learning rate after the warm-up")
    warmup: int = option(750, "steps over which the learning rate rises from 0; afterwards it falls to 0")
    beta1: float = option(0.95, "AdamW's decay rate of the first moment")
    beta2: float = option(0.999, "AdamW's decay rate of the second moment")
    epsilon: float = option(1e-8, "AdamW's epsilon")
    weight_decay: float = option(1e-4, "AdamW's weight decay, of all weights")
    data_seed: int = option(0, "seed of the sequences")
    seed: int = option(0, "seed of the order of the sequences and of dropout")
    save_every: int = option(500, "steps between saved states, from which training can be resumed")
    threads: int | None = option(
        None, "CPU threads, each with a part of the batch, which affects rounding; torch's number by default"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("steps", "batch", "save_every"):
            check_integer(name, getattr(self, name), least=1)
        check_integer("warmup", self.warmup, least=0)
        for name in ("data_seed", "seed"):
            check_seed(getattr(self, name), name)
        check_integer("threads", self.threads, least=1, optional=True)
        check_at_most(_MOST_STEPS, steps=self.steps, warmup=self.warmup, save_every=self.save_every)
        check_at_most(MOST_REPEATS, threads=self.threads)
        if self.steps * self.batch > _MOST_DRAWS:
            raise ConfigError(f"{self.steps} steps of {self.batch} sequences: give at most {_MOST_DRAWS:,} in all")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}: give a positive number")
        for name in ("beta1", "beta2", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number from 0 to below 1")

    @property
    def arithmetic(self) -> Arithmetic:
        """How the steps compute."""
        return Arithmetic()


@dataclass(frozen=True)
class TrainConfig(Training):
    """Options of training on a task."""

    sequences: int = option(480_000, "sequences drawn from the task: 90 % for training, 0.5 % and 9.5 % held out")
    record_every: int = option(50, "steps between two records of the model")
    precision: Precision = option(
        "high", "products: highest (float32), high (TF32 on a GPU) or medium (bfloat16 on a CPU); sums are float32"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for name in ("sequences", "record_every"):
            check_integer(name, getattr(self, name), least=1)
        check_at_most(_MOST_SEQUENCES, sequences=self.sequences)

    @property
    def arithmetic(self) -> Arithmetic:
        """How the steps compute."""
        return Arithmetic(self.precision)
