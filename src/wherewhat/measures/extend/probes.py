"""Probes of a length method: attention statistics, distribution of outputs, planted retrieval."""

from __future__ import annotations

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
"""Queries looked at: so many groups of so many, evenly spread."""
_STRETCH = 256
"""Side of the triangle of logits whose axes are fitted, at most."""


def look(attention: LayerAttention, method: LengthMethod, queries: slice, limit: int) -> dict[str, Tensor]:
    """Numbers of one layer under a method, from some of its queries.

    Args:
        attention: One layer, batch 1.
        method: The method.
        queries: Queries to choose from.
        limit: Distance from which keys count as far.

    Returns:
        Values ``(heads,)`` by name, NaN where there are none: ``entropy`` and ``sink_mass`` of the weights;
        ``far_mass``, the weight on keys at far distances, the sink aside; ``far_logit``, by how much the largest logit
        of such keys exceeds the largest of near ones at the query where it does so most; ``axes_r`` and
        ``axes_distance``, the correlation of logits with their three axes and the share of variance that distance alone
        explains, in the last stretch of the queries.
    """
    sums = SpreadSums(attention, SINKS)
    device = attention.rot_q.device
    mass = torch.zeros(attention.heads, dtype=torch.float64, device=device)
    margin = torch.full((attention.heads,), -torch.inf, dtype=torch.float64, device=device)
    j = torch.arange(attention.m, device=device)
    count = 0
    for rows in sample(queries):
        scores = method.scores(attention, rows)
        weights = attention.weigh(scores, rows)[0]
        seen = scores[0].isfinite()
        missing = torch.zeros_like(weights[..., 0]) if attention.sinks is None else (1 - weights.sum(-1)).clamp_min(0)
        sums.add(WeightBlock(rows, weights, seen.any(0), missing))
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
    } | axes(attention, method, queries)


def axes(attention: LayerAttention, method: LengthMethod, queries: slice) -> dict[str, Tensor]:
    """``axes_r`` and ``axes_distance`` ``(heads,)`` of the triangle of logits in the last stretch of the queries."""
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


