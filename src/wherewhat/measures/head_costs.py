"""Loss and retrieval when the attention of single heads, or of groups that share keys, is replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.comparison import input_device
from wherewhat.captures.proof import Proof, intervene
from wherewhat.errors import CaptureError, MeasureError
from wherewhat.extend.edits import SharedPrefix
from wherewhat.extend.limits import full_attention, limited_attention
from wherewhat.extend.plan import Unit, plannable
from wherewhat.measures.attention.weights import attention_output
from wherewhat.measures.axes.layer import fit_layer
from wherewhat.measures.extend.probes import Planting, plant
from wherewhat.measures.measurement import Subject
from wherewhat.measures.statistics import Interval, interval
from wherewhat.measures.tensors import next_token_loss, per_query_head, token_losses
from wherewhat.options import short_repr
from wherewhat.progress import Progress, Silent

Operation = Literal["window", "mean_query", "additive", "distance", "removed"]
"""What replaces a head's attention.

``window``: the last keys and the first ones only. ``mean_query``: the mean query in place of each one. ``additive``:
logits that depend on distance and key alone, ``a[i - j] + w · k[j]``. ``distance``: ``a[i - j]`` alone. ``removed``:
an output of zero."""

OPERATIONS: tuple[Operation, ...] = get_args(Operation)

DEPTHS = (0, 25, 50, 75)
"""Depths of planted runs, in percent of the text; deeper ones could be inside the window."""

RUN = 16
"""Tokens of a planted run."""

_RIDGE = 1e-3
"""Ridge penalty of key weights, relative to the mean variance of keys."""

_SAME = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest change of the logits by a variant that changes nothing, relative to the largest."""


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
        memory_mib: Memory for logits of one batch, in MiB; by default that of :func:`batch_mib`. It changes the result
            by rounding only.
        progress: Progress callback; silent by default.
    """
    if ids.shape[1] <= window + sinks:
        raise MeasureError(
            f"a window of {window} keys with {sinks} first ones covers the texts of {ids.shape[1]} tokens: give longer "
            "texts or a smaller window"
        )
    plantings = [plant(text[None], DEPTHS, run=RUN) for text in ids]
    tail = len(DEPTHS) * RUN + 1
    control = SharedPrefix(model, proof, ids)
    planted = SharedPrefix(model, proof, torch.cat([one.planted for one in plantings]), keep=tail)
    layers = plannable(proof)
    _check_unchanged(control, sorted(layers)[len(layers) // 2])
    loss, before = _losses(control.logits, ids), _recalled(control.logits, plantings)
    found = _recalled(planted.logits, plantings) - before
    rise: dict[Operation, dict[int, Tensor]] = {operation: {} for operation in operations}
    lost: dict[Operation, dict[int, Tensor]] = {operation: {} for operation in operations}
    # As much again as the logits take is left for the hidden states of the batch.
    each = 2 * control.logits[0].nbytes
    most = max(1, (memory_mib or batch_mib(control.logits.device)) * 2**20 // each)
    control.logits = planted.logits = control.logits[:0]
    for layer in (progress or Silent()).track(sorted(layers), "costs of heads"):
        heads, units = layers[layer].heads, layers[layer].units(unit)
        variants = [(operation, one) for operation in operations for one in range(units)]
        values = torch.zeros(2, len(ids), len(variants), dtype=torch.float64)
        for texts in _chunks(len(ids), max(1, most // len(variants))):
            for some in _chunks(len(variants), most):
                editor = _Variants(variants[some], statistics[layer], window=window, sinks=sinks, size=heads // units)
                count = some.stop - some.start
                logits = control.run(layer, count, editor, texts=texts)
                recalled = planted.run(layer, count, editor, texts=texts)
                for row, text in enumerate(range(texts.start, texts.stop)):
                    own, own_ids = [plantings[text]] * count, ids[text].expand(count, -1)
                    gain = _recalled(recalled[row], own) - _recalled(logits[row], own)
                    values[0, text, some] = _losses(logits[row], own_ids) - loss[text]
                    values[1, text, some] = found[text] - gain
                del logits, recalled
        for index, operation in enumerate(operations):
            part = slice(index * units, (index + 1) * units)
            rise[operation][layer], lost[operation][layer] = values[0, :, part], values[1, :, part]
    return HeadCosts(loss, found, rise, lost)


class _Variants:
    """Outputs of a layer in which one head or group after the other is replaced."""

    def __init__(
        self,
        variants: Sequence[tuple[Operation, int]],
        statistics: HeadStatistics,
        *,
        window: int,
        sinks: int,
        size: int,
    ) -> None:
        self._variants, self._statistics, self._size = variants, statistics, size
        self._window, self._sinks = window, sinks

    def __call__(self, attention: LayerAttention) -> Tensor:
        """Return outputs ``(texts, variants, n, heads, d_v)``."""
        outputs = full_attention(attention)[:, None].repeat(1, len(self._variants), 1, 1, 1)
        for operation in dict.fromkeys(operation for operation, _ in self._variants):
            replaced = replaced_output(
                attention, operation, self._statistics, window=self._window, sinks=self._sinks
            ).to(outputs.dtype)
            for row, (own, unit) in enumerate(self._variants):
                if own == operation:
                    heads = slice(unit * self._size, (unit + 1) * self._size)
                    outputs[:, row, :, heads] = replaced[:, :, heads]
        return outputs


def batch_mib(device: torch.device) -> int:
    """Return the memory for the logits of one batch in MiB: an eighth of a GPU's free memory, 1,024 elsewhere.

    At most 16 GiB, since larger batches are not faster.
    """
    if device.type != "cuda":
        return 1024
    # Memory that torch has reserved and does not use is free, too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(1, min(16 * 1024, free // 8 // 2**20))


def _chunks(count: int, most: int) -> list[slice]:
    return [slice(start, min(count, start + most)) for start in range(0, count, most)]


def _check_unchanged(prefix: SharedPrefix, layer: int) -> None:
    """Refuse a model in which a pass that starts at a layer is not the rest of the whole pass."""
    again = prefix.run(layer, 1, lambda attention: full_attention(attention)[:, None], texts=slice(0, 1))[:, 0]
    expected = prefix.logits[:1]
    change = float((again - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not change <= _SAME.get(expected.dtype, 1e-1):
        raise CaptureError(
            f"a pass that starts at layer {layer} differs from the whole pass by {change:.2g}: its blocks read more "
            "than the hidden states before them, so heads cannot be replaced one by one"
        )


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean loss of each text ``(texts,)`` float64, from logits ``(texts, n, vocabulary)``."""
    losses = [next_token_loss(one[None], own[None]) for one, own in zip(logits, ids, strict=True)]
    return torch.tensor(losses, dtype=torch.float64)


