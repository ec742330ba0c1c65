"""The logits as four terms: position or content of the query times position or content of the key.

With ``q[t, i] = p_i + u[t, i]`` and ``k[t, j] = r_j + v[t, j]``, the logits of document t are

    W[t, i, j] = p_i · r_j  +  p_i · v[t, j]  +  u[t, i] · r_j  +  u[t, i] · v[t, j].

Vectors are those that meet in the dot product. A rotation is linear at each position, so both parts rotate along: with
RoPE ``p_i`` stands for ``R_i p_i``, and even a mean vector that is the same everywhere becomes a curve of the distance.

Every term is taken around its mean over the causal pairs of the document (a constant does nothing in softmax), squared,
summed over pairs and documents and divided by the same sum for W. The terms are not all orthogonal; what their
covariances add is reported as such, and with it the four shares sum to one.

A document's position parts come from the other documents. A mean over D documents holds 1/D of their content, which
would make p · r too large by about (p · v + u · r) / D and u · v too small by 2/D to 4/D of itself. So the mean comes
with a sample of its noise, as a complex number whose square is free of it (``statistics.Others``):
every term becomes complex, the four still sum to W exactly, and the real part of the sum of a term's squares is right
up to third moments over D². It can be below zero where there is nothing.

Nothing n × n is made: see :mod:`wherewhat.measures.axes.margins`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import fit_axes
from wherewhat.measures.axes.margins import bilinear_margins
from wherewhat.measures.split import LEAST_DOCUMENTS
from wherewhat.measures.split.statistics import Estimate, Others, PositionSums


@dataclass(frozen=True)
class LogitSplit:
    """Shares of the logits' variance, one entry per head; NaN where the logits are constant.

    Attributes:
        pp: Position · position.
        pc: Position of the query · content of the key. Its error takes the position parts as given.
        cp: Content of the query · position of the key, likewise.
        cc: Content · content, likewise.
        covariance: Twice the covariances of the terms, ``(heads,)``: 1 - pp - pc - cp - cc.
        pp_mean: pp with both position parts replaced by their means over positions, before rotation, ``(heads,)``.
        pc_mean: pc likewise: what a mean query makes of the keys' content, at any position.
        cp_mean: cp likewise.
        axes_pp: Share of the three-axis part of the logits (a + b + c) that position · position gives.
        distance_pp: The same of the distance curve alone.
    """

    pp: Estimate
    pc: Estimate
    cp: Estimate
    cc: Estimate
    covariance: Tensor
    pp_mean: Tensor
    pc_mean: Tensor
    cp_mean: Tensor
    axes_pp: Estimate
    distance_pp: Estimate


class LogitSums:
    """Sums of squares of the terms over documents, one document at a time."""

    def __init__(self, *, window: int | None = None) -> None:
        """Begin; only distances below ``window`` count."""
        self._window = window
        self._terms: list[Tensor] = []  # per document: pc, cp, cc, and with means pp, pc, cp, (6, heads)
        self._whole: list[Tensor] = []  # per document: all logits, their three axes, their distance curve, (3, heads)
        self._position: list[Tensor] = []  # the same of position · position, without the document

    def add(self, q: Tensor, k: Tensor, others: tuple[Others, Others], flat: tuple[Tensor, Tensor]) -> None:
        """Take in a document.

        Args:
            q: Its queries as they enter the dot product, ``(heads, n, d)``.
            k: Its keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
            others: The position parts of queries and keys that the other documents tell, rotated likewise.
            flat: The same, means over positions in place of each position's own, rotated likewise.
        """
        q, k = q.double(), k.double()
        of_q, of_k = others
        content_q, content_k = Others(q - of_q.mean, -of_q.noise), Others(k - of_k.mean, -of_k.noise)
        terms = [_real_part(self._squares, *pair) for pair in ((of_q, content_k), (content_q, of_k))]
        terms.append(_real_part(self._squares, content_q, content_k))
        flat_q, flat_k = (x.double() for x in flat)
        terms.append(self._squares(flat_q, flat_k))
        terms.append(self._squares(flat_q, content_k.mean) - self._squares(flat_q, content_k.noise))
        terms.append(self._squares(content_q.mean, flat_k) - self._squares(content_q.noise, flat_k))
        self._terms.append(torch.stack(terms))
        self._whole.append(self._explained(q, k))
        self._position.append(_real_part(self._explained, of_q, of_k))

    def split(self) -> LogitSplit:
        """The shares."""
        count = len(self._terms)
        if count < LEAST_DOCUMENTS:
            raise MeasureError(f"logits of {count} documents cannot be split: at least {LEAST_DOCUMENTS} are needed")
        whole, terms, position = (torch.stack(x) for x in (self._whole, self._terms, self._position))
        totals = _positive(whole.sum(0))  # (3, heads)
        without = _positive(whole.sum(0) - whole)  # (documents, 3, heads)
        shares = terms.sum(0) / totals[0]
        given = (terms.sum(0) - terms) / without[:, :1]
        # Position · position of the others is already what leaving out the document leaves.
        left_out = position * (count - 1) / without
        pp, axes_pp, distance_pp = (
            Estimate(position[:, axis].sum(0) / totals[axis], left_out[:, axis]) for axis in range(3)
        )
        pc, cp, cc = (Estimate(shares[term], given[:, term]) for term in range(3))
        return LogitSplit(
            pp=pp,
            pc=pc,
            cp=cp,
            cc=cc,
            covariance=1 - pp.value - shares[:3].sum(0),
            pp_mean=shares[3],
            pc_mean=shares[4],
            cp_mean=shares[5],
            axes_pp=axes_pp,
            distance_pp=distance_pp,
        )

    def _squares(self, q: Tensor, k: Tensor) -> Tensor:
        return squares(q, k, window=self._window)

    def _explained(self, q: Tensor, k: Tensor) -> Tensor:
        """Squares around the mean of the logits, of their three-axis fit and of their distance curve, (3, heads)."""
        fit = fit_axes(q, k, window=self._window)
        found = torch.stack([fit.tss, fit.tss - fit.sse, fit.tss * fit.r_subset["a"].square()])
        return torch.where(fit.r.isnan(), 0.0, found)  # constant logits: what is left of their squares is rounding


def logit_split(q: Tensor, k: Tensor, *, window: int | None = None) -> LogitSplit:
    """The split of logits whose queries and keys are all at hand and are not rotated.

    Args:
        q: Queries of every document, ``(documents, heads, n, d)``.
        k: Keys, ``(documents, kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
        window: Only distances below this.
    """
    sums_q, sums_k, logits = PositionSums(len(q)), PositionSums(len(k)), LogitSums(window=window)
    for of_q, of_k in zip(q, k, strict=True):
        sums_q.add(of_q)
        sums_k.add(of_k)
    for of_q, of_k in zip(q, k, strict=True):
        others = sums_q.compare(of_q), sums_k.compare(of_k)
        logits.add(of_q, of_k, others, (flattened(others[0].mean), flattened(others[1].mean)))
    return logits.split()


def flattened(x: Tensor) -> Tensor:
    """``(heads, n, d)`` with its mean over positions at every position."""
    return x.mean(1, keepdim=True).expand_as(x)


def squares(q: Tensor, k: Tensor, *, window: int | None = None) -> Tensor:
    """Sum over causal pairs of the squares of ``q_i · k_j`` around its mean over them, ``(heads,)`` float64.

    Args:
        q: ``(heads, n, d)``.
        k: ``(kv_heads, n, d)``.
        window: Only distances below this.
    """
    n = q.shape[1]
    margins, by_query, by_key = bilinear_margins(q, k, min(n, window or n), dtype=torch.float64)
    band = margins.band
    # q_i · k_j = what the margins are of + by_query[i] + by_key[j]; a constant less does not change what is asked for.
    by_query = by_query - by_query.mean(-1, keepdim=True)
    known = band.pack(by_query.new_zeros(len(by_query), band.width), by_query, by_key)
    total = margins.sums + band.normal(known)
    mean = band.unpack(total)[1].sum(-1) / band.pairs
    around: Tensor = margins.squares + (known * (margins.sums + total)).sum(-1) - band.pairs * mean.square()
    return around.clamp_min(0)


def _real_part(quadratic: Callable[[Tensor, Tensor], Tensor], x: Others, y: Others) -> Tensor:
    """Real part of a quadratic form of the complex products ``x_i · y_j``: that of Re less that of Im."""
    left = torch.cat([x.mean, x.noise], -1)
    return quadratic(left, torch.cat([y.mean, -y.noise], -1)) - quadratic(left, torch.cat([y.noise, y.mean], -1))


def _positive(x: Tensor) -> Tensor:
    """``x`` where it is more than zero, else NaN: shares of nothing are undefined."""
    return torch.where(x > 0, x, torch.nan)
