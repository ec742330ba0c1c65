"""Probes of a length method: attention statistics, distribution of outputs, planted retrieval."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.extend.method import LengthMethod
from wherewhat.measures.attention.weights import SpreadSums, WeightBlock
from wherewhat.measures.axes.fit import fit_margins
from wherewhat.measures.axes.margins import blocked_margins
from wherewhat.measures.tensors import centred_ranks, cosine

SINKS = 4
"""First keys that count as attention sink."""
_BLOCKS, _ROWS = 8, 16
"""Number of groups of queries that are measured, evenly spread, and queries per group."""
_STRETCH = 256
"""Largest side of the triangle of logits whose axes are fitted."""


def attention_probe(attention: LayerAttention, method: LengthMethod, queries: slice, limit: int) -> dict[str, Tensor]:
    """Return attention statistics of one layer under a method, from some of its queries.

    Args:
        attention: One layer, batch 1.
        method: The method.
        queries: Queries to sample from.
        limit: Distance from which keys count as far.

    Returns:
        Values ``(heads,)`` by name, NaN where undefined: ``entropy`` and ``sink_mass`` of the weights; ``far_mass``,
        the weight on far keys without the sink; ``far_logit``, the largest excess over queries of the largest logit of
        far keys over that of near ones; ``axes_r`` and ``axes_distance``, the correlation of logits with their three
        axes and the share of variance that distance alone explains, in the last part of the queries.
    """
    sums = SpreadSums(attention, SINKS)
    device = attention.rot_q.device
    mass = torch.zeros(attention.heads, dtype=torch.float64, device=device)
    margin = torch.full((attention.heads,), -torch.inf, dtype=torch.float64, device=device)
    j = torch.arange(attention.m, device=device)
    count = 0
    for rows in sample_queries(queries):
        scores = method.scores(attention, rows)
        weights = attention.weigh(scores, rows)[0]
        sums.add(WeightBlock.of(attention, rows, weights, scores[0].isfinite().any(0)))
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        far = (i - j >= limit) & (j >= SINKS)
        near = i - j < limit
        mass += (weights * far).sum((-1, -2)).double()
        best = (scores[0].masked_fill(~x, -torch.inf).amax(-1) for x in (far, near))
        over = torch.sub(*best).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        margin = torch.maximum(margin, over.amax(-1).double())
        count += rows.stop - rows.start
    spread = sums.result()
    return {
        "entropy": spread.entropy,
        "sink_mass": spread.sink_mass,
        "far_mass": (mass / count).cpu(),
        "far_logit": torch.where(margin.isfinite(), margin, torch.nan).cpu(),
    } | axes_probe(attention, method, queries)


def axes_probe(attention: LayerAttention, method: LengthMethod, queries: slice) -> dict[str, Tensor]:
    """Return ``axes_r`` and ``axes_distance`` ``(heads,)`` of the logits in the last part of the queries."""
    side = min(_STRETCH, queries.stop - queries.start)
    rows = slice(queries.stop - side, queries.stop)
    logits = method.scores(attention, rows)[0, ..., rows].double()
    i = torch.arange(side, device=logits.device)
    distance = i[:, None] - i
    hidden = ~logits.isfinite().all(0) & (distance >= 0)
    width = int(distance[hidden].min()) if bool(hidden.any()) else side
    if width < 3 or side < 4:
        nothing = torch.full((attention.heads,), torch.nan, dtype=torch.float64)
        return {"axes_r": nothing, "axes_distance": nothing}
    logits = logits.masked_fill(~logits.isfinite(), 0.0)
    margins = blocked_margins(
        lambda i0, i1, j0, j1: logits[:, i0:i1, j0:j1].clone(),
        attention.heads,
        side,
        width,
        device=logits.device,
        block=side,
    )
    fit = fit_margins(margins, torch.zeros_like(margins.sums), method="blocked")
    return {"axes_r": fit.r.cpu(), "axes_distance": fit.unique["a"].cpu()}


def sample_queries(queries: slice) -> Iterator[slice]:
    """Yield up to 8 groups of up to 16 queries, evenly spread over ``queries`` with the last at its end."""
    length = queries.stop - queries.start
    rows = min(_ROWS, max(1, length // _BLOCKS))
    count = min(_BLOCKS, length // rows)
    for group in range(1, count + 1):
        stop = queries.start + round(length * group / count)
        yield slice(stop - rows, stop)


@dataclass(frozen=True)
class Reference:
    """Distribution of the attention outputs of one layer at positions within the trained length.

    Attributes:
        mean: Mean output, ``(heads, d)`` float64.
        covariance: Their covariance, ``(heads, d, d)``.
        spread: Root of its trace, ``(heads,)``: the size of deviations from the mean.
        far: 99 % quantile of the deviations, ``(heads,)``.
    """

    mean: Tensor
    covariance: Tensor
    spread: Tensor
    far: Tensor

    @classmethod
    def of(cls, output: Tensor) -> Reference:
        """Return the distribution of outputs ``(n, heads, d)``."""
        x = output.double().transpose(0, 1)  # (heads, n, d)
        mean = x.mean(1)
        centred = x - mean[:, None]
        covariance = centred.mT @ centred / x.shape[1]
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        return cls(mean, covariance, spread, centred.norm(dim=-1).quantile(0.99, dim=-1))


class ShiftSums:
    """Accumulate the shift of attention outputs from a reference over parts of the outputs.

    For finite samples of the same distribution the shift differs from the limit of infinite samples (0, 0 and 0.01):
    compare it with that of as many outputs that have not shifted, relative to the same reference.
    """

    def __init__(self, reference: Reference) -> None:
        """Start with no outputs."""
        self._reference = reference
        self._count = 0
        self._sums = torch.zeros_like(reference.mean)
        self._products = torch.zeros_like(reference.covariance)
        self._outliers = torch.zeros_like(reference.far)

    def add(self, output: Tensor) -> None:
        """Add outputs ``(n, heads, d)``."""
        away = output.double().transpose(0, 1) - self._reference.mean[:, None]  # (heads, n, d)
        self._count += away.shape[1]
        self._sums += away.sum(1)
        self._products += away.mT @ away
        self._outliers += (away.norm(dim=-1) > self._reference.far[:, None]).sum(-1)

    def result(self) -> dict[str, Tensor]:
        """Return the shift of all outputs by metric, each ``(heads,)``.

        ``output_shift`` is the distance of the means in units of the reference's spread, ``output_covariance`` the
        distance of the covariances (Frobenius) relative to the reference's size, ``output_outliers`` the share of
        outputs farther from the reference's mean than 99 % of its own.
        """
        reference = self._reference
        moved = self._sums / self._count
        covariance = self._products / self._count - moved[:, :, None] * moved[:, None]
        size = reference.covariance.norm(dim=(-1, -2)).clamp_min(1e-300)
        return {
            "output_shift": (moved.norm(dim=-1) / reference.spread.clamp_min(1e-300)).cpu(),
            "output_covariance": ((covariance - reference.covariance).norm(dim=(-1, -2)) / size).cpu(),
            "output_outliers": (self._outliers / self._count).cpu(),
        }


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan


_FIRST = 16
"""Number of first tokens without planted runs: attention sinks, and keys that some methods always keep."""


@dataclass(frozen=True)
class Planting:
    """A text whose last runs of tokens are also planted earlier in it.

    Attributes:
        control: Token ids ``(1, n)`` of the intact text.
        planted: Token ids ``(1, n)`` with each run copied to its depth.
        places: First token of each planted run, ``(depths,)``.
        run: Tokens of a run.
    """

    control: Tensor
    planted: Tensor
    places: Tensor
    run: int

    @property
    def body(self) -> int:
        """Number of tokens before the runs at the end."""
        return self.control.shape[1] - len(self.places) * self.run

    @property
    def needed(self) -> int:
        """Number of last tokens whose logits are used."""
        return len(self.places) * self.run + 1

    @property
    def distances(self) -> Tensor:
        """Distance in tokens of each run at the end from the planted one, ``(depths,)``."""
        return self.body + self.run * torch.arange(len(self.places)) - self.places


@dataclass(frozen=True)
class PlantedGain:
    """Gain from planted runs, by depth.

    Attributes:
        gain: Mean log-probability of the runs' tokens after the cue, minus that without planting, nats, ``(depths,)``.
        exact: Share of them that are the most likely token, minus that without planting, ``(depths,)``.
    """

    gain: Tensor
    exact: Tensor


def _places(n: int, depths: tuple[int, ...], run: int) -> Tensor | None:
    """Return where runs are planted in a text of ``n`` tokens, ``(runs,)``; None if they do not fit."""
    count = len(depths)
    # The last planted run is one run's length before the end, so that it is not repeated immediately.
    last = n - count * run - 2 * run
    first = min(_FIRST, max(0, last - count * run))
    places = torch.tensor([first + round(depth / 100 * (last - first)) for depth in depths])
    apart = last >= first and not bool((places.sort().values.diff() < run).any())
    return places if apart else None


def plant(ids: Tensor, depths: tuple[int, ...], *, run: int) -> Planting:
    """Plant the last runs of a text ``(1, n)``, of ``run`` tokens each, one per depth.

    Depths are in percent of the text: 0 is its beginning, 100 just before its last runs.
    """
    n, count = ids.shape[1], len(depths)
    places = _places(n, depths, run)
    if places is None:
        gap = min((y - x for x, y in itertools.pairwise(sorted(depths))), default=100)
        enough = _FIRST + 100 * (run + 1) // max(1, gap) + (count + 2) * run + 1
        least = bisect.bisect_left(range(enough), True, key=lambda more: _places(more, depths, run) is not None)
        raise MeasureError(
            f"{n} tokens are too few for {count} planted runs of {run} tokens: {least} are needed (in wherewhat "
            "extend, fewer with fewer depths or a shorter run)"
        )
    body = n - count * run
    planted = ids.clone()
    for index, place in enumerate(places.tolist()):
        start = body + index * run
        planted[:, place : place + run] = ids[:, start : start + run]
    return Planting(ids, planted, places, run)


def planted_gain(planting: Planting, planted: Tensor, control: Tensor) -> PlantedGain:
    """Return the gain at the end of the text, from logits ``(1, n, vocabulary)`` on the planted and the intact text.

    Logits of the last :attr:`Planting.needed` tokens are sufficient.
    """
    (gain, exact), (gain_before, exact_before) = _run_scores(planting, planted), _run_scores(planting, control)
    return PlantedGain(gain - gain_before, exact - exact_before)


def _run_scores(planting: Planting, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean log-probability and share of most likely tokens of the runs at the end, both ``(depths,)``."""
    predicting = logits[0, -planting.needed : -1].float()
    targets = planting.control[0, planting.body :].to(logits.device)
    logprob = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
    best = (predicting.argmax(-1) == targets).double()
    cue = max(1, planting.run // 4)
    by_run = torch.stack([logprob, best]).cpu().view(2, -1, planting.run)[..., cue:].mean(-1)
    return by_run[0], by_run[1]
