"""Logits as four terms: position or content of the query times position or content of the key.

With ``q[t, i] = p_i + u[t, i]`` and ``k[t, j] = r_j + v[t, j]``, the logits of document t are

    W[t, i, j] = p_i · r_j  +  p_i · v[t, j]  +  u[t, i] · r_j  +  u[t, i] · v[t, j].

Vectors are those of the dot product, after rotation. A rotation is linear at each position, so both parts are rotated:
with RoPE ``p_i`` is ``R_i p_i``, and even a constant mean vector contributes a curve of the distance.

Every term is centred over the causal pairs of the document (constants cancel in softmax), squared, summed over pairs
and documents and divided by the same sum for W. The terms are not orthogonal; their covariances are reported
separately, and together with them the four shares sum to one.

A document's position parts are estimated from the other documents. A mean over D documents contains 1/D of their
content, which would make p · r too large by about (p · v + u · r) / D and u · v too small by a factor of 2/D to 4/D.
So the mean is combined with a sample of its noise into a complex number whose square is unbiased
(``statistics.Others``): every term becomes complex, the four still sum to W exactly, and the real part of the sum of a
term's squares is unbiased up to third moments over D². It can be negative for a share of zero.

No n × n matrix is computed: see :mod:`wherewhat.measures.axes.margins`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import band_width, fit_axes
from wherewhat.measures.axes.margins import bilinear_margins
from wherewhat.measures.measurement import Subject
from wherewhat.measures.split import LEAST_DOCUMENTS, SplitConfig
from wherewhat.measures.split.statistics import Estimate, Others, PositionSums, jackknife_error
from wherewhat.measures.tensors import check_single_text, defined
from wherewhat.scores import Column, Scores, without


@dataclass(frozen=True)
class LogitSplit:
    """Shares of the logits' variance, one entry per head; NaN where the logits are constant.

    Attributes:
        pp: Position · position.
        pc: Position of the query · content of the key. The error takes the position parts as given.
        cp: Content of the query · position of the key, likewise.
        cc: Content · content, likewise.
        covariance: Twice the covariances of the terms, ``(heads,)``: 1 - pp - pc - cp - cc.
        pp_mean: pp with both position parts replaced by their means over positions, before rotation, ``(heads,)``.
        pc_mean: pc with the mean query in place of the query's position part, ``(heads,)``.
        cp_mean: cp with the mean key in place of the key's position part, ``(heads,)``.
        axes_pp: Share of position · position in the three-axis part of the logits (a + b + c).
        distance_pp: Share of position · position in the distance curve alone.
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
    """Accumulate sums of squares of the terms over documents."""

    def __init__(self, *, window: int | None = None) -> None:
        """Start with no documents; only distances below ``window`` are used."""
        self._window = window
        self._squares = partial(squares, window=window)
        self._terms: list[Tensor] = []  # per document: pc, cp, cc, and with means pp, pc, cp, (6, heads)
        self._whole: list[Tensor] = []  # per document: all logits, their three axes, their distance curve, (3, heads)
        self._position: list[Tensor] = []  # the same of position · position, without the document

    def add(self, q: Tensor, k: Tensor, others: tuple[Others, Others], flat: tuple[Tensor, Tensor]) -> None:
        """Add a document.

        Args:
            q: Its queries after rotation, ``(heads, n, d)``.
            k: Its keys, ``(kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
            others: Position parts of queries and keys estimated from the other documents, after rotation.
            flat: Means of these over positions, after rotation.
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
        """Return the shares."""
        count = len(self._terms)
        if count < LEAST_DOCUMENTS:
            raise MeasureError(f"logits of {count} documents cannot be split: at least {LEAST_DOCUMENTS} are needed")
        whole, terms, position = (torch.stack(x) for x in (self._whole, self._terms, self._position))
        totals = _positive(whole.sum(0))  # (3, heads)
        rest = _positive(whole.sum(0) - whole)  # (documents, 3, heads)
        shares = terms.sum(0) / totals[0]
        without_each = (terms.sum(0) - terms) / rest[:, :1]
        # Position · position is estimated from the other documents, so it already leaves out the document.
        left_out = position * (count - 1) / rest
        pp, axes_pp, distance_pp = (
            Estimate(position[:, axis].sum(0) / totals[axis], left_out[:, axis]) for axis in range(3)
        )
        pc, cp, cc = (Estimate(shares[term], without_each[:, term]) for term in range(3))
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

    def _explained(self, q: Tensor, k: Tensor) -> Tensor:
        """Return centred squares of the logits, of their three-axis fit and of their distance curve, ``(3, heads)``."""
        fit = fit_axes(q, k, window=self._window)
        squares = torch.stack([fit.tss, fit.tss - fit.sse, fit.tss * fit.r_subset["a"].square()])
        return torch.where(fit.r.isnan(), 0.0, squares)  # the squares of constant logits are rounding


def logit_split(q: Tensor, k: Tensor, *, window: int | None = None) -> LogitSplit:
    """Return the split of the logits of unrotated queries and keys.

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
    """Return ``(heads, n, d)`` with its mean over positions at every position."""
    return x.mean(1, keepdim=True).expand_as(x)


