"""Loss and retrieval when the attention of single heads, or of groups that share keys, is replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.comparison import input_device, last_logits
from wherewhat.captures.proof import Proof, intervene
from wherewhat.captures.session import Editor
from wherewhat.errors import MeasureError
from wherewhat.extend.plan import LayerHeads, Unit, plannable
from wherewhat.extend.visibility import full_attention, limited_attention
from wherewhat.measures.attention.weights import attention_output
from wherewhat.measures.axes.layer import fit_layer
from wherewhat.measures.extend.probes import plant
from wherewhat.measures.measurement import Subject
from wherewhat.measures.statistics import Interval, interval
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
        mean_key: Mean key before rotation, without the first ones, ``(kv_heads, d)``.
        distance: Mean distance term a of the three-axis fits, ``(heads, n)``.
        key_weights: Weights w of the key term ``w · (k - mean of k)``, by ridge regression, ``(heads, d)``.
        key_offset: Mean of k, ``(kv_heads, d)``.
    """

    mean_query: Tensor
    mean_key: Tensor
    distance: Tensor
    key_weights: Tensor
    key_offset: Tensor

    __repr__ = short_repr


class HeadSums:
    """Accumulate :class:`HeadStatistics` of all layers over documents of one length.

    Args:
        sinks: Number of first keys that are left out of ``mean_key``.
        axes: Whether to fit the three axes; without them distance term and key weights are empty.
    """

    def __init__(self, sinks: int, *, axes: bool = True) -> None:
        self._sinks, self._axes = sinks, axes
        self._sums: dict[int, dict[str, Tensor]] = {}
        self._documents: dict[int, int] = {}

    def add(self, attention: LayerAttention) -> None:
        """Add a layer of a pass over one text."""
        q, k = attention.q[0].double(), attention.k[0].double()
        found = {"query": q.mean(1), "key": k[:, self._sinks :].mean(1)}
        if self._axes:
            fit = fit_layer(attention)
            centred = k - k.mean(1, keepdim=True)
            c = fit.c.to(k) - fit.c.to(k).mean(1, keepdim=True)
            found |= {
                "a": fit.a.double(),
                "offset": k.mean(1),
                "squares": centred.mT @ centred / k.shape[1],
                "products": (per_query_head(centred, attention) * c[..., None]).mean(1),
            }
        before = self._sums.setdefault(attention.layer, {})
        for name, value in found.items():
            before[name] = before[name] + value if name in before else value
        self._documents[attention.layer] = self._documents.get(attention.layer, 0) + 1

    def result(self) -> dict[int, HeadStatistics]:
        """Return the statistics of every layer."""
        return {layer: self._layer(layer) for layer in self._sums}

    def _layer(self, layer: int) -> HeadStatistics:
        means = {name: value / self._documents[layer] for name, value in self._sums[layer].items()}
        nothing = means["query"].new_zeros(0)
        weights = nothing
        if self._axes:
            squares = means["squares"]
            size = squares.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
            eye = torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
            solved = torch.linalg.inv(squares + _RIDGE * size[:, None, None] * eye)
            groups = len(means["query"]) // len(solved)
            weights = (solved.repeat_interleave(groups, 0) @ means["products"][..., None])[..., 0]
        return HeadStatistics(
            means["query"], means["key"], means.get("a", nothing), weights, means.get("offset", nothing)
        )


