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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import band_width, fit_axes
from wherewhat.measures.axes.solver import Band
from wherewhat.measures.measurement import Subject
from wherewhat.measures.split import LEAST_DOCUMENTS, SplitConfig
from wherewhat.measures.split.statistics import Estimate, Others, PositionSums, check_vectors, jackknife_error
from wherewhat.measures.tensors import check_single_text, chunk_size, chunked, defined, dots
from wherewhat.numerics import has_triton
from wherewhat.scores import Column, Scores, on_cpu, without

_ROWS = 128
"""Rows of logits that a fit computes at a time: later keys are left out."""

_ENTRIES = {"cpu": 2**18, "cuda": 2**26}
"""Entries of queries processed at a time: limited by caches on a CPU, by memory on a GPU."""


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
        self._terms: list[Tensor] = []  # pc, cp, cc, and with means pp, pc, cp, (some documents, 6, heads)
        self._whole: list[Tensor] = []  # all logits, their three axes, their distance curve, (some documents, 3, heads)
        self._position: list[Tensor] = []  # the same of position · position, without the document

    def add(self, q: Tensor, k: Tensor, others: tuple[Others, Others], flat: tuple[Tensor, Tensor]) -> None:
        """Add some documents.

        Args:
            q: Their queries after rotation, ``(documents, heads, n, d)``.
            k: Their keys, ``(documents, kv_heads, n, d)``; query head h reads key head ``h // (heads // kv_heads)``.
            others: Position parts of queries and keys estimated from the other documents, after rotation.
            flat: Means of these over positions, after rotation.
        """
        documents, d = len(q), q.shape[-1]
        # Heads of all documents are one dimension.
        q, k, of_q, of_k, flat_q, flat_k = (
            x.double().flatten(0, 1) for x in (q, k, others[0].parts, others[1].parts, *flat)
        )
        content_q, content_k = _rest(q, of_q), _rest(k, of_k)
        # The real part of the square of a complex product is the square of its real part minus that of the imaginary.
        position, content = _complex(of_k), _complex(content_k)
        in_chunks = partial(_Queries, kv_heads=len(k), window=self._window)
        by_position, by_content, by_mean = in_chunks(of_q), in_chunks(content_q), in_chunks(flat_q)
        terms = [
            by_position.squares(*content),
            by_content.squares(*position),
            by_content.squares(*content),
            by_mean.squares(flat_k),
            by_mean.squares(content_k[..., :d], content_k[..., d:]),
            by_content.squares(flat_k) - by_content.squares(flat_k, first=d),
        ]
        for sums, values in (
            (self._terms, torch.stack(terms)),
            (self._whole, self._explained(q, k)),
            (self._position, self._explained(of_q, position[0]) - self._explained(of_q, position[1])),
        ):
            sums.append(torch.unflatten(values, -1, (documents, -1)).transpose(0, 1))

    def split(self) -> LogitSplit:
        """Return the shares."""
        whole, terms, position = (torch.cat(x) for x in (self._whole, self._terms, self._position))
        count = len(terms)
        if count < LEAST_DOCUMENTS:
            raise MeasureError(f"logits of {count} documents cannot be split: at least {LEAST_DOCUMENTS} are needed")
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
        fit = fit_axes(q, k, window=self._window, block=_ROWS, check=False)
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
    check_vectors(q, k)
    sums_q.add(q)
    sums_k.add(k)
    others = sums_q.compare(q), sums_k.compare(k)
    logits.add(q, k, others, (others[0].flat.expand_as(q), others[1].flat.expand_as(k)))
    return logits.split()


def squares(q: Tensor, *keys: Tensor, window: int | None = None) -> Tensor:
    """Return the sum over causal pairs of the squares of ``q_i · k_j`` around its mean, ``(heads,)`` float64.

    Args:
        q: ``(heads, n, d)``.
        keys: ``(kv_heads, n, d)``; the squares of a second tensor are subtracted from those of the first.
        window: Only distances below this.
    """
    return _Queries(q, kv_heads=len(keys[0]), window=window).squares(*keys)


