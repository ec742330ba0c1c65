"""Loss and retrieval when the attention of single heads is replaced, and with some heads limited to a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wherewhat.caches.plan import LayerHeads, Unit, plannable
from wherewhat.caches.visibility import full_attention, limited_attention
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.layer_proofs import input_device, last_logits
from wherewhat.captures.proof import Proof, intervene
from wherewhat.captures.session import Editor
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import attention_output
from wherewhat.measures.axes.fit import fit_layer
from wherewhat.measures.extend.retrieval import plant
from wherewhat.measures.measurement import Subject
from wherewhat.measures.statistics import interval
from wherewhat.measures.tensors import per_query_head, token_losses
from wherewhat.measures.variants import DEPTHS, LEAST_GAIN, RUN, VariantRuns, recalled
from wherewhat.options import short_repr
from wherewhat.progress import Progress, Silent

Operation = Literal["window", "mean_query", "additive", "distance", "removed"]
"""What replaces a head's attention.

``window``: the last keys and the first ones only. ``mean_query``: the mean query in place of each one. ``additive``:
logits that depend on distance and key alone, ``a[i - j] + w · k[j]``. ``distance``: ``a[i - j]`` alone. ``removed``:
an output of zero."""

OPERATIONS: tuple[Operation, ...] = get_args(Operation)

_RIDGE = 1e-3
"""Ridge penalty of key weights, relative to the mean variance of keys."""


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one layer's heads over some documents.

    Attributes:
        mean_query: Mean query before rotation, ``(heads, d)``.
        distance: Mean distance term a of the three-axis fits, ``(heads, n)``.
        key_weights: Weights w of the key term ``w · (k - mean of k)``, by ridge regression, ``(heads, d)``.
        key_offset: Mean of k, ``(kv_heads, d)``.
    """

    mean_query: Tensor
    distance: Tensor
    key_weights: Tensor
    key_offset: Tensor

    __repr__ = short_repr


