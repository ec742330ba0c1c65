"""Heads that read planted sequences, and how much is read with planes of these heads changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from wherewhat.measures.extend.retrieval import Planting, run_scores
from wherewhat.measures.frequencies.masking import FAITHFUL, Masking, PlaneVariant
from wherewhat.measures.tensors import check_faithful, text_losses
from wherewhat.measures.variants import LEAST_GAIN

RETRIEVAL_SHARE = 0.1
"""Share of the heads with the most attention to planted sequences that count as retrieval heads."""

Heads = Mapping[int, Tensor]
"""Entries of heads by layer, ``(heads,)`` each."""


def planted_numbers(planting: Planting, logits: Tensor) -> Tensor:
    """Return loss and mean log-probability of the runs at the end ``(2,)``, from the logits ``(n, vocabulary)``."""
    loss = text_losses(logits[None], planting.control).mean()
    return torch.stack([loss, run_scores(planting, logits)[0].mean()])


def retrieval_heads(attention: Heads, share: float = RETRIEVAL_SHARE) -> dict[int, Tensor]:
    """Return True for the share of heads, at least one, with the most attention to planted sequences."""
    sizes = [len(x) for x in attention.values()]
    count = max(1, round(share * sum(sizes)))
    order = torch.cat(list(attention.values())).argsort(descending=True, stable=True)
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    chosen[order[:count]] = True
    return dict(zip(attention, torch.split(chosen, sizes), strict=True))


def other_heads(chosen: Heads, generator: torch.Generator) -> dict[int, Tensor]:
    """Return True for as many random other heads: of the same layers, and where these are too few, of any."""
    sizes = [len(x) for x in chosen.values()]
    order = torch.rand(sum(sizes), generator=generator)
    taken = torch.cat([x & False for x in chosen.values()])
    free = ~torch.cat(list(chosen.values()))
    for index, wanted in enumerate(chosen.values()):
        here = torch.zeros_like(taken)
        here[sum(sizes[:index]) : sum(sizes[: index + 1])] = True
        taken |= _first(order, free & here, int(wanted.sum()))
    missing = int((~free).sum()) - int(taken.sum())
    taken |= _first(order, free & ~taken, missing)
    return dict(zip(chosen, torch.split(taken, sizes), strict=True))


def _first(order: Tensor, among: Tensor, count: int) -> Tensor:
    """Return True for the ``count`` entries among some that come first; for all of them if they are fewer."""
    ranks = order.masked_fill(~among, torch.inf).argsort(stable=True)[: min(count, int(among.sum()))]
    found = torch.zeros_like(among)
    found[ranks] = True
    return found


def random_planes(slow: Tensor, heads: int, generator: torch.Generator) -> Tensor:
    """Return for each head as many random planes as are slow ``(planes,)``, without these unless the others are few."""
    order = torch.rand(heads, len(slow), generator=generator) + slow
    return order.argsort(-1).argsort(-1) < int(slow.sum())


def retrieval_scores(
    masking: Masking,
    plantings: Sequence[Planting],
    attention: Mapping[int, Tensor],
    slow: Mapping[int, Tensor],
    losses: Sequence[float],
    dtypes: Collection[torch.dtype],
) -> list[dict[str, float]]:
    """Return the gain from planted sequences of each text, and the shares that are lost with planes changed.

    Args:
        masking: The model; its texts are not used.
        plantings: The texts with planted sequences.
        attention: Attention of heads to planted sequences by layer, ``(texts, heads)``.
        slow: True for the slowest planes by layer, ``(planes,)``.
        losses: Loss of each intact text, which a change of nothing must leave as it is.
        dtypes: Data types of the model's queries.
    """
    count = len(plantings)
    planes: dict[str, dict[int, list[Tensor]]] = {
        name: {layer: [] for layer in slow} for name in ("none", "slow", "random", "others", "all")
    }
    for text in range(count):
        generator = torch.Generator().manual_seed(0)
        chosen = retrieval_heads({layer: attention[layer][text] for layer in slow})
        others = other_heads(chosen, generator)
        for layer, which in slow.items():
            own, drawn = chosen[layer][:, None], random_planes(which, len(chosen[layer]), generator)
            planes["none"][layer].append(torch.zeros_like(drawn))
            planes["slow"][layer].append(own & which)
            planes["random"][layer].append(own & drawn)
            planes["others"][layer].append(others[layer][:, None] & which)
            planes["all"][layer].append(own.expand_as(drawn))
    # Each text is run intact and with planted sequences, with the same planes changed.
    stacked = {
        name: {layer: torch.stack(own * 2) for layer, own in by_layer.items()} for name, by_layer in planes.items()
    }
    endings = {"slow": "", "random": "_random", "others": "_others"}
    variants = [PlaneVariant("unchanged", stacked["none"]), PlaneVariant("all_masked", stacked["all"])]
    for name, ending in endings.items():
        variants.append(PlaneVariant(f"masked{ending}", stacked[name]))
        variants.append(PlaneVariant(f"unrotated{ending}", stacked[name], "unrotate"))
    ids = torch.cat([planting.control for planting in plantings] + [planting.planted for planting in plantings])
    heads = {layer: torch.ones(x.shape[1], dtype=torch.bool) for layer, x in attention.items() if layer in slow}

    def read(logits: Tensor, texts: Sequence[int]) -> list[Tensor]:
        return [planted_numbers(plantings[text % count], row) for row, text in zip(logits, texts, strict=True)]

    numbers = replace(masking, ids=ids, heads=heads).numbers(variants, read)
    gains = {name: (found[count:, 1] - found[:count, 1]).tolist() for name, found in numbers.items()}
    before = gains.pop("unchanged")
    scores = []
    for text, loss in enumerate(losses):
        unchanged = float(numbers["unchanged"][text, 0])
        check_faithful("the change of planes", unchanged, loss, dtypes=dtypes, precision=FAITHFUL)
        gain = before[text]
        lost = {
            f"planted_lost_{name}": 1 - after[text] / gain if gain > LEAST_GAIN else nan
            for name, after in gains.items()
        }
        for control, same in (("random", "slow"), ("others", "none")):
            # Without other planes or other heads there is no control.
            if all(torch.equal(planes[same][layer][text], planes[control][layer][text]) for layer in slow):
                lost |= dict.fromkeys((f"planted_lost_masked_{control}", f"planted_lost_unrotated_{control}"), nan)
        scores.append({"planted": gain} | lost)
    return scores
