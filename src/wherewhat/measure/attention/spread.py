"""How far attention spreads: its entropy, and the weight parked on the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measure.attention.weights import WeightBlock
from wherewhat.measure.base import Metric


@dataclass(frozen=True)
class AttentionSpread:
    """How far the heads of one layer spread their attention on one document.

    Attributes:
        entropy: Mean entropy of the attention weights over queries that see at least two keys, nats, ``(heads,)``.
        uniform_entropy: The same for uniform attention over the visible keys, and the model's own sink column where it
            has one: the most there can be.
        sink_mass: Mean weight on the first tokens over queries after them, ``(heads,)``.
        uniform_sink_mass: The same for uniform attention over the visible keys.
        learned_sink_mass: Mean weight on the model's own sink column, ``(heads,)``; None where it has none.
    """

    entropy: Tensor
    uniform_entropy: float
    sink_mass: Tensor
    uniform_sink_mass: float
    learned_sink_mass: Tensor | None

    def heads(self) -> dict[str, Tensor]:
        """Values per head by metric."""
        found = {"entropy": self.entropy, "sink_mass": self.sink_mass}
        return found if self.learned_sink_mass is None else found | {"learned_sink_mass": self.learned_sink_mass}

    def controls(self) -> dict[str, float]:
        """What uniform attention gives, by metric."""
        return {"entropy_uniform": self.uniform_entropy, "sink_mass_uniform": self.uniform_sink_mass}


class SpreadSums:
    """Sums behind ``AttentionSpread``, one block of queries after the other.

    Args:
        attention: The layer whose blocks will be added.
        sink_tokens: Number of first tokens that count as attention sink.

    Raises:
        MeasureError: If the text has no query after the sink tokens.
    """

    def __init__(self, attention: LayerAttention, sink_tokens: int) -> None:
        heads, n, device = attention.heads, attention.n, attention.rot_q.device
        if n <= sink_tokens:
            raise MeasureError(f"sink_tokens is {sink_tokens}, but the text has only {n} tokens: give a longer text")
        self.sink_tokens = sink_tokens
        self._learned_sink = attention.sinks is not None
        self._n = n
        self._entropy, self._sink, self._learned = torch.zeros(3, heads, dtype=torch.float64, device=device)
        self._uniform_entropy = self._uniform_sink = 0.0
        self._deciding = self._after_sink = 0

    def add(self, block: WeightBlock) -> None:
        """Take in the next block."""
        first = slice(self.sink_tokens)
        seen = block.seen
        nats = torch.special.entr(block.weights).sum(-1) + torch.special.entr(block.missing)
        choice = seen >= 2
        late = torch.arange(block.rows.start, block.rows.stop, device=seen.device) >= self.sink_tokens
        self._entropy += nats[:, choice].sum(-1).double()
        self._sink += block.weights[:, late, first].sum((-1, -2)).double()
        self._learned += block.missing.sum(-1).double()
        # The sink column counts in the entropy, so it is one more place to spread over.
        self._uniform_entropy += float((seen[choice] + self._learned_sink).double().log().sum())
        self._uniform_sink += float((block.visible[late, first].sum(-1) / seen[late].clamp_min(1)).double().sum())
        self._deciding += int(choice.sum())
        self._after_sink += int(late.sum())

    def result(self) -> AttentionSpread:
        """Means over the queries of all blocks."""
        return AttentionSpread(
            entropy=(self._entropy / max(1, self._deciding)).cpu(),
            uniform_entropy=self._uniform_entropy / max(1, self._deciding),
            sink_mass=(self._sink / self._after_sink).cpu(),
            uniform_sink_mass=self._uniform_sink / self._after_sink,
            learned_sink_mass=(self._learned / self._n).cpu() if self._learned_sink else None,
        )


SPREAD_METRICS = (
    Metric(
        "entropy",
        "entropy",
        "nats",
        "How many keys a query spreads over: e to this power; the control is attention that spreads evenly.",
        "entropy_uniform",
        "even spread",
    ),
    Metric(
        "sink_mass",
        "sink mass",
        "",
        "Share of attention parked on the first tokens; the control is what even attention would put there.",
        "sink_mass_uniform",
        "even spread",
    ),
)