def fit_head_statistics(subject: Subject, texts: Sequence[Tensor]) -> dict[int, HeadStatistics]:
    """Return the statistics of all heads over texts ``(1, n)`` of one length, by layer."""
    sums: dict[int, dict[str, Tensor]] = {}

    def add(attention: LayerAttention) -> None:
        q, k = attention.q[0].double(), attention.k[0].double()
        fit = fit_layer(attention)
        centred = k - k.mean(1, keepdim=True)
        c = fit.c.to(k) - fit.c.to(k).mean(1, keepdim=True)
        of_text = {
            "query": q.mean(1),
            "a": fit.a.double(),
            "offset": k.mean(1),
            "squares": centred.mT @ centred / k.shape[1],
            "products": (per_query_head(centred, attention) * c[..., None]).mean(1),
        }
        before = sums.setdefault(attention.layer, {})
        for name, value in of_text.items():
            before[name] = before[name] + value if name in before else value

    for ids in texts:
        subject.run(ids, add)
    statistics = {}
    for layer, own in sums.items():
        query, a, offset, squares, products = (total / len(texts) for total in own.values())
        size = squares.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
        eye = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
        solved = torch.linalg.inv(squares + _RIDGE * size[:, None, None] * eye)
        weights = (solved.repeat_interleave(len(query) // len(solved), 0) @ products[..., None])[..., 0]
        statistics[layer] = HeadStatistics(query, a, weights, offset)
    return statistics


def replaced_output(
    attention: LayerAttention, operation: Operation, statistics: HeadStatistics, *, window: int, sinks: int
) -> Tensor:
    """Return the output ``(batch, n, heads, d_v)`` of a layer with the attention of all its heads replaced.

    Statistics are those of its heads on other documents; ``window`` and ``sinks`` are the numbers of last and first
    keys for the operation ``window``.
    """
    device, dtype = attention.rot_q.device, torch.promote_types(attention.rot_q.dtype, torch.float32)
    if operation == "removed":
        return attention.value.new_zeros(len(attention.rot_q), attention.n, attention.heads, attention.value.shape[-1])
    if operation == "window":
        output = limited_attention(attention, [False] * attention.heads, window=window, sinks=sinks)
        return full_attention(attention) if output is None else output
    if operation == "mean_query":
        q = statistics.mean_query.to(device, dtype)[None, :, None].expand(1, -1, attention.n, -1)
        if attention.rotation is not None:
            q = attention.rotation.rotate(q, attention.positions)
        return full_attention(replace(attention, rot_q=q.to(attention.rot_q.dtype).expand_as(attention.rot_q)))
    a = statistics.distance.to(device, dtype)
    key: Tensor | None = None
    if operation == "additive":
        centred = attention.k.to(dtype) - statistics.key_offset.to(device, dtype)[:, None]
        weights = statistics.key_weights.to(device, dtype).view(attention.kv_heads, -1, centred.shape[-1])
        key = (weights @ centred.mT).flatten(1, 2)[:, :, None]  # (batch, heads, 1, m)

    def pattern(rows: slice) -> Tensor:
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        distance = (i - torch.arange(attention.m, device=device)).clamp(0, a.shape[1] - 1)
        scores = a[:, distance].expand(len(attention.rot_q), -1, -1, -1)
        return attention.weigh(scores if key is None else scores + key, rows)

    return attention_output(attention, pattern=pattern)


@dataclass(frozen=True)
class HeadCosts:
    """Rise of the loss and lost retrieval when the attention of single heads is replaced.

    Attributes:
        loss: Loss of the unchanged model, ``(documents,)``, nats.
        found: Its gain from planted sequences, ``(documents,)``, nats.
        rise: Rise of the loss by operation and layer, ``(documents, heads)`` each.
        lost: Decrease of the gain likewise.
    """

    loss: Tensor
    found: Tensor
    rise: Mapping[Operation, Mapping[int, Tensor]]
    lost: Mapping[Operation, Mapping[int, Tensor]]

    __repr__ = short_repr


def measure_head_costs(
    model: Any,
    proof: Proof,
    ids: Tensor,
    statistics: Mapping[int, HeadStatistics],
    *,
    window: int,
    sinks: int,
    operations: Sequence[Operation] = OPERATIONS,
    memory_mib: int | None = None,
    progress: Progress | None = None,
) -> HeadCosts:
    """Replace the attention of one head at a time and measure loss and retrieval of planted sequences.

    Variants of a layer are run as one batch from that layer on; what is below is computed once.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: Texts ``(documents, n)``.
        statistics: Statistics of heads on other documents, of at least n tokens, by layer.
        window: Number of last keys that a limited head sees.
        sinks: Number of first keys that it sees.
        operations: What replaces the attention.
        memory_mib: As for :class:`~wherewhat.measures.variants.VariantRuns`.
        progress: Progress callback; silent by default.
    """
    if ids.shape[1] <= window + sinks:
        raise MeasureError(
            f"a window of {window} keys with {sinks} first ones covers the texts of {ids.shape[1]} tokens: give longer "
            "texts or a smaller window"
        )
    runs = VariantRuns(model, proof, ids, memory_mib=memory_mib)
    layers = plannable(proof)
    rise: dict[Operation, dict[int, Tensor]] = {operation: {} for operation in operations}
    lost: dict[Operation, dict[int, Tensor]] = {operation: {} for operation in operations}

    def output(attention: LayerAttention, operation: Operation) -> Tensor:
        return replaced_output(attention, operation, statistics[attention.layer], window=window, sinks=sinks)

    for layer in (progress or Silent()).track(sorted(layers), "costs of heads"):
        units = _unit_heads(layers[layer], "head")
        outcomes = runs.run(layer, [(operation, heads) for operation in operations for heads in units], output)
        for index, operation in enumerate(operations):
            part = slice(index * len(units), (index + 1) * len(units))
            rise[operation][layer] = outcomes.loss[:, part] - runs.loss[:, None]
            lost[operation][layer] = runs.found[:, None] - outcomes.found[:, part]
    return HeadCosts(runs.loss, runs.found, rise, lost)


def _unit_heads(count: LayerHeads, unit: Unit) -> list[slice]:
    """Return the heads of each head or group of a layer."""
    size = count.heads // count.units(unit)
    return [slice(start, start + size) for start in range(0, count.heads, size)]


@dataclass(frozen=True)
class PlanOutcome:
    """Loss and retrieval of one text with some heads limited.

    Attributes:
        loss: Mean loss of the tokens beyond the window, nats.
        found: Gain in log-probability from planted sequences, nats, mean over runs.
    """

    loss: float
    found: float


def measure_plan(
    model: Any,
    proof: Proof,
    ids: Tensor,
    full: Mapping[int, Sequence[bool]],
    *,
    window: int,
    sinks: int,
) -> PlanOutcome:
    """Measure a text ``(1, n)`` with some heads limited to the last ``window`` and the first ``sinks`` keys.

    ``full`` holds for each query head whether it sees everything, by layer; other layers are not changed.
    """
    planting = plant(ids, DEPTHS, run=RUN)
    control, planted = (ids.to(input_device(model)) for ids in (planting.control, planting.planted))
    edit = _limits(full, window=window, sinks=sinks)
    with torch.no_grad(), intervene(model, edit, proof=proof, blind=True):
        logits = model(input_ids=control, use_cache=False).logits
        loss, before = float(token_losses(logits, control)[window:].mean()), recalled(logits, planting)
        del logits
        after = recalled(
            model(input_ids=planted, use_cache=False, **last_logits(model, planting.needed)).logits, planting
        )
    return PlanOutcome(loss, float(after - before))


def _limits(full: Mapping[int, Sequence[bool]], *, window: int, sinks: int) -> Editor:
    """Return an editor that limits heads: ``full`` holds for each head of a layer whether it sees everything."""

    def edit(attention: LayerAttention) -> Tensor | None:
        own = full.get(attention.layer)
        return None if own is None else limited_attention(attention, own, window=window, sinks=sinks)

    return edit


def measure_additions(
    model: Any,
    proof: Proof,
    ids: Tensor,
    full: Mapping[int, Sequence[bool]],
    *,
    unit: Unit,
    window: int,
    sinks: int,
) -> dict[int, Tensor]:
    """Let one more head or group at a time see the whole text ``(1, n)`` and measure loss and retrieval.

    The others are limited as by :func:`measure_plan`; ``full`` holds for each query head whether it sees everything
    already, for all layers that a plan can limit.

    Returns:
        Decrease of the loss beyond the window and increase of the gain from planted sequences, as in
        :func:`measure_plan`, ``(2, heads)`` by layer: equal for heads that are added together, zero for those that see
        everything already.
    """
    runs = VariantRuns(model, proof, ids, base=_limits(full, window=window, sinks=sinks), start=window)
    additions = {}
    for layer, count in plannable(proof).items():
        additions[layer] = torch.zeros(2, count.heads, dtype=torch.float64)
        left = [heads for heads in _unit_heads(count, unit) if not full[layer][heads.start]]
        if left:
            variants = [("whole", heads) for heads in left]
            outcomes = runs.run(layer, variants, lambda attention, _: full_attention(attention))
            changes = torch.cat([runs.loss - outcomes.loss, outcomes.found - runs.found]).T
            for heads, change in zip(left, changes, strict=True):
                additions[layer][:, heads] = change[:, None]
    return additions


def _bounds(values: Sequence[float]) -> dict[str, float | None]:
    estimate = interval(values)
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def outcome_curve(outcomes: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rise and gain by selector and share with intervals over documents, and those of the unchanged model.

    Args:
        outcomes: For each document ``loss`` and ``found`` of the unchanged model, and the same by cell, such as
            ``loss_ranks_0.25``.

    Returns:
        Rows with ``selector``, ``share``, ``rise``, ``found`` and ``part``, and ``loss`` and ``found`` of the model.
        ``part`` is the gain relative to that of the unchanged model on the same document; None if one has hardly any.
    """
    retrieves = min(outcome["found"] for outcome in outcomes) > LEAST_GAIN
    rows = [
        {
            "selector": selector,
            "share": share,
            "rise": _bounds([outcome[f"loss{cell}"] - outcome["loss"] for outcome in outcomes]),
            "found": _bounds([outcome[f"found{cell}"] for outcome in outcomes]),
            "part": _bounds([outcome[f"found{cell}"] / outcome["found"] for outcome in outcomes])
            if retrieves
            else None,
        }
        for (selector, share), cell in sorted(_cells(outcomes[0]).items())
    ]
    base = {name: _bounds([outcome[name] for outcome in outcomes]) for name in ("loss", "found")}
    return rows, base


def _cells(outcome: Mapping[str, float]) -> dict[tuple[str, float], str]:
    """Return the ending of the names of metrics by selector and share; it is empty for the unchanged model."""
    cells = {("all", 1.0): ""}
    for cell in (metric.removeprefix("loss") for metric in outcome if metric.startswith("loss_")):
        selector, share = cell.removeprefix("_").rsplit("_", 1)
        cells[selector, float(share)] = cell
    return cells


def outcome_areas(outcomes: Sequence[Mapping[str, float]], *, reference: str | None = None) -> dict[str, Any]:
    """Return the areas under the curves of rise, found part and cost against the share, with intervals over documents.

    The curves are straight lines between the shares at which all selectors with more than one share were measured, and
    the two ends, where all selectors agree: no unit and all units see the whole text. Since shares go from 0 to 1, an
    area is a mean over shares.

    Args:
        outcomes: As for :func:`outcome_curve`.
        reference: Selector with which the others are compared; by default ``greedy``, else ``costs``, else none.

    Returns:
        ``shares`` between the ends, ``reference``, and ``rows`` by area of the rise, with ``selector``, ``rise`` in
        nats, ``cost`` (rise plus lost retrieval, nats), ``part`` (None if a document has hardly any gain), and
        ``more_rise``, ``more_cost`` and ``more_part``: the area minus that of the reference on the same document.
    """
    cells = _cells(outcomes[0])
    known: dict[str, set[float]] = {}
    for selector, share in cells:
        known.setdefault(selector, set()).add(share)
    curves = {selector: own for selector, own in known.items() if len(own) > 1}
    shares = sorted(set.intersection(*curves.values())) if curves else []
    reference = reference or next((name for name in ("greedy", "costs") if name in curves), None)
    values: dict[str, Callable[[Mapping[str, float], str], float]] = {
        "rise": lambda outcome, cell: outcome[f"loss{cell}"] - outcome["loss"],
        "cost": lambda outcome, cell: (
            outcome[f"loss{cell}"] - outcome["loss"] + outcome["found"] - outcome[f"found{cell}"]
        ),
    }
    if min(outcome["found"] for outcome in outcomes) > LEAST_GAIN:
        values["part"] = lambda outcome, cell: outcome[f"found{cell}"] / outcome["found"]
    x = torch.tensor([0.0, *shares, 1.0], dtype=torch.float64)
    areas: dict[tuple[str, str], Tensor] = {}
    for selector in curves if shares else ():
        points = ["_none_0", *(cells[selector, share] for share in shares), ""]
        for name, value in values.items():
            y = torch.tensor([[value(outcome, cell) for cell in points] for outcome in outcomes], dtype=torch.float64)
            areas[selector, name] = torch.trapezoid(y, x)
    rows = []
    for selector in curves if shares else ():
        row: dict[str, Any] = {
            "selector": selector,
            "part": None,
            "more_rise": None,
            "more_cost": None,
            "more_part": None,
        }
        for name in values:
            row[name] = _bounds(areas[selector, name].tolist())
            if reference is not None and selector != reference:
                row[f"more_{name}"] = _bounds((areas[selector, name] - areas[reference, name]).tolist())
        rows.append(row)
    rows.sort(key=lambda row: (row["rise"]["mean"], row["selector"]))
    return {"shares": shares, "reference": reference, "rows": rows}