class _Queries:
    """Queries in chunks of tokens, which sums with several keys share.

    Args:
        q: ``(heads, n, d)``.
        kv_heads: Number of key heads.
        window: Only distances below this.
    """

    def __init__(self, q: Tensor, *, kv_heads: int, window: int | None) -> None:
        heads, n, d = q.shape
        self._n, self._width = n, min(n, window or n)
        groups = heads // kv_heads
        self._step = max(1, _ENTRIES.get(q.device.type, 2**20) // (groups * n * d))
        by_key = torch.unflatten(q, 0, (-1, groups))
        parts = [by_key[start : start + self._step] for start in range(0, kv_heads, self._step)]
        self._whole = [_in_chunks(x) for x in parts]
        # A band is the triangle minus the smaller triangle of the far pairs.
        w = self._width
        self._far = [_in_chunks(x[:, :, w:]) for x in parts] if w < n else []

    def squares(self, *keys: Tensor, first: int = 0) -> Tensor:
        """Return the sum of squares around the mean, ``(heads,)``, as :func:`squares` does.

        With as many dimensions as the keys ``(kv_heads, n, d)`` have, from ``first`` on.
        """
        own = slice(first, first + keys[0].shape[-1])
        parts: list[Tensor] = []
        for number, whole in enumerate(self._whole):
            chosen = [k[number * self._step : (number + 1) * self._step] for k in keys]
            sums = _triangle_sums(whole, chosen, own)
            if self._far:
                far = [k[:, : self._n - self._width] for k in chosen]
                sums = sums - _triangle_sums(self._far[number], far, own)
            parts.append(sums.flatten(1))
        total = torch.cat(parts, -1)
        # In float64 the cancellation of the means' squares leaves ten digits or more.
        means = total[1:].square() / Band(self._n, self._width, total.device).pairs
        around = total[0] - means[0]
        return around.clamp_min(0) if len(keys) == 1 else around + means[1]


def _in_chunks(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(kv_heads, groups, n, d)`` in chunks of tokens, and their sums ``(chunks, kv_heads, groups, d)``."""
    chunks = chunked(q, chunk_size(*q.shape[-2:]))
    return chunks, chunks.sum(-2)


def _triangle_sums(queries: tuple[Tensor, Tensor], keys: Sequence[Tensor], own: slice) -> Tensor:
    """Return sums over the causal triangle of the squares of ``q_i · k_j`` and of the products themselves.

    For some dimensions of what :func:`_in_chunks` returns and ``keys`` ``(kv_heads, n, d)``:
    ``(1 + keys, kv_heads, groups)``, first the squares of the first keys minus those of the second.
    """
    q, of_queries = (x[..., own] for x in queries)
    chunks, kv_heads, groups, size, d = q.shape
    # Heads that share keys are adjacent, so that no product repeats its keys.
    flat = q.flatten(2, 3).flatten(0, 1)
    earlier: Tensor | None = None  # Gram matrices of the keys of all chunks but the last
    squares: Tensor | None = None
    sums: list[Tensor] = []
    for key in keys:
        k = chunked(key, size)
        within, inside = _lower_sums((flat @ k.flatten(0, 1).mT).view(*q.shape[:-1], size))
        within = within.sum(0)
        squares = within if squares is None else squares - within
        before = k[:-1].flatten(0, 1)
        earlier = before.mT @ before if earlier is None else earlier.baddbmm_(before.mT, before, alpha=-1)
        of_keys = k.sum(-2)
        of_earlier = of_keys.cumsum(0) - of_keys  # (chunks, kv_heads, d)
        sums.append((inside + (of_queries @ of_earlier[..., None])[..., 0]).sum(0))
    assert earlier is not None
    assert squares is not None
    earlier = earlier.view(chunks - 1, kv_heads, d, d).cumsum(0).flatten(0, 1)  # of all chunks before the second one, …
    later = flat[kv_heads:]
    products = dots(*(torch.unflatten(x, 1, (groups, size)).flatten(0, 1) for x in (later @ earlier, later)))
    between = products.view(chunks - 1, kv_heads, groups).sum(0)
    return torch.stack([squares + between, *sums])


def _lower_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of squares and of entries on and below the diagonal of ``x`` ``(..., n, n)``, which is changed."""
    if has_triton(x.device):
        from wherewhat.measures.sums_cuda import triangle_sums

        return triangle_sums(x)
    x.tril_()
    return torch.linalg.vector_norm(x, dim=(-1, -2)).square(), x.sum((-1, -2))


def _rest(x: Tensor, parts: Tensor) -> Tensor:
    """Return vectors ``(heads, n, d)`` minus complex parts ``(heads, n, 2 · d)``, real and imaginary side by side."""
    rest, d = torch.empty_like(parts), x.shape[-1]
    torch.sub(x, parts[..., :d], out=rest[..., :d])
    torch.neg(parts[..., d:], out=rest[..., d:])
    return rest


def _complex(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys whose products with those of queries are real and imaginary parts of complex products.

    Arguments are complex vectors ``(..., 2 · d)``, real and imaginary parts side by side.
    """
    mean, noise = parts.chunk(2, -1)
    return torch.cat([mean, -noise], -1), torch.cat([noise, mean], -1)


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
        """Add the documents of a layer in the first pass."""
        check_single_text(attention.text(0))
        self._groups = attention.heads // attention.kv_heads
        self._q.add(attention.q[:, :, self._skip :])
        self._k.add(attention.k[:, :, self._skip :])

    def second(self, attention: LayerAttention) -> None:
        """Add the same documents in the second pass, when the position parts are known."""
        rot_q, rot_k = attention.rot_q[:, :, self._skip :], attention.rot_k[:, :, self._skip :]
        if self._logits is None:
            self._logits = LogitSums(window=band_width(attention.text(0)))
        positions = attention.positions.reshape(-1, attention.m)[0, self._skip :]

        def rotated(x: Tensor) -> Tensor:
            """Rotate vectors ``(..., n, d)`` as the layer does."""
            return x if attention.rotation is None else attention.rotation.rotate(x, positions)

        of_q = self._q.compare(attention.q[:, :, self._skip :], rot_q, rotated)
        of_k = self._k.compare(attention.k[:, :, self._skip :], rot_k, rotated)
        flat = rotated(of_q.flat.expand_as(rot_q)), rotated(of_k.flat.expand_as(rot_k))
        self._logits.add(rot_q, rot_k, (of_q, of_k), flat)

    def scores(self, layer: int) -> Scores:
        """Return the layer's scores, with the estimates without each document as curves."""
        assert self._logits is not None
        heads: dict[str, Tensor] = {}
        estimates: dict[str, Estimate] = {}
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
        axes = ("document", "head")
        curves = {without(name): Column(estimate.left_out, axes) for name, estimate in estimates.items()}
        return Scores(layer=layer, heads=heads, curves=curves)


def split_layer(attention: LayerAttention, config: SplitConfig) -> Scores:
    """Split a layer of one pass over all documents, as :meth:`LayerSplit.scores` returns it."""
    _check_documents(attention.texts, [attention.n], config)
    groups = attention.heads // attention.kv_heads
    per_key_head = attention.texts * groups * attention.n * attention.rot_q.shape[-1]
    step = max(1, _ENTRIES.get(attention.rot_q.device.type, 2**20) // per_key_head)
    parts: list[Scores] = []
    for start in range(0, attention.kv_heads, step):
        sums = LayerSplit(attention.texts, skip=config.skip)
        heads = attention
        if step < attention.kv_heads:
            queries = slice(start * groups, (start + step) * groups)
            rot_k = attention.rot_k[:, start : start + step]
            heads = replace(attention, rot_q=attention.rot_q[:, queries], rot_k=rot_k)
        sums.first(heads)
        sums.second(heads)
        parts.append(sums.scores(attention.layer))
    return Scores(
        layer=attention.layer,
        heads={name: torch.cat([part.heads[name] for part in parts]) for name in parts[0].heads},
        curves={
            name: Column(torch.cat([part.curves[name].values for part in parts], -1), column.axes)
            for name, column in parts[0].curves.items()
        },
    )


def joined(layers: Sequence[Scores]) -> Scores:
    """Return the scores of a model from those of its layers, with errors of means over heads.

    Of the estimates without each document, means over all heads are kept.
    """
    ordered = sorted(layers, key=lambda scores: scores.layer)
    of_layers = [{name: column.values for name, column in layer.curves.items()} for layer in ordered]
    all_heads = {name: torch.cat([x[name] for x in of_layers], -1) for name in (of_layers[0] if of_layers else {})}
    return Scores(
        layers=[
            Scores(layer=layer.layer, heads=layer.heads, whole=_errors(left_out))
            for layer, left_out in zip(ordered, of_layers, strict=True)
        ],
        whole=_errors(all_heads),
        curves={name: Column(x.nanmean(-1), ("document",)) for name, x in all_heads.items()},
    )


def _errors(left_out: dict[str, Tensor]) -> dict[str, float]:
    """Return standard errors of means over heads, from estimates ``(documents, heads)`` without each document."""
    ending = without("")
    return defined(
        {f"{name.removesuffix(ending)}_se": float(jackknife_error(x.nanmean(-1))) for name, x in left_out.items()}
    )


def _check_documents(count: int, lengths: Sequence[int], config: SplitConfig) -> None:
    """Raise an error for too few documents, and for lengths that differ or are too short."""
    if count < LEAST_DOCUMENTS:
        raise MeasureError(
            f"documents={count} cannot be split: at least {LEAST_DOCUMENTS} are needed, 8 or more are better"
        )
    if min(lengths) < max(lengths):
        raise MeasureError(f"documents have from {min(lengths)} to {max(lengths)} tokens: cut all to one length")
    if lengths[0] - config.skip < _LEAST_TOKENS:
        raise MeasureError(
            f"skip is {config.skip}, but the texts have only {lengths[0]} tokens: at least {_LEAST_TOKENS} must be left"
        )


def split_documents(subject: Subject, documents: Sequence[Tensor], config: SplitConfig, *, together: int = 1) -> Scores:
    """Split queries, keys and logits of a model into position and content over documents of one length.

    The model runs on every document ``(n,)`` twice, on ``together`` of them at a time. Memory is
    2 · (heads + kv_heads) · n · d float64 numbers per layer, independent of the number of documents.
    """
    _check_documents(len(documents), [len(ids) for ids in documents], config)
    layers: dict[int, LayerSplit] = defaultdict(lambda: LayerSplit(len(documents), skip=config.skip))
    batches = [torch.stack(list(documents[i : i + together])) for i in range(0, len(documents), together)]
    finite: list[Tensor] = []

    def first(attention: LayerAttention) -> None:
        finite.extend(x.isfinite().all() for x in (attention.rot_q, attention.rot_k))
        layers[attention.layer].first(attention)

    for ids in batches:
        subject.run(ids, first)
    if not all(map(bool, finite)):  # read after the pass: reading waits for a GPU
        raise MeasureError("vectors hold NaN or Inf: the model's activations overflow")
    for ids in batches:
        subject.run(ids, lambda attention: layers[attention.layer].second(attention))
    return joined(on_cpu([Scores(layers=[layers[index].scores(index) for index in sorted(layers)])])[0].layers)
