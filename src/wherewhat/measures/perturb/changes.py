"""Perturbations of a text: word order, letters, positions and features, by rate and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import Text
from wherewhat.measures.perturb import PerturbConfig


def _permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _count(units: int, rate: float, *, per: int = 1) -> int:
    """Return the number of groups of ``per`` units in a share of all units, rounded to the nearest."""
    return min(units // per, int(rate * units / per + 0.5))


def random_units(count: int, rate: float, seed: int) -> Tensor:
    """Return a share of ``count`` units in random order, ``(m,)``."""
    return _permutation(count, seed)[: _count(count, rate)]


def random_pairs(count: int, rate: float, seed: int) -> Tensor:
    """Return uniformly drawn disjoint pairs that are a share of ``count`` units, ``(pairs, 2)``."""
    pairs = _count(count, rate, per=2)
    return _permutation(count, seed)[: 2 * pairs].view(pairs, 2)


def adjacent_pairs(count: int, rate: float, seed: int) -> Tensor:
    """Return uniformly drawn disjoint pairs of neighbours that are a share of ``count`` units, ``(pairs, 2)``."""
    pairs = _count(count, rate, per=2)
    # With each pair as one unit there are count - pairs units, any of which may be the pairs.
    starts = _permutation(count - pairs, seed)[:pairs].sort().values + torch.arange(pairs)
    return torch.stack([starts, starts + 1], 1)


def jitter(n: int, rate: float, seed: int, *, prefix: int = 0, reach: int = 8) -> tuple[Tensor, Tensor]:
    """Move a share of the tokens by up to ``reach``; return positions ``(n,)`` and True for moved tokens ``(n,)``."""
    chosen = random_units(n - prefix, rate, seed) + prefix
    # Drawn for all tokens, so that a higher rate adds tokens and keeps the steps of the others.
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    steps = torch.randint(1, reach + 1, (n,), generator=generator)[chosen]
    steps = torch.where(torch.rand(n, generator=generator)[chosen] < 0.5, -steps, steps)
    steps = torch.where(chosen + steps < 0, -steps, steps)
    return _moved(n, chosen, chosen + steps)


def swap(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """Swap the positions of a share of the tokens in random pairs."""
    pairs = random_pairs(n - prefix, rate, seed) + prefix
    return _moved(n, pairs.flatten(), pairs.flip(1).flatten())


def shuffle(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """Permute the positions of a share of the tokens in one random cycle: none keeps its own."""
    chosen = random_units(n - prefix, rate, seed) + prefix
    if len(chosen) < 2:
        chosen = chosen[:0]
    return _moved(n, chosen, chosen.roll(-1))


def gaps(n: int, rate: float, seed: int, *, prefix: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """Leave out ``size`` positions before a share of the tokens, which count as moved."""
    chosen = random_units(n - prefix, rate, seed) + prefix
    before = torch.zeros(n, dtype=torch.int64)
    before[chosen] = size
    return torch.arange(n) + before.cumsum(0), before > 0


def shift(n: int, rate: float) -> tuple[Tensor, Tensor]:
    """Add a share of n to all positions; no token counts as moved, because all distances stay the same."""
    return torch.arange(n) + _count(n, rate), torch.zeros(n, dtype=torch.bool)


def _moved(n: int, tokens: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    positions, moved = torch.arange(n), torch.zeros(n, dtype=torch.bool)
    positions[tokens] = to
    moved[tokens] = True
    return positions, moved


@dataclass(frozen=True)
class Change:
    """A perturbation of a text of n tokens.

    Attributes:
        ids: Tokens of the perturbed text, ``(m,)``; m differs from n only if words are respelled.
        origin: Index of each in the intact text, ``(m,)``; -1 for tokens that are not in it.
        moved: True for the tokens that were perturbed, ``(m,)``; False for those that only shift because units of
            different lengths were swapped.
        positions: Positions of the tokens, ``(m,)``; None for consecutive ones.
        orders: Order in which hidden states enter layers, ``(m,)`` by layer.
    """

    ids: Tensor
    origin: Tensor
    moved: Tensor
    positions: Tensor | None = None
    orders: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def untouched(self) -> Tensor:
        """True for targets 1 to m-1 whose own token and previous token were not moved, ``(m - 1,)`` bool."""
        return ~(self.moved[1:] | self.moved[:-1])


def no_change(ids: Tensor) -> Change:
    """Return the text ``ids`` ``(n,)`` unchanged."""
    return Change(ids, torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.bool))


def swapped_order(n: int, spans: Sequence[tuple[int, int]], pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of n tokens after swapping spans of them.

    Args:
        n: Number of tokens.
        spans: Disjoint spans, first token and one past the last, in order. Tokens between spans stay between them.
        pairs: Indices of the spans to swap with each other, ``(pairs, 2)``, no span twice.

    Returns:
        Order, ``(n,)``: index i takes token ``order[i]``; and True where a token of a swapped span is, ``(n,)`` bool.
    """
    source = list(range(len(spans)))
    for earlier, other in pairs.tolist():
        source[earlier], source[other] = other, earlier
    order: list[int] = []
    moved: list[bool] = []
    at = 0
    for index, (start, end) in enumerate(spans):
        first, last = spans[source[index]]
        order += [*range(at, start), *range(first, last)]
        moved += [False] * (start - at) + [source[index] != index] * (last - first)
        at = end
    order += range(at, n)
    moved += [False] * (n - at)
    return torch.tensor(order, dtype=torch.int64), torch.tensor(moved, dtype=torch.bool)