def replaced_output(
    attention: LayerAttention, operation: Operation, statistics: HeadStatistics, *, window: int, sinks: int
) -> Tensor:
    """Return the output ``(batch, n, heads, d_v)`` of a layer with the attention of all its heads replaced.

    Args:
        attention: One layer of a pass without cache.
        operation: What replaces it.
        statistics: Statistics of its heads on other documents.
        window: Number of last keys for ``window``.
        sinks: Number of first keys for ``window``.
    """
    device, dtype = attention.rot_q.device, torch.promote_types(attention.rot_q.dtype, torch.float32)
    if operation == "removed":
        return attention.value.new_zeros(len(attention.rot_q), attention.n, attention.heads, attention.value.shape[-1])
    if operation == "window":
        found = limited_attention(attention, [False] * attention.heads, window=window, sinks=sinks)
        return full_attention(attention) if found is None else found
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
    """Rise of the loss and lost retrieval when the attention of single heads or groups is replaced.

    Attributes:
        loss: Loss of the unchanged model, ``(documents,)``, nats.
        found: Its gain from planted runs, ``(documents,)``, nats.
        rise: Rise of the loss by operation and layer, ``(documents, units)`` each.
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
    unit: Unit = "head",
    memory_mib: int | None = None,
    progress: Progress | None = None,
) -> HeadCosts:
    """Replace the attention of one head or group at a time and measure loss and retrieval of planted runs.

    Variants of a layer are run as one batch from that layer on; what is below is computed once.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: Texts ``(documents, n)``.
        statistics: Statistics of heads on other documents, of at least n tokens, by layer.
        window: Number of last keys that a limited head sees.
        sinks: Number of first keys that it sees.
        operations: What replaces the attention.
        unit: Whether single heads are replaced, or all heads that share keys together.
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
        units = _unit_heads(layers[layer], unit)
        loss, gain = runs.run(layer, [(operation, heads) for operation in operations for heads in units], output)
        for index, operation in enumerate(operations):
            part = slice(index * len(units), (index + 1) * len(units))
            rise[operation][layer] = loss[:, part] - runs.loss[:, None]
            lost[operation][layer] = runs.found[:, None] - gain[:, part]
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
        found: Gain in log-probability from planted runs, nats, mean over runs.
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
    depths: tuple[int, ...] = DEPTHS,
) -> PlanOutcome:
    """Measure a text with some heads limited.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: The text ``(1, n)``.
        full: For each query head whether it sees everything, by layer; other layers are not changed.
        window: Number of last keys that the other heads see.
        sinks: Number of first keys that they see.
        depths: Depths of planted runs, in percent of the text.
    """
    planting = plant(ids, depths, run=RUN)
    control, planted = (one.to(input_device(model)) for one in (planting.control, planting.planted))
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
    memory_mib: int | None = None,
) -> dict[int, Tensor]:
    """Let one more head or group at a time see the whole text and measure loss and retrieval.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: The text ``(1, n)``.
        full: For each query head whether it sees everything already, for all layers that a plan can limit.
        unit: Whether single heads are added, or all heads that share keys together.
        window: Number of last keys that the other heads see.
        sinks: Number of first keys that they see.
        memory_mib: As for :class:`~wherewhat.measures.variants.VariantRuns`.

    Returns:
        Decrease of the loss beyond the window and increase of the gain from planted runs, as in :func:`measure_plan`,
        ``(2, heads)`` by layer: equal for heads that are added together, zero for those that see everything already.
    """
    runs = VariantRuns(
        model, proof, ids, base=_limits(full, window=window, sinks=sinks), start=window, memory_mib=memory_mib
    )
    found = {}
    for layer, count in plannable(proof).items():
        found[layer] = torch.zeros(2, count.heads, dtype=torch.float64)
        left = [heads for heads in _unit_heads(count, unit) if not full[layer][heads.start]]
        if left:
            variants = [("whole", heads) for heads in left]
            loss, gain = runs.run(layer, variants, lambda attention, _: full_attention(attention))
            for heads, change in zip(left, torch.cat([runs.loss - loss, gain - runs.found]).T, strict=True):
                found[layer][:, heads] = change[:, None]
    return found


def _bounds(values: Sequence[float]) -> dict[str, float | None]:
    found: Interval = interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