def _recalled(logits: Tensor, plantings: Sequence[Planting]) -> Tensor:
    """Return the mean log-probability of the runs at the end of each text after their cues, ``(texts,)`` float64."""
    found = []
    for one, planting in zip(logits, plantings, strict=True):
        count = planting.control.shape[1] - planting.body
        targets = planting.control[0, planting.body :].to(one.device)
        losses = cross_entropy(one[-count - 1 : -1].float(), targets, reduction="none").view(-1, planting.run)
        found.append(-losses[:, max(1, planting.run // 4) :].double().mean())
    return torch.stack(found).cpu()


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
    both = torch.cat([planting.control, planting.planted]).to(input_device(model))

    def edit(attention: LayerAttention) -> Tensor | None:
        own = full.get(attention.layer)
        return None if own is None else limited_attention(attention, own, window=window, sinks=sinks)

    with torch.no_grad(), intervene(model, edit, proof=proof, blind=True):
        logits = model(input_ids=both, use_cache=False).logits
    before, after = _recalled(logits, [planting, planting]).tolist()
    return PlanOutcome(float(token_losses(logits[:1], both[:1])[window:].mean()), after - before)


def _bounds(values: Sequence[float]) -> dict[str, float | None]:
    found: Interval = interval(values)
    return {"mean": found.mean, "low": found.low, "high": found.high}


_RETRIEVES = 0.05
"""Smallest gain of the unchanged model, in nats, of which a part makes sense."""


def outcome_curve(outcomes: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rise and gain by selector and share with intervals over documents, and those of the unchanged model.

    Args:
        outcomes: For each document ``loss`` and ``found`` of the unchanged model, and the same by cell, such as
            ``loss_ranks_0.25``.

    Returns:
        Rows with ``selector``, ``share``, ``rise``, ``found`` and ``part``, and ``loss`` and ``found`` of the model.
        ``part`` is the gain relative to that of the unchanged model on the same document; None if one has hardly any.
    """
    retrieves = min(one["found"] for one in outcomes) > _RETRIEVES
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


def fit_head_statistics(
    subject: Subject, texts: Sequence[Tensor], *, sinks: int, axes: bool = True
) -> dict[int, HeadStatistics]:
    """Return the statistics of all heads over texts ``(1, n)`` of one length, by layer."""
    sums = HeadSums(sinks, axes=axes)
    for ids in texts:
        subject.run(ids, sums.add)
    return sums.result()