def replace_spans(ids: Tensor, spans: Sequence[tuple[int, int]], others: Sequence[Sequence[int]]) -> Change:
    """Replace disjoint spans, given in order, of the text ``ids`` ``(n,)`` by other tokens."""
    tokens, origin = ids.tolist(), list(range(len(ids)))
    for (start, end), other in reversed(list(zip(spans, others, strict=True))):
        tokens[start:end] = other
        origin[start:end] = [-1] * len(other)
    index = torch.tensor(origin, dtype=torch.int64)
    return Change(torch.tensor(tokens, dtype=torch.int64), index, index < 0)


def make_change(
    text: Text, kind: str, rate: float, seed: int, config: PerturbConfig, *, layer: int | None = None
) -> Change:
    """Return a text with a share of its units perturbed: tokens, words, sentences, or words that can be respelled.

    For one seed, tokens, positions and features are swapped in the same pairs, so that they can be compared; ``layer``
    is that at which features are swapped.
    """
    ids, prefix = text.ids[0].cpu(), text.prefix
    n = len(ids)
    if kind.startswith("position_"):
        positions, moved = _positions(n, kind, rate, seed, config, prefix)
        return Change(ids, torch.arange(n), moved, positions=positions)
    if kind == "letters":
        return _respelled(text, rate, seed)
    unit = kind.removeprefix("adjacent_")
    spans = units(text, "tokens" if unit == "features" else unit)
    draw = adjacent_pairs if kind.startswith("adjacent_") else random_pairs
    order, moved = swapped_order(n, spans, draw(len(spans), rate, seed))
    if kind == "features":
        assert layer is not None
        return Change(ids, torch.arange(n), moved, orders={layer: order})
    return Change(ids[order], order, moved)


def units(text: Text, unit: str) -> list[tuple[int, int]]:
    """Return the spans of tokens, words or sentences that can be swapped."""
    if unit == "tokens":
        return [(t, t + 1) for t in range(text.prefix, text.ids.shape[1])]
    spans = text.spans.words if unit == "words" else text.spans.sentences
    if spans is None:
        raise MeasureError(f"the tokenizer does not report where {unit} are: leave kinds of {unit} out")
    if len(spans) < 2:
        raise MeasureError(f"a text of {text.ids.shape[1]} tokens has {len(spans)} whole {unit}: use a longer text")
    return list(spans)


def _respelled(text: Text, rate: float, seed: int) -> Change:
    spans = text.spans
    if spans.words is None or not any(spans.respelled):
        raise MeasureError("no word of the text can be respelled with this tokenizer: leave the kind letters out")
    can = [(span, other) for span, other in zip(spans.words, spans.respelled, strict=True) if other]
    chosen = [can[i] for i in sorted(random_units(len(can), rate, seed).tolist())]
    return replace_spans(text.ids[0].cpu(), [span for span, _ in chosen], [other for _, other in chosen])


def _positions(n: int, kind: str, rate: float, seed: int, config: PerturbConfig, prefix: int) -> tuple[Tensor, Tensor]:
    match kind.removeprefix("position_"):
        case "jitter":
            return jitter(n, rate, seed, prefix=prefix, reach=config.reach)
        case "swap":
            return swap(n, rate, seed, prefix=prefix)
        case "shuffle":
            return shuffle(n, rate, seed, prefix=prefix)
        case "gaps":
            return gaps(n, rate, seed, prefix=prefix, size=config.gap)
        case _:
            return shift(n, rate)
