"""Scores of heads by which those that need the whole text are chosen, and the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wherewhat.caches.plan import LayerHeads, Unit
from wherewhat.caches.visibility import limited_attention
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof, intervene
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import weight_blocks
from wherewhat.measures.extend.retrieval import plant
from wherewhat.measures.heads.patterns import TARGETS, target_keys
from wherewhat.measures.measurement import Subject
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import centred_ranks, per_query_head, rotates
from wherewhat.measures.variants import DEPTHS, RUN

Selector = Literal[
    "auto",
    "ranks",
    "symbolic",
    "distance",
    "output",
    "induction",
    "mass",
    "combined",
    "costs",
    "greedy",
    "random",
    "interleaved",
    "ends",
]
"""How heads are ranked.

``auto``: by the one of :data:`CANDIDATES` whose plans cost least on the documents for choosing, or reach a goal with
the smallest share. ``ranks``: sum of the ranks by ``symbolic`` and ``distance``. ``symbolic``: symbolic minus
positional score. ``distance``: one minus the area under the cumulative sum of its distance curve. ``output``:
first-order estimate of what limiting the head costs: the gradient of the loss with respect to its output, times the
change of the output. ``induction``: attention to tokens after earlier occurrences of the query's token. ``mass``:
attention beyond the window. ``combined``: regression of the measured costs on the ranks of the others. ``costs``:
measured cost of limiting the head alone. ``greedy``: order in which heads or groups are added, those first that lower
the measured cost of the plan most. ``random``: random numbers. ``interleaved`` and ``ends``, of whole layers: those at
equal intervals, and the first and last ones."""

SELECTORS: tuple[Selector, ...] = get_args(Selector)

SCORED: tuple[Selector, ...] = ("symbolic", "distance", "output", "induction", "mass")
"""Selectors with a score of each document."""

RANKED: tuple[Selector, ...] = ("symbolic", "distance")
"""Selectors whose ranks are summed."""

CANDIDATES: tuple[Selector, ...] = ("ranks", *SCORED)
"""Selectors among which ``auto`` chooses: those that need no measured costs of heads."""

PLACED: tuple[Selector, ...] = ("interleaved", "ends")
"""Selectors of whole layers by their place alone."""

ROUNDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
"""Shares after which the greedy selector measures again."""

DRAWS = 5
"""Number of random choices."""

HeadScores = Mapping[int, Tensor]
"""Scores ``(heads,)`` by layer."""

_SWAP_TOKENS, _SWAP_QUERIES = 256, 4
_REPEATED = 128
"""Tokens that are repeated once to find induction heads."""
_GRADIENT_TOKENS = 2048
"""Tokens for which gradients are computed, since those of longer texts need too much memory."""


def document_scores(
    subject: Subject,
    model: Any,
    proof: Proof,
    ids: Tensor,
    layers: Mapping[int, LayerHeads],
    *,
    selectors: Sequence[Selector],
    window: int,
    sinks: int,
) -> dict[Selector, dict[int, Tensor]]:
    """Return scores of all heads of ``layers`` on one text ``(1, n)``, ``(heads,)`` by selector and layer.

    Selectors without a score of each document are ignored. Limited heads see the last ``window`` and the first
    ``sinks`` keys.
    """
    scores: dict[Selector, dict[int, Tensor]] = {name: {} for name in SCORED if name in selectors}
    rotating: list[bool] = []

    def whole(attention: LayerAttention) -> None:
        if attention.layer not in layers:
            return
        if "distance" in scores:
            rotating.append(rotates(attention))
            scores["distance"][attention.layer] = distance_score(attention, sinks=sinks)
        if "mass" in scores:
            scores["mass"][attention.layer] = distant_mass(attention, window=window, sinks=sinks)

    def swapped(attention: LayerAttention) -> None:
        if attention.layer in layers:
            queries = choose_queries(attention.n, count=_SWAP_QUERIES)
            swaps = layer_swaps(attention, queries, skip=min(sinks, attention.n // 4)).cpu()
            scores["symbolic"][attention.layer] = (swaps.s_sym - swaps.s_pos).mean(1).double()

    if {"distance", "mass"} & set(scores):
        subject.run(ids, whole)
        if "distance" in scores and not any(rotating):
            raise MeasureError(
                "no layer rotates its queries and keys, so there is no distance curve: leave the selector distance out"
            )
    if "symbolic" in scores:
        subject.run(ids[:, :_SWAP_TOKENS], swapped)
    if "induction" in scores:
        scores["induction"] = induction_scores(subject, ids, layers)
    if "output" in scores:
        part = ids[:, : max(_GRADIENT_TOKENS, 4 * window)]
        scores["output"] = output_scores(model, proof, part, layers, window=window, sinks=sinks)
    return scores


def distance_score(attention: LayerAttention, *, sinks: int) -> Tensor:
    """Return one minus the area under the cumulative sum of the distance curve of every head, ``(heads,)``.

    The curve is the softmax over distances of the logit of mean query and mean key, without the first ``sinks`` keys:
    the first term of the additive decomposition with all contents replaced by their means. kvpress finds retrieval
    heads by the same number. Without rotation nothing depends on distance, and the score is 0.5.
    """
    if attention.rotation is None or not rotates(attention):
        return torch.full((attention.heads,), 0.5, dtype=torch.float64)
    positions = torch.arange(attention.n, device=attention.q.device)
    q = attention.q[0].double().mean(1)[:, None].expand(-1, attention.n, -1)
    k = per_query_head(attention.k[0].double()[:, sinks:].mean(1), attention)[:, None]
    origin = torch.zeros(1, dtype=torch.long, device=positions.device)
    logits = (attention.rotation.rotate(q, positions) * attention.rotation.rotate(k, origin)).sum(-1) * attention.scale
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    return (1 - torch.softmax(logits, -1).cumsum(-1).mean(-1)).double().cpu()


def distant_mass(attention: LayerAttention, *, window: int, sinks: int) -> Tensor:
    """Return the share of attention beyond the window and after the first keys, ``(heads,)``, mean over queries."""
    total = torch.zeros(attention.heads, dtype=torch.float64, device=attention.rot_q.device)
    j = torch.arange(attention.m, device=total.device)
    count = 0
    for block in weight_blocks(attention, 64):
        i = j[block.rows, None]
        far = (i - j >= window) & (j >= sinks)
        total += (block.weights * far).sum((-1, -2)).double()
        count += int((i >= window + sinks).sum())
    return (total / max(1, count)).cpu()


def induction_scores(subject: Subject, ids: Tensor, layers: Mapping[int, LayerHeads]) -> dict[int, Tensor]:
    """Return the attention of heads to the token after the earlier occurrence, by layer.

    It is measured on the first tokens of a text ``(1, n)``, repeated once.
    """
    part = ids[:, : min(_REPEATED, ids.shape[1] // 2)]
    twice = torch.cat([part, part], 1)
    n = part.shape[1]
    scores: dict[int, Tensor] = {}

    def measure(attention: LayerAttention) -> None:
        if attention.layer not in layers:
            return
        device = attention.rot_q.device
        total = torch.zeros(attention.heads, dtype=torch.float64, device=device)
        for block in weight_blocks(attention, 64):
            targets = target_keys(twice.to(device), block.rows)[TARGETS.index("induction"), 0]
            later = torch.arange(block.rows.start, block.rows.stop, device=device) >= n
            total += (block.weights * (targets & later[:, None])).sum((-1, -2)).double()
        scores[attention.layer] = (total / n).cpu()

    subject.run(twice, measure)
    return scores


def output_scores(
    model: Any, proof: Proof, ids: Tensor, layers: Mapping[int, LayerHeads], *, window: int, sinks: int
) -> dict[int, Tensor]:
    """Return a first-order estimate of the cost of limiting each head, ``(heads,)`` by layer.

    On the text with planted sequences, the loss is the mean over all tokens plus the mean over the planted tokens. Its
    gradient with respect to the outputs of a head, times their change when the head sees only its window, is the effect
    of the head's distant attention on the loss: what it reads there times what that writes towards the answer.
    """
    planting = plant(ids, DEPTHS, run=RUN)
    planted = planting.planted.to(next(model.get_input_embeddings().parameters()).device)
    changes: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}

    def edit(attention: LayerAttention) -> Tensor:
        output = attention.output.detach() if not outputs else attention.output
        if attention.layer in layers:
            with torch.no_grad():
                full = [False] * attention.heads
                limited = limited_attention(attention, full, window=window, sinks=sinks)
                changes[attention.layer] = (attention.output if limited is None else limited) - attention.output
        added = torch.zeros_like(output, requires_grad=True)
        outputs[attention.layer] = added
        return output + added

    with torch.enable_grad(), intervene(model, edit, proof=proof):
        logits = model(input_ids=planted, use_cache=False).logits[0, :-1]
        losses = cross_entropy(logits.float(), planted[0, 1:], reduction="none")
        runs = losses[planting.body - 1 :].view(-1, planting.run)[:, planting.cue :]
        gradients = torch.autograd.grad(losses.mean() + runs.mean(), [outputs[layer] for layer in layers])
    return {
        layer: (gradient.double() * changes[layer].double()).sum((0, 1, 3)).cpu()
        for layer, gradient in zip(layers, gradients, strict=True)
    }


def rank_scores(scores: Sequence[HeadScores]) -> dict[int, Tensor]:
    """Return the sum over selectors of the ranks of all heads, by layer."""
    return _by_layer(torch.stack([_ranks(layers) for layers in scores]).sum(0), scores[0])


def combined_scores(scores: Sequence[HeadScores], target: HeadScores) -> dict[int, Tensor]:
    """Return the ranks of scores, weighted by least squares to predict the ranks of ``target``, by layer.

    The target is the cost of the heads on other documents than those to be evaluated.
    """
    features = torch.stack([_ranks(layers) for layers in scores], 1)
    weights = torch.linalg.lstsq(features, _ranks(target)[:, None], driver="gelsd").solution
    return _by_layer((features @ weights)[:, 0], target)


def _ranks(scores: HeadScores) -> Tensor:
    """Return the centred ranks of all heads, layer by layer."""
    return centred_ranks(torch.cat([scores[layer] for layer in sorted(scores)]).cpu())


def _by_layer(values: Tensor, like: HeadScores) -> dict[int, Tensor]:
    layers = sorted(like)
    return dict(zip(layers, torch.split(values, [len(like[layer]) for layer in layers]), strict=True))


def greedy_counts(layers: Mapping[int, LayerHeads], unit: Unit) -> list[int]:
    """Return the numbers of heads or groups after which the greedy selector measures again, ascending."""
    total = sum(count.units(unit) for count in layers.values())
    return sorted({round(share * total) for share in ROUNDS} - {0})


def greedy_scores(
    layers: Mapping[int, LayerHeads],
    unit: Unit,
    counts: Iterable[int],
    measure: Callable[[Mapping[int, tuple[int, ...]]], HeadScores],
) -> dict[int, Tensor]:
    """Return scores ``(heads,)`` by layer: the earlier a head or group is chosen, the larger.

    Each round measures, for each unit that is not chosen, how much the cost of the plan falls if it is added to those
    chosen so far, and chooses the best ones. Those that are not chosen in the last round follow in its order.

    Args:
        layers: Numbers of heads.
        unit: What is chosen.
        counts: Number of chosen units after each round, see :func:`greedy_counts`.
        measure: Returns the fall of the cost if the unit of each head is added to the units chosen so far.
    """
    order: list[tuple[int, int]] = []
    ranked: list[tuple[int, int]] = []
    for count in counts:
        full = {layer: tuple(sorted(unit for own, unit in order if own == layer)) for layer in layers}
        falls = unit_scores(measure(full), layers, unit, summed=False)
        known = [(-value, layer, unit) for layer, x in falls.items() for unit, value in enumerate(x.tolist())]
        ranked = [(layer, unit) for _, layer, unit in sorted(known) if (layer, unit) not in order]
        order, ranked = order + ranked[: count - len(order)], ranked[count - len(order) :]
    place = {unit: index for index, unit in enumerate(order + ranked)}
    scores = {}
    for layer, heads in layers.items():
        units = heads.units(unit)
        own = torch.tensor([len(place) - place[layer, unit] for unit in range(units)], dtype=torch.float64)
        scores[layer] = own.repeat_interleave(heads.heads // units)
    return scores


def random_scores(layers: Mapping[int, LayerHeads], seed: int) -> dict[int, Tensor]:
    """Return random scores, the same for all heads that share keys."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: torch.rand(count.groups, generator=generator, dtype=torch.float64).repeat_interleave(
            count.heads // count.groups
        )
        for layer, count in layers.items()
    }


