"""Perturbations of a text: word order, letters, positions and features, by rate and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measures.measurement import Text
from wherewhat.measures.perturb.measurement import PerturbConfig


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers that depends on the seed alone."""
    return torch.Generator().manual_seed(seed)


def share(count: int, rate: float, *, per: int = 1) -> int:
    """How many groups of ``per`` units make up a share of ``count`` units, to the nearest."""
    return min(count // per, int(rate * count / per + 0.5))


def some(count: int, rate: float, seed: int) -> Tensor:
    """A share of ``count`` units, in random order, ``(m,)``."""
    return torch.randperm(count, generator=seeded(seed))[: share(count, rate)]


def random_pairs(count: int, rate: float, seed: int) -> Tensor:
    """Disjoint pairs, drawn evenly, that make up a share of ``count`` units, ``(pairs, 2)``."""
    pairs = share(count, rate, per=2)
    return torch.randperm(count, generator=seeded(seed))[: 2 * pairs].view(pairs, 2)


def adjacent_pairs(count: int, rate: float, seed: int) -> Tensor:
    """The same of neighbours, ``(pairs, 2)``: every set of so many disjoint pairs of neighbours is as likely."""
    pairs = share(count, rate, per=2)
    # A pair taken for one unit leaves count - pairs units, of which any may be the pairs.
    starts = torch.randperm(count - pairs, generator=seeded(seed))[:pairs].sort().values + torch.arange(pairs)
    return torch.stack([starts, starts + 1], 1)


def jitter(n: int, rate: float, seed: int, *, prefix: int = 0, reach: int = 8) -> tuple[Tensor, Tensor]:
    """A share of the tokens stands up to ``reach`` places before or after where it should; two may stand together."""
    chosen = some(n - prefix, rate, seed) + prefix
    # Drawn for all tokens, so that a higher rate adds tokens and leaves the others' steps as they are.
    generator = seeded(seed + 1_000_000)
    steps = torch.randint(1, reach + 1, (n,), generator=generator)[chosen]
    steps = torch.where(torch.rand(n, generator=generator)[chosen] < 0.5, -steps, steps)
    steps = torch.where(chosen + steps < 0, -steps, steps)
    return _moved(n, chosen, chosen + steps)


def swap(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """A share of the tokens exchange their positions in random pairs."""
    pairs = random_pairs(n - prefix, rate, seed) + prefix
    return _moved(n, pairs.flatten(), pairs.flip(1).flatten())


def shuffle(n: int, rate: float, seed: int, *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """A share of the tokens hand their positions round in one random circle: none keeps its own."""
    chosen = some(n - prefix, rate, seed) + prefix
    if len(chosen) < 2:
        chosen = chosen[:0]
    return _moved(n, chosen, chosen.roll(-1))


def gaps(n: int, rate: float, seed: int, *, prefix: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
    """In front of a share of the tokens ``size`` positions are left out; those tokens count as moved."""
    chosen = some(n - prefix, rate, seed) + prefix
    before = torch.zeros(n, dtype=torch.int64)
    before[chosen] = size
    return torch.arange(n) + before.cumsum(0), before > 0


def shift(n: int, rate: float) -> tuple[Tensor, Tensor]:
    """All tokens stand further on by the share of n; none counts as moved, because all distances stay."""
    return torch.arange(n) + share(n, rate), torch.zeros(n, dtype=torch.bool)


def _moved(n: int, tokens: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
    positions, moved = torch.arange(n), torch.zeros(n, dtype=torch.bool)
    positions[tokens] = to
    moved[tokens] = True
    return positions, moved


@dataclass(frozen=True)
class Change:
    """What is done to a text of n tokens.

    Attributes:
        ids: Tokens of the disturbed text, ``(m,)``; m differs from n only where words are respelled.
        origin: Index of each in the untouched text, ``(m,)``; -1 for tokens that are not in it.
        moved: True for the tokens that were themselves disturbed, ``(m,)``. Those that only slide because units of
            different lengths were swapped are not.
        positions: Where the tokens stand, ``(m,)``; None for one after the other.
        orders: Order in which hidden states enter layers, ``(m,)`` by layer.
    """

    ids: Tensor
    origin: Tensor
    moved: Tensor
    positions: Tensor | None = None
    orders: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def untouched(self) -> Tensor:
        """Targets 1 to m-1 whose own token and the one in front of it were not moved, ``(m - 1,)`` bool."""
        return ~(self.moved[1:] | self.moved[:-1])


def nothing(ids: Tensor) -> Change:
    """The text ``ids`` ``(n,)`` as it is."""
    return Change(ids, torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.bool))


def swapped_order(n: int, spans: Sequence[tuple[int, int]], pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Order of n tokens after swapping spans of them.

    Args:
        n: Number of tokens.
        spans: Disjoint spans, first token and one past the last, in order. What is between them stays between.
        pairs: Which spans to swap with each other, ``(pairs, 2)``, no span twice.

    Returns:
        Order, ``(n,)``: place i takes token ``order[i]``; and which places hold a token of a swapped span.
    """
    goes = list(range(len(spans)))
    for one, other in pairs.tolist():
        goes[one], goes[other] = other, one
    order: list[int] = []
    moved: list[bool] = []
    at = 0
    for place, (start, end) in enumerate(spans):
        first, last = spans[goes[place]]
        order += [*range(at, start), *range(first, last)]
        moved += [False] * (start - at) + [goes[place] != place] * (last - first)
        at = end
    order += range(at, n)
    moved += [False] * (n - at)
    return torch.tensor(order, dtype=torch.int64), torch.tensor(moved, dtype=torch.bool)


def replaced(ids: Tensor, spans: Sequence[tuple[int, int]], others: Sequence[Sequence[int]]) -> Change:
    """The text ``ids`` ``(n,)`` with other tokens in the place of spans, which are disjoint and in order."""
    tokens, origin = ids.tolist(), list(range(len(ids)))
    for (start, end), other in reversed(list(zip(spans, others, strict=True))):
        tokens[start:end] = other
        origin[start:end] = [-1] * len(other)
    where = torch.tensor(origin, dtype=torch.int64)
    return Change(torch.tensor(tokens, dtype=torch.int64), where, where < 0)


def make_change(
    text: Text, kind: str, rate: float, seed: int, config: PerturbConfig, *, layer: int | None = None
) -> Change:
    """A text disturbed.

    Tokens, positions and features draw the same pairs for the same seed, so that they can be compared swap by swap.

    Args:
        text: The text.
        kind: What to disturb.
        rate: Share of the units (tokens, words, sentences, words that can be respelled) to disturb.
        seed: Seed of the draw.
        config: Options of the kinds.
        layer: Where features are swapped.
    """
    ids, prefix = text.ids[0].cpu(), text.prefix
    n = len(ids)
    if kind.startswith("position_"):
        where, moved = _positions(n, kind, rate, seed, config, prefix)
        return Change(ids, torch.arange(n), moved, positions=where)
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
    """Spans of tokens that can be swapped.

    Args:
        text: The text.
        unit: ``tokens``, ``words`` or ``sentences``.
    """
    if unit == "tokens":
        return [(t, t + 1) for t in range(text.prefix, text.ids.shape[1])]
    spans = text.spans.words if unit == "words" else text.spans.sentences
    if spans is None:
        raise MeasureError(f"the tokenizer does not tell where {unit} are: leave kinds of {unit} out")
    if len(spans) < 2:
        raise MeasureError(f"a text of {text.ids.shape[1]} tokens has {len(spans)} whole {unit}: use a longer text")
    return list(spans)


def _respelled(text: Text, rate: float, seed: int) -> Change:
    spans = text.spans
    if spans.words is None or not any(spans.respelled):
        raise MeasureError("no word of the text can be respelled with this tokenizer: leave the kind letters out")
    can = [(span, other) for span, other in zip(spans.words, spans.respelled, strict=True) if other]
    chosen = [can[i] for i in sorted(some(len(can), rate, seed).tolist())]
    if not chosen:
        return nothing(text.ids[0].cpu())
    return replaced(text.ids[0].cpu(), [span for span, _ in chosen], [other for _, other in chosen])


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
