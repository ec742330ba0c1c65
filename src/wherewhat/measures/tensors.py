"""Statistics and checks of tensors: intervals over documents, correlations, ranks, and next-token losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.weak import WeakTensorKeyDictionary

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.statistics import share_bounds, student
from wherewhat.numerics import has_triton
from wherewhat.scores import Column, Scores


def over_documents(values: Tensor) -> Tensor:
    """Return 95 % Student intervals of means over documents, ``(heads, 2)`` float64.

    Queries of one text are less independent than texts, so each document counts once, by its mean. The interval of a
    single document is over its queries and says nothing about other texts. NaN values are left out; the bounds are NaN
    where fewer than two are left.

    Args:
        values: ``(heads, documents, queries)``.
    """
    units = (values[:, 0] if values.shape[1] == 1 else values.double().nanmean(-1)).double()
    known = ~units.isnan()
    count = known.sum(-1)
    mean = units.nansum(-1) / count
    squares = (units - mean[:, None]).masked_fill(~known, 0).square().sum(-1)
    reach = _quantiles(units.shape[-1], units.device)[count] * (squares / (count - 1) / count).sqrt()
    return torch.stack([mean - reach, mean + reach], -1)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _quantiles(most: int, device: torch.device) -> Tensor:
    """Return Student's 97.5 % quantile for means of 0 to ``most`` values, ``(most + 1,)``; NaN for fewer than two."""
    quantiles = [student(n) if n > 1 else math.nan for n in range(most + 1)]
    return torch.tensor(quantiles, dtype=torch.float64, device=device)


def share_intervals(hits: Tensor, counts: Tensor) -> Tensor:
    """Return Wilson's 95 % intervals of shares, ``(..., 2)`` float64; NaN where the count is zero.

    Args:
        hits: Number of hits, any shape.
        counts: Number of trials, broadcastable to the same shape.
    """
    n = counts.double().expand(hits.shape)
    pairs = zip((hits.double() / n).flatten().tolist(), n.flatten().tolist(), strict=True)
    bounds = [share_bounds(share, count) if count else (math.nan, math.nan) for share, count in pairs]
    return torch.tensor(bounds, dtype=torch.float64).view(*hits.shape, 2)


_CONSTANT = 8 * torch.finfo(torch.float32).eps
"""Largest deviation from the mean, relative to the numbers, that is rounding."""


def correlation(x: Tensor, y: Tensor) -> float:
    """Return the Pearson correlation of two ``(n,)``, NaN left out; NaN for fewer than 3 or a constant.

    Numbers that differ by less than the rounding of float32, in which models run, count as a constant.
    """
    known = ~(x.isnan() | y.isnan())
    if int(known.sum()) < 3:
        return torch.nan
    both = torch.stack([x[known], y[known]]).double()
    centred = both - both.mean(1, keepdim=True)
    squares = centred.square().sum(1)
    if bool((squares <= _CONSTANT**2 * both.square().sum(1)).any()):
        return torch.nan
    return float(centred.prod(0).sum() / squares.prod().sqrt())