def unit_scores(scores: HeadScores, layers: Mapping[int, LayerHeads], unit: Unit, *, summed: bool) -> dict[int, Tensor]:
    """Return scores of heads, groups or layers: the sum over their heads for costs, else the largest."""
    grouped = {layer: scores[layer].view(count.units(unit), -1) for layer, count in layers.items()}
    return {layer: x.sum(1) if summed else x.amax(1) for layer, x in grouped.items()}


def chosen(scores: HeadScores, share: float) -> dict[int, tuple[int, ...]]:
    """Return the units with the largest scores over all layers, a share of all of them, by layer."""
    listed = [(float(value), layer, unit) for layer, x in scores.items() for unit, value in enumerate(x.tolist())]
    if any(math.isnan(value) for value, _, _ in listed):
        raise MeasureError("scores of heads hold NaN: the model's activations overflow")
    count = round(share * len(listed))
    kept = sorted(listed, key=lambda row: (-row[0], row[1], row[2]))[:count]
    return {layer: tuple(sorted(unit for _, own, unit in kept if own == layer)) for layer in scores}


def placed_layers(selector: Selector, layers: Iterable[int], share: float) -> dict[int, tuple[int, ...]]:
    """Return a share of the layers by their place, as :func:`chosen` does by scores: see :data:`PLACED`."""
    ordered = sorted(layers)
    count = round(share * len(ordered))
    if selector == "ends":
        first = (count + 1) // 2
        kept = [*ordered[:first], *ordered[len(ordered) - (count - first) :]]
    else:
        kept = [ordered[(2 * index + 1) * len(ordered) // (2 * count)] for index in range(count)]
    return {layer: (0,) if layer in kept else () for layer in ordered}