def sample(queries: slice) -> Iterator[slice]:
    """Groups of queries, evenly spread over ``queries`` and as far as there are so many, the last one at its end."""
    room = queries.stop - queries.start
    rows = min(_ROWS, max(1, room // _BLOCKS))
    count = min(_BLOCKS, room // rows)
    for group in range(1, count + 1):
        stop = queries.start + round(room * group / count)
        yield slice(stop - rows, stop)


@dataclass(frozen=True)
class Reference:
    """Attention outputs of one layer at positions that training has seen.

    Attributes:
        mean: Mean output, ``(heads, d)`` float64.
        covariance: Their covariance, ``(heads, d, d)``.
        spread: Root of its trace, ``(heads,)``: the size of deviations from the mean.
        far: Deviation that 1 % of them exceed, ``(heads,)``.
    """

    mean: Tensor
    covariance: Tensor
    spread: Tensor
    far: Tensor

    @classmethod
    def of(cls, output: Tensor) -> Reference:
        """From outputs ``(n, heads, d)``."""
        x = output.double().transpose(0, 1)  # (heads, n, d)
        mean = x.mean(1)
        centred = x - mean[:, None]
        covariance = centred.mT @ centred / x.shape[1]
        spread = covariance.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
        return cls(mean, covariance, spread, centred.norm(dim=-1).quantile(0.99, dim=-1))


@dataclass(frozen=True)
class Shift:
    """How outputs elsewhere differ, per head.

    Attributes:
        mean: Distance of the means in units of the reference's spread, ``(heads,)``.
        covariance: Distance of the covariances (Frobenius) relative to the reference's size, ``(heads,)``.
        outliers: Share of outputs farther from the reference's mean than 99 % of its own, ``(heads,)``.

    None of them is what it would be of infinitely many outputs (0, 0 and 0.01) where nothing differs but the draw: read
    them beside those of outputs that cannot have shifted, as many and against the same reference.
    """

    mean: Tensor
    covariance: Tensor
    outliers: Tensor

    def heads(self) -> dict[str, Tensor]:
        """The three by metric."""
        return {"output_shift": self.mean, "output_covariance": self.covariance, "output_outliers": self.outliers}


class ShiftSums:
    """Outputs against a reference, added part by part."""

    def __init__(self, reference: Reference) -> None:
        """Begin with none."""
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

    def result(self) -> Shift:
        """How they differ, all together."""
        reference = self._reference
        moved = self._sums / self._count
        covariance = self._products / self._count - moved[:, :, None] * moved[:, None]
        size = reference.covariance.norm(dim=(-1, -2)).clamp_min(1e-300)
        return Shift(
            mean=(moved.norm(dim=-1) / reference.spread.clamp_min(1e-300)).cpu(),
            covariance=((covariance - reference.covariance).norm(dim=(-1, -2)) / size).cpu(),
            outliers=(self._outliers / self._count).cpu(),
        )


def shift(reference: Reference, output: Tensor) -> Shift:
    """Outputs ``(n, heads, d)`` against the reference."""
    sums = ShiftSums(reference)
    sums.add(output)
    return sums.result()


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation of two ``(n,)``; NaN for fewer than 3."""
    return float(cosine(centred_ranks(x), centred_ranks(y))) if len(x) >= 3 else torch.nan


_FIRST = 16
"""First tokens that stay as they are: where attention rests, and what some methods always show."""


@dataclass(frozen=True)
class Planting:
    """A text whose last runs of tokens stand in it a second time.

    Attributes:
        control: Token ids ``(1, n)`` of the text as it is.
        planted: Token ids ``(1, n)`` with each run at its depth too.
        places: First token of each planted run, ``(depths,)``.
        run: Tokens of a run.
    """

    control: Tensor
    planted: Tensor
    places: Tensor
    run: int

    @property
    def body(self) -> int:
        """Tokens before the runs at the end."""
        return self.control.shape[1] - len(self.places) * self.run

    @property
    def distances(self) -> Tensor:
        """Tokens from each run at the end back to the planted one, ``(depths,)``."""
        return self.body + self.run * torch.arange(len(self.places)) - self.places


@dataclass(frozen=True)
class Found:
    """What of the planted runs a model finds, by depth.

    Attributes:
        gain: Mean log-probability of the tokens asked for, less that without the planting, nats, ``(depths,)``.
        exact: Share of them that are the likeliest token, less that without the planting, ``(depths,)``.
    """

    gain: Tensor
    exact: Tensor


def plant(ids: Tensor, depths: tuple[int, ...], *, run: int) -> Planting:
    """Plant the last runs of a text, one per depth.

    Args:
        ids: Token ids ``(1, n)``.
        depths: Where, in percent of the text: 0 is its beginning, 100 is just before its last runs.
        run: Tokens of a run.
    """
    n, count = ids.shape[1], len(depths)
    body = n - count * run
    # One run's length is left between the last planted one and the end: what follows it there is no repetition.
    room = body - 2 * run
    first = min(_FIRST, max(0, room - count * run))
    places = torch.tensor([first + round(depth / 100 * (room - first)) for depth in depths])
    if room < first or bool((places.sort().values.diff() < run).any()):
        raise MeasureError(
            f"{n} tokens have no room for {count} planted runs of {run} tokens: give a longer text, fewer depths or a "
            "shorter run"
        )
    planted = ids.clone()
    for index, place in enumerate(places.tolist()):
        start = body + index * run
        planted[:, place : place + run] = ids[:, start : start + run]
    return Planting(ids, planted, places, run)


def find_planted(planting: Planting, planted: Tensor, control: Tensor) -> Found:
    """Compare what a model says at the end of both texts, from its logits ``(1, n, vocabulary)`` on each."""
    (gain, exact), (gain_before, exact_before) = _asked(planting, planted), _asked(planting, control)
    return Found(gain - gain_before, exact - exact_before)


def _asked(planting: Planting, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-probability and share of likeliest tokens at the end of the text, both ``(depths,)``."""
    predicting = logits[0, planting.body - 1 : -1].float()
    targets = planting.control[0, planting.body :].to(logits.device)
    logprob = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
    best = (predicting.argmax(-1) == targets).double()
    cue = max(1, planting.run // 4)
    by_run = torch.stack([logprob, best]).cpu().view(2, -1, planting.run)[..., cue:].mean(-1)
    return by_run[0], by_run[1]