def squares(q: Tensor, k: Tensor, *, window: int | None = None) -> Tensor:
    """Return the sum over causal pairs of the squares of ``q_i · k_j`` around its mean, ``(heads,)`` float64.

    For ``q`` ``(heads, n, d)`` and ``k`` ``(kv_heads, n, d)``, and only distances below ``window``.
    """
    n = q.shape[1]
    margins, by_query, by_key = bilinear_margins(q, k, min(n, window or n), dtype=torch.float64)
    band = margins.band
    # q_i · k_j = matrix of the margins + by_query[i] + by_key[j]; subtracting a constant does not change the result.
    by_query = by_query - by_query.mean(-1, keepdim=True)
    known = band.pack(by_query.new_zeros(len(by_query), band.width), by_query, by_key)
    total = margins.sums + band.normal(known)
    mean = band.unpack(total)[1].sum(-1) / band.pairs
    around: Tensor = margins.squares + (known * (margins.sums + total)).sum(-1) - band.pairs * mean.square()
    return around.clamp_min(0)


def _real_part(quadratic: Callable[[Tensor, Tensor], Tensor], x: Others, y: Others) -> Tensor:
    """Return the real part of a quadratic form of the complex products ``x_i · y_j``: that of Re minus that of Im."""
    left = torch.cat([x.mean, x.noise], -1)
    return quadratic(left, torch.cat([y.mean, -y.noise], -1)) - quadratic(left, torch.cat([y.noise, y.mean], -1))


def _positive(x: Tensor) -> Tensor:
    """Return ``x`` where it is positive, else NaN."""
    return torch.where(x > 0, x, torch.nan)


_LEAST_TOKENS = 4
"""Smallest number of tokens for a three-axis fit."""