def centred_ranks(x: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return ranks along the last dimension of ``x`` ``(..., m)``, centred, float64; ties share their mean rank.

    Args:
        x: Numbers without infinite ones.
        visible: True for the entries to rank among each other, broadcastable to ``x``; the others get 0.
    """
    if visible is None:
        visible = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
    count = visible.sum(-1, keepdim=True)
    ranks = _packed_ranks(x, visible, count)
    if ranks is not None:
        return ranks
    x = torch.where(visible, x.double(), torch.inf)  # hidden entries come last
    if has_triton(x.device):
        from wherewhat.measures.ranks_cuda import MOST_ENTRIES, counted_ranks

        if x.shape[-1] <= MOST_ENTRIES:
            return counted_ranks(x)
    ordered = x.sort(-1).values
    # Half of the number of smaller entries less that of larger ones, without reading a number from a GPU.
    smaller, until = (torch.searchsorted(ordered, x, right=right) for right in (False, True))
    return torch.where(visible, (smaller + until - count).double() / 2, 0.0)


_PACKED = 2**12
"""Longest rows whose entries are sorted together with their indices in one number each."""


def _packed_ranks(x: Tensor, visible: Tensor, count: Tensor) -> Tensor | None:
    """Return centred ranks on the CPU, or None if there may be ties.

    NumPy sorts rows of some hundred numbers ten times faster than PyTorch sorts numbers and indices. The last bits of
    each number are replaced by its index; numbers that differ in these bits only count as ties.
    """
    m = x.shape[-1]
    if x.device.type != "cpu" or m > _PACKED:
        return None
    index_bits = (m - 1).bit_length()
    mask = (1 << index_bits) - 1
    place = torch.arange(m)
    bits = torch.where(visible, x.double(), torch.inf).view(torch.int64)  # hidden entries come last
    other = bits >> 63
    bits ^= other.bitwise_and_(torch.iinfo(torch.int64).max)  # ordered as the numbers are
    bits.bitwise_and_(~mask).bitwise_or_(place).numpy().sort(-1)
    torch.bitwise_right_shift(bits, index_bits, out=other)
    ties = (other[..., 1:] == other[..., :-1]).count_nonzero()
    if int(ties) != int((m - count - 1).clamp_min(0).expand(*x.shape[:-1], 1).sum()):  # of hidden entries
        return None
    ranks = torch.where(place < count, place - (count - 1).double() / 2, 0.0).expand(x.shape)
    return torch.empty(x.shape, dtype=torch.float64).scatter_(-1, bits.bitwise_and_(mask), ranks)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine similarity of ``x`` and ``y`` along the last dimension; NaN where one of them is zero."""
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    return torch.where(norms > 0, ((x * y).sum(-1) / norms).clamp(-1, 1), torch.nan)


def defined(values: Mapping[str, float]) -> dict[str, float]:
    """Return the entries that are not NaN."""
    return {name: value for name, value in values.items() if value == value}


_HOST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Copies of tensors on the CPU, as long as the tensors exist."""


def on_host(x: Tensor) -> Tensor:
    """Return a tensor on the CPU; kept, because reading waits for a GPU, and layers share positions."""
    if x.device.type == "cpu":
        return x
    if x not in _HOST:
        _HOST[x] = x.cpu()
    copy: Tensor = _HOST[x]
    return copy


def per_query_head(x: Tensor, attention: LayerAttention) -> Tensor:
    """Repeat values ``(kv_heads, ...)`` of key heads for the query heads that read them, ``(heads, ...)``."""
    return x.repeat_interleave(attention.heads // attention.kv_heads, 0)


def scores_by_text(
    attention: LayerAttention,
    *,
    heads: Mapping[str, Tensor] | None = None,
    whole: Mapping[str, float | Tensor] | None = None,
    curves: Mapping[str, Column] | None = None,
) -> list[Scores]:
    """Return the scores of each text of a layer from those of its merged heads, without a copy.

    Args:
        attention: The layer, with all its texts.
        heads: Values ``(texts · heads,)`` by metric.
        whole: Numbers that all texts share, or a tensor ``(texts,)`` with one for each.
        curves: Columns with a first axis ``head`` of all texts' heads or ``text`` of all texts; others are shared.
    """
    texts = attention.texts
    # All parts of a tensor by one call: a call for each text would take longer than many a kernel.
    by_head = {name: x.view(texts, -1).unbind() for name, x in (heads or {}).items()}
    split = {
        name: (torch.unflatten(column.values, 0, (texts, -1)) if column.axes[0] == "head" else column.values).unbind()
        for name, column in (curves or {}).items()
        if column.axes and column.axes[0] in ("head", "text")
    }
    of_texts = {
        name: x.unbind() if isinstance(x, Tensor) and x.ndim else [x] * texts for name, x in (whole or {}).items()
    }

    def curve(name: str, column: Column, text: int) -> Column:
        if name not in split:
            return column
        return Column(split[name][text], column.axes if column.axes[0] == "head" else column.axes[1:])

    return [
        Scores(
            layer=attention.layer,
            heads={name: x[text] for name, x in by_head.items()},
            whole={name: x[text] for name, x in of_texts.items()},  # type: ignore[misc]
            curves={name: curve(name, column, text) for name, column in (curves or {}).items()},
        )
        for text in range(texts)
    ]


def by_text(values: Tensor, attention: LayerAttention) -> Tensor:
    """Return values ``(texts · heads, ...)`` of merged heads as ``(texts, heads, ...)``."""
    return torch.unflatten(values, 0, (attention.texts, -1))


def rotates(attention: LayerAttention) -> bool:
    """Return whether a layer rotates its queries and keys by an angle other than zero."""
    return attention.rotation is not None and bool(attention.rotation.inv_freq.any())


def check_single_text(attention: LayerAttention) -> None:
    """Raise an error unless a layer holds one text with as many keys as queries."""
    if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
        raise MeasureError(
            f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for {attention.n} "
            "queries: measure one text at a time, without a cache"
        )


def check_heads(q: Tensor, k: Tensor) -> None:
    """Raise an error unless ``q`` is ``(heads, n, d)`` and ``k`` ``(kv_heads, m, d)`` with grouped heads."""
    if q.ndim != 3 or k.ndim != 3:
        raise MeasureError(f"q and k must be (heads, n, d), not {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape[0] == 0 or q.shape[0] == 0 or q.shape[0] % k.shape[0]:
        raise MeasureError(
            f"{q.shape[0]} query heads cannot share {k.shape[0]} key heads evenly: heads must be a multiple of kv_heads"
        )


def check_finite(q: Tensor, k: Tensor) -> None:
    """Raise an error if queries or keys hold NaN or Inf."""
    for name, x in (("q", q), ("k", k)):
        if not bool(x.isfinite().all()):
            raise MeasureError(f"{name} holds NaN or Inf ({x.dtype}): the model overflows; use float32 or bfloat16")


_BLOCK = 1024
"""Number of tokens whose logits are held in float32 at a time."""

_HALF = 2e-2
"""Relative precision of a loss in half precision, where models round to three digits and replacements do not."""


def check_faithful(
    what: str, loss: float, expected: float, *, dtypes: Collection[torch.dtype], precision: float
) -> None:
    """Raise an error if an intervention that changes nothing changes the loss.

    Args:
        what: Name of the intervention.
        loss: Loss under the intervention, in nats.
        expected: Loss of the model without it. The precision of losses above one is proportional to their size.
        dtypes: Types that the model computes in.
        precision: Largest relative change of the loss, of at least one nat, in float32.
    """
    half = any(torch.finfo(dtype).eps > torch.finfo(torch.float32).eps for dtype in dtypes)
    allowed = (_HALF if half else precision) * max(1.0, expected)
    if not abs(loss - expected) <= allowed:
        raise MeasureError(
            f"{what} is not faithful on this model: with nothing changed its loss is {loss:.6g}, without it "
            f"{expected:.6g} (allowed difference {allowed:.2g})"
        )


def text_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of every token but the first of texts, ``(texts, n - 1)`` float64 on the device of the logits.

    Args:
        logits: Logits ``(texts, n or n - 1, vocabulary)``.
        ids: Tokens ``(texts, n)``.
    """
    targets = ids[:, 1:].to(logits.device)
    n = targets.shape[1]
    parts = [
        cross_entropy(text[i : min(n, i + _BLOCK)].float(), own[i : i + _BLOCK], reduction="none")
        for text, own in zip(logits, targets, strict=True)
        for i in range(0, n, _BLOCK)
    ]
    return torch.cat(parts).double().view(len(ids), n)


def right_logits(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logit of every token but the first, less the mean over the vocabulary, ``(texts, n - 1)`` float64.

    Arguments are those of :func:`text_losses`. A constant that is added to all logits changes nothing.
    """
    targets = ids[:, 1:].to(logits.device)
    logits = logits[:, : targets.shape[1]]
    right = logits.gather(-1, targets[..., None])[..., 0]
    return right.double() - logits.mean(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).double()


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of every token but the first, by the index it is predicted from, ``(n - 1,)`` float64 on the CPU.

    Args:
        logits: Logits ``(1, n or n - 1, vocabulary)``.
        ids: Tokens ``(1, n)``.
    """
    return text_losses(logits, ids)[0].cpu()


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """Return the mean cross-entropy of the next token, in nats; arguments as for :func:`token_losses`."""
    return float(token_losses(logits, ids).mean())


_BITS = 2**32 - 1
"""Mask of the integers that noise is made from."""


def _mixed(x: Tensor) -> Tensor:
    """Return 32-bit integers, held as int64, as other ones without their patterns (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _BITS
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _BITS
    return x ^ (x >> 16)


def hashed_noise(layer: int, heads: int, rows: slice, columns: int, device: torch.device) -> Tensor:
    """Return Gaussian noise ``(heads, rows, columns)`` float32 for one layer.

    It is a function of layer, head, row and column: the same on every device and for blocks of any size.
    """

    def counted(start: int, stop: int, factor: int) -> Tensor:
        return torch.arange(start, stop, device=device) * factor

    by_head = _mixed(counted(0, heads, 0x9E3779B1) + layer * 0x7FEB352D & _BITS)
    by_row = _mixed(by_head[:, None] + counted(rows.start, rows.stop, 0x846CA68B) & _BITS)
    drawn = _mixed(by_row[..., None] + counted(0, columns, 0xB5297A4D) & _BITS)
    # 23 bits and a half are exact in float32, and neither 0 nor 1.
    noise: Tensor = torch.special.ndtri(((drawn >> 9).float() + 0.5) * 2.0**-23)
    return noise


def chunk_size(n: int, d: int) -> int:
    """Return the number of tokens of a chunk: work inside a chunk grows with it, work between chunks shrinks."""
    return min(n, max(64, d // 2))


def chunked(x: Tensor, size: int) -> Tensor:
    """Return ``(..., n, d)`` in chunks of tokens, ``(chunks, ..., size, d)`` in double precision.

    The tokens after the text are zero, which changes no sum.
    """
    *lead, n, d = x.shape
    full, rest = divmod(n, size)
    chunks = x.new_empty(full + (rest > 0), *lead, size, d, dtype=torch.promote_types(x.dtype, torch.float64))
    chunks[:full] = torch.unflatten(x[..., : full * size, :], -2, (full, size)).movedim(-3, 0)
    if rest:
        chunks[full, ..., :rest, :] = x[..., full * size :, :]
        chunks[full, ..., rest:, :] = 0
    return chunks


def fft_length(least: int) -> int:
    """Return the smallest 2^a, 3·2^a or 5·2^a that is at least ``least``: lengths at which FFTs are fast."""
    power = 1 << max(0, (least - 1).bit_length())
    return min(x for x in (power, 5 * power // 8, 3 * power // 4) if x >= least)


def effective_rank(x: Tensor) -> Tensor:
    """Return the effective rank of ``x`` ``(..., n, d)``: exponential of the entropy of its normalised singular values.

    Between 1 (all tokens parallel) and min(n, d); 0 for zero tensors. Roy & Vetterli, EUSIPCO 2007. Computed from the
    d×d Gram matrix in float64.
    """
    return _rank_of(gram(x))


def gram(x: Tensor) -> Tensor:
    """Return the products of the dimensions of ``x`` ``(..., n, d)``, ``(..., d, d)`` float64."""
    x = x.double()
    return x.mT @ x


def _rank_of(gram: Tensor) -> Tensor:
    """Return the effective rank of tokens from their Gram matrices ``(..., d, d)``."""
    values = eigenvalues(gram).clamp_min(0).sqrt()
    total = values.sum(-1, keepdim=True)
    shares = values / total.clamp_min(1e-300)
    return torch.where(total[..., 0] > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)


def token_ranks(attention: LayerAttention) -> tuple[Tensor, Tensor]:
    """Return the effective ranks of the queries and of the keys that each head reads, before rotation, ``(heads,)``."""
    q_rank, k_rank = torch.split(
        _rank_of(torch.cat([gram(attention.q[0]), gram(attention.k[0])])), [attention.heads, attention.kv_heads]
    )
    return q_rank, per_query_head(k_rank, attention)


def eigenvalues(matrices: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric ``matrices`` ``(..., d, d)`` in float64, ascending, ``(..., d)``."""
    if has_triton(matrices.device):
        from wherewhat.measures.eigenvalues_cuda import LARGEST, symmetric_eigenvalues

        if matrices.shape[-1] <= LARGEST:
            return symmetric_eigenvalues(matrices.flatten(0, -3)).view(matrices.shape[:-1])
    finite = matrices.isfinite().all(-1).all(-1)[..., None]  # LAPACK raises an error for others
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite[..., None], matrices, 0.0))
    return torch.where(finite, values, torch.nan)


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """Return the largest eigenvalue of each symmetric matrix ``(..., d, d)`` in float64, ``(...)``."""
    if has_triton(matrices.device):
        from wherewhat.measures.eigenvalues_cuda import LARGEST, largest_eigenvalues

        if matrices.shape[-1] <= LARGEST:
            return largest_eigenvalues(matrices.flatten(0, -3)).view(matrices.shape[:-2])
    return eigenvalues(matrices)[..., -1]


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of products of matrices ``(count, n, d)`` float64, ``(count,)``; ``x`` is changed."""
    if has_triton(x.device):
        from wherewhat.measures import sums_cuda

        return sums_cuda.dots(x, y)
    return x.mul_(y).sum((-1, -2))
