"""Attention on the keys that a query's token, or the token after it, points to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.attention.weights import WeightBlock

TARGETS = ("duplicate_token", "induction", "retrieval")


@dataclass(frozen=True)
class TargetMass:
    """Attention on target keys, mean over the queries that see at least one.

    Attributes:
        mass: Mean total weight on the targets, ``(heads,)`` float64; NaN if no query sees a target.
        hits: Share of those queries whose most attended key is a target, ``(heads,)`` float64; NaN likewise.
        uniform: Mean weight that uniform attention over the visible keys puts on the targets: also the share of hits
            of a key taken at random. NaN likewise.
        queries: Number of those queries.
    """

    mass: Tensor
    hits: Tensor
    uniform: float
    queries: int


def target_keys(ids: Tensor, rows: slice) -> Tensor:
    """Keys that queries look for, were they heads of a known kind, ``(targets, rows, n)`` boolean.

    In the order of ``TARGETS``, for query i and keys j up to i:

    - duplicate token: earlier occurrences of its token, ``j < i`` and ``ids[j] = ids[i]``;
    - induction: what followed them, ``ids[j - 1] = ids[i]`` for ``j - 1 < i`` (Olsson et al. 2022, arXiv 2209.11895,
      prefix matching). In a doubled token that is the query itself. Both are the detection patterns of
      TransformerLens' head detector;
    - retrieval: the token that comes next, ``ids[j] = ids[i + 1]``: what a head attends to that copies it from the
      context (Wu et al. 2024, arXiv 2404.15574, with the text's own next token in place of the generated one). The
      last query has none.

    Args:
        ids: Token ids, ``(n,)``.
        rows: Which queries.
    """
    n = ids.shape[0]
    position = torch.arange(n, device=ids.device)
    query = position[rows, None]
    earlier = (ids[rows, None] == ids) & (position < query)
    followers = torch.nn.functional.pad(earlier, (1, 0))[:, :n]
    following = ids[(query + 1).clamp_max(n - 1)]
    copied = (following == ids) & (position <= query) & (query < n - 1)
    return torch.stack([earlier, followers, copied])


class TargetSums:
    """Sums behind ``TargetMass`` for every target, one block of queries after the other.

    Args:
        attention: The layer whose blocks will be added, n queries over n keys.
        ids: Token ids, ``(n,)``.
    """

    def __init__(self, attention: LayerAttention, ids: Tensor) -> None:
        device = attention.rot_q.device
        self._ids = ids.to(device)
        self._mass, self._hits = torch.zeros(2, len(TARGETS), attention.heads, dtype=torch.float64, device=device)
        self._uniform, self._queries = torch.zeros(2, len(TARGETS), dtype=torch.float64, device=device)

    def add(self, block: WeightBlock) -> None:
        """Take in the next block."""
        targets = target_keys(self._ids, block.rows) & block.visible  # (targets, rows, n)
        count = targets.sum(-1)
        # One small product per query: (heads, n) times (n, targets).
        mass = block.weights.transpose(0, 1) @ targets.to(block.weights.dtype).permute(1, 2, 0)
        best = block.weights.argmax(-1)  # (heads, rows)
        hits = targets.gather(-1, best.T.expand(len(TARGETS), -1, -1))  # (targets, rows, heads)
        self._mass += mass.double().sum(0).T
        self._hits += hits.sum(1)
        self._uniform += (count / block.seen.clamp_min(1).double()).sum(-1)
        self._queries += (count > 0).sum(-1)

    def result(self) -> dict[str, TargetMass]:
        """Means over the queries of all blocks that see a target, by name of the target."""
        # Zero divided by zero is the NaN of a target that no query sees.
        queries = self._queries[:, None]
        mass, hits = (self._mass / queries).cpu(), (self._hits / queries).cpu()
        uniform = (self._uniform / self._queries).tolist()
        counts = self._queries.int().tolist()
        return {name: TargetMass(mass[t], hits[t], uniform[t], counts[t]) for t, name in enumerate(TARGETS)}