def outcome_curve(outcomes: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rise and gain by selector and share with intervals over documents, and those of the unchanged model.

    Args:
        outcomes: For each document ``loss`` and ``found`` of the unchanged model, and the same by cell, such as
            ``loss_ranks_0.25``.

    Returns:
        Rows with ``selector``, ``share``, ``rise``, ``found`` and ``part``, and ``loss`` and ``found`` of the model.
        ``part`` is the gain relative to that of the unchanged model on the same document; None if one has hardly any.
    """
    retrieves = min(one["found"] for one in outcomes) > LEAST_GAIN
    cells = {metric.partition("_")[2] for metric in outcomes[0] if metric.startswith("loss_")}
    rows: list[dict[str, Any]] = [{"selector": "all", "share": 1.0, "": ""}]
    for cell in cells:
        selector, share = cell.rsplit("_", 1)
        rows.append({"selector": selector, "share": float(share), "": f"_{cell}"})
    for row in rows:
        cell = row.pop("")
        row["rise"] = _bounds([one[f"loss{cell}"] - one["loss"] for one in outcomes])
        row["found"] = _bounds([one[f"found{cell}"] for one in outcomes])
        row["part"] = _bounds([one[f"found{cell}"] / one["found"] for one in outcomes]) if retrieves else None
    base = {name: _bounds([one[name] for one in outcomes]) for name in ("loss", "found")}
    return sorted(rows, key=lambda row: (row["selector"], row["share"])), base


def outcome_areas(outcomes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the areas under the curves of rise and found part against the share, with intervals over documents.

    The curves are straight lines between the shares at which all selectors with more than one share were measured, and
    the two ends, where all selectors agree: no unit and all units see the whole text. Since shares go from 0 to 1, an
    area is a mean over shares.

    Args:
        outcomes: As for :func:`outcome_curve`.

    Returns:
        ``shares`` between the ends, ``reference`` (``greedy``, else ``costs``, else None), and ``rows`` by area of the
        rise, with ``selector``, ``rise`` in nats, ``part`` (None if a document has hardly any gain), and ``more_rise``
        and ``more_part``: the area minus that of the reference on the same document.
    """
    known: dict[str, set[float]] = {}
    for metric in outcomes[0]:
        if metric.startswith("loss_"):
            selector, share = metric.removeprefix("loss_").rsplit("_", 1)
            known.setdefault(selector, set()).add(float(share))
    curves = {selector: shares for selector, shares in known.items() if len(shares) > 1}
    shares = sorted(set.intersection(*curves.values())) if curves else []
    reference = next((name for name in ("greedy", "costs") if name in curves), None)
    values: dict[str, Callable[[Mapping[str, float], str], float]] = {
        "rise": lambda one, cell: one[f"loss{cell}"] - one["loss"]
    }
    if min(one["found"] for one in outcomes) > LEAST_GAIN:
        values["part"] = lambda one, cell: one[f"found{cell}"] / one["found"]
    x = torch.tensor([0.0, *shares, 1.0], dtype=torch.float64)
    areas: dict[tuple[str, str], Tensor] = {}
    for selector in curves if shares else ():
        cells = ["_none_0", *(f"_{selector}_{share!r}" for share in shares), ""]
        for name, value in values.items():
            y = torch.tensor([[value(one, cell) for cell in cells] for one in outcomes], dtype=torch.float64)
            areas[selector, name] = torch.trapezoid(y, x)
    rows = []
    for selector in {selector for selector, _ in areas}:
        row: dict[str, Any] = {"selector": selector} | dict.fromkeys(("rise", "part", "more_rise", "more_part"))
        for name in values:
            row[name] = _bounds(areas[selector, name].tolist())
            if reference is not None and selector != reference:
                row[f"more_{name}"] = _bounds((areas[selector, name] - areas[reference, name]).tolist())
        rows.append(row)
    rows.sort(key=lambda row: (row["rise"]["mean"], row["selector"]))
    return {"shares": shares, "reference": reference, "rows": rows}


def fit_head_statistics(
    subject: Subject, texts: Sequence[Tensor], *, sinks: int, axes: bool = True
) -> dict[int, HeadStatistics]:
    """Return the statistics of all heads over texts ``(1, n)`` of one length, by layer."""
    sums = HeadSums(sinks, axes=axes)
    for ids in texts:
        subject.run(ids, sums.add)
    return sums.result()
