"""Makes a text disturbed in a given kind, at a rate, by a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measure.base import Text
from wherewhat.measure.perturb import positions
from wherewhat.measure.perturb.change import Change, nothing, replaced, swapped_order
from wherewhat.measure.perturb.config import PerturbConfig
from wherewhat.measure.perturb.draws import adjacent_pairs, random_pairs, some


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

    Raises:
        MeasureError: If the text has none of those units.
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

    Raises:
        MeasureError: If the text does not say where they are, or has fewer than two.
    """
    if unit == "tokens":
        return [(t, t + 1) for t in range(text.prefix, text.ids.shape[1])]
    spans = text.words if unit == "words" else text.sentences
    if spans is None:
        raise MeasureError(f"the tokenizer does not tell where {unit} are: leave kinds of {unit} out")
    if len(spans) < 2:
        raise MeasureError(f"a text of {text.ids.shape[1]} tokens has {len(spans)} whole {unit}: use a longer text")
    return list(spans)


def _respelled(text: Text, rate: float, seed: int) -> Change:
    if text.words is None or not any(text.respelled):
        raise MeasureError("no word of the text can be respelled with this tokenizer: leave the kind letters out")
    can = [(span, other) for span, other in zip(text.words, text.respelled, strict=True) if other]
    chosen = [can[i] for i in sorted(some(len(can), rate, seed).tolist())]
    if not chosen:
        return nothing(text.ids[0].cpu())
    return replaced(text.ids[0].cpu(), [span for span, _ in chosen], [other for _, other in chosen])


def _positions(n: int, kind: str, rate: float, seed: int, config: PerturbConfig, prefix: int) -> tuple[Tensor, Tensor]:
    match kind.removeprefix("position_"):
        case "jitter":
            return positions.jitter(n, rate, seed, prefix=prefix, reach=config.reach)
        case "swap":
            return positions.swap(n, rate, seed, prefix=prefix)
        case "shuffle":
            return positions.shuffle(n, rate, seed, prefix=prefix)
        case "gaps":
            return positions.gaps(n, rate, seed, prefix=prefix, size=config.gap)
        case _:
            return positions.shift(n, rate)