class LayerSplit:
    """Sums over documents for one layer, in two passes.

    Holds 2 · (heads + kv_heads) · n · d float64 numbers.
    """

    def __init__(self, documents: int, *, skip: int) -> None:
        self._skip = skip
        self._q, self._k = PositionSums(documents), PositionSums(documents)
        self._logits: LogitSums | None = None
        self._groups = 1

    def first(self, attention: LayerAttention) -> None:
        """Add a document in the first pass."""
        check_single_text(attention)
        self._groups = attention.heads // attention.kv_heads
        self._q.add(attention.q[0, :, self._skip :])
        self._k.add(attention.k[0, :, self._skip :])

    def second(self, attention: LayerAttention) -> None:
        """Add the same document in the second pass, when the position parts are known."""
        of_q = self._q.compare(attention.q[0, :, self._skip :])
        of_k = self._k.compare(attention.k[0, :, self._skip :])
        if self._logits is None:
            self._logits = LogitSums(window=band_width(attention))

        def rotated(x: Tensor) -> Tensor:
            """Rotate vectors ``(heads, n, d)`` as the layer does; rotation is linear, so parts rotate separately."""
            if attention.rotation is None:
                return x
            positions = attention.positions.reshape(-1, attention.m)[0, self._skip :]
            return attention.rotation.rotate(x, positions)

        self._logits.add(
            attention.rot_q[0, :, self._skip :],
            attention.rot_k[0, :, self._skip :],
            (Others(rotated(of_q.mean), rotated(of_q.noise)), Others(rotated(of_k.mean), rotated(of_k.noise))),
            (rotated(flattened(of_q.mean)), rotated(flattened(of_k.mean))),
        )

    def scores(self, layer: int) -> tuple[Scores, dict[str, Tensor]]:
        """Return the layer's scores, and the estimates with a jackknife error without each document."""
        assert self._logits is not None
        estimates: dict[str, Estimate] = {}
        heads: dict[str, Tensor] = {}
        for name, share, groups in (("q", self._q.share(), 1), ("k", self._k.share(), self._groups)):
            both = (share.share.value, share.share.left_out)
            estimates[f"{name}_position"] = Estimate(*(x.repeat_interleave(groups, -1) for x in both))
            heads[f"{name}_position_raw"] = share.raw.repeat_interleave(groups)
            heads[f"{name}_position_shuffled"] = share.shuffled.repeat_interleave(groups)
        split = self._logits.split()
        for term in ("pp", "pc", "cp", "cc"):
            estimates[f"logit_{term}"] = getattr(split, term)
        for term in ("covariance", "pp_mean", "pc_mean", "cp_mean"):
            heads[f"logit_{term}"] = getattr(split, term)
        estimates |= {"axes_pp": split.axes_pp, "distance_pp": split.distance_pp}
        for name, estimate in estimates.items():
            heads |= {name: estimate.value, f"{name}_se": estimate.error}
        left_out = {name: estimate.left_out.cpu() for name, estimate in estimates.items()}
        heads = {name: values.cpu() for name, values in heads.items()}
        return Scores(layer=layer, heads=heads, whole=errors_of_means(left_out)), left_out


def errors_of_means(left_out: dict[str, Tensor]) -> dict[str, float]:
    """Return standard errors of means over heads, from leave-one-out estimates ``(documents, heads)``."""
    return defined({f"{name}_se": float(jackknife_error(values.nanmean(-1))) for name, values in left_out.items()})


def split_documents(subject: Subject, documents: Sequence[Tensor], config: SplitConfig) -> Scores:
    """Split queries, keys and logits of a model into position and content over documents of one length.

    The model runs on every document ``(n,)`` twice. Memory is 2 · (heads + kv_heads) · n · d float64 numbers per layer,
    independent of the number of documents.
    """
    if len(documents) < LEAST_DOCUMENTS:
        raise MeasureError(
            f"documents={len(documents)} cannot be split: at least {LEAST_DOCUMENTS} are needed, 8 or more are better"
        )
    lengths = sorted({len(ids) for ids in documents})
    if len(lengths) > 1:
        raise MeasureError(f"documents have from {lengths[0]} to {lengths[-1]} tokens: cut all to one length")
    if lengths[0] - config.skip < _LEAST_TOKENS:
        raise MeasureError(
            f"skip is {config.skip}, but the texts have only {lengths[0]} tokens: at least {_LEAST_TOKENS} must be left"
        )
    layers: dict[int, LayerSplit] = defaultdict(lambda: LayerSplit(len(documents), skip=config.skip))
    for ids in documents:
        subject.run(ids[None], lambda attention: layers[attention.layer].first(attention))
    for ids in documents:
        subject.run(ids[None], lambda attention: layers[attention.layer].second(attention))
    by_layer = {index: layers[index].scores(index) for index in sorted(layers)}
    names = next(iter(by_layer.values()))[1] if by_layer else {}
    left_out = {name: torch.cat([of_layer[name] for _, of_layer in by_layer.values()], -1) for name in names}
    means = {without(name): Column(values.nanmean(-1), ("document",)) for name, values in left_out.items()}
    return Scores(layers=[scores for scores, _ in by_layer.values()], whole=errors_of_means(left_out), curves=means)
