"""Logits of queries with any of their keys at the position of any other key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.rotation import Rotation
from wherewhat.errors import MeasureError
from wherewhat.measures.tensors import check_single_text
from wherewhat.numerics import constant_tensor
from wherewhat.options import short_repr


@dataclass(frozen=True)
class QueryLogits:
    """Queries of several heads, and the keys that they see.

    Two head dimensions are one complex number. The logit of key c at the position of key p is
    ``softcap(Re Σ conj(q) k[c] turns[p]) + bias[p]``, summed over planes. Queries that share their keys are a group,
    such as the heads of one key head. A query sees the first keys of its group.

    Attributes:
        q: Queries after rotation, scale included, ``(groups, rows, planes)`` complex.
        k: Keys before rotation, ``(groups, n, planes)`` complex.
        turns: Rotation of each position, ``(groups or 1, n, planes)`` complex; 1 for dimensions without rotation.
        counts: Number of keys of each row, the same in all groups.
        logits: The actual logits, bias included, ``(groups, rows, n)`` float64; undefined after ``counts``.
        weights: The actual attention weights, ``(groups, rows, n)`` float64; they need not sum to one, because other
            keys (the query's own, a sink) may take part in the softmax.
        bias: Additive bias of each position, ``(groups, rows, n)``, if any.
        softcap: ``softcap · tanh(logit / softcap)`` is applied before the bias, if given.
        sink: Number of first keys that are the attention sink.
    """

    q: Tensor
    k: Tensor
    turns: Tensor
    counts: tuple[int, ...]
    logits: Tensor
    weights: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    sink: int = 0

    __repr__ = short_repr

    @classmethod
    def of(
        cls,
        rot_q: Tensor,
        k: Tensor,
        rotation: Rotation | None,
        positions: Tensor,
        *,
        counts: tuple[int, ...],
        logits: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sink: int = 0,
    ) -> QueryLogits:
        """Return the logits of real tensors.

        Args:
            rot_q: Queries after rotation, scale included, ``(groups, rows, d)``.
            k: Keys before rotation, ``(groups, n, d)``, of the same dtype.
            rotation: Rotation of both; None for none.
            positions: Positions of the keys, ``(n,)``.
            counts: Number of keys of each row.
            logits: The actual logits, ``(groups, rows, n)`` float64.
            weights: The actual attention weights, ``(groups, rows, n)`` float64.
            bias: Bias of each position, ``(groups, rows, n)``, if any.
            softcap: Soft-cap, if any.
            sink: Number of first keys that are the attention sink.
        """
        q, k = to_complex(rot_q, rotation), to_complex(k, rotation)
        turns = torch.ones(1, *k.shape[1:], dtype=k.dtype, device=k.device)
        if rotation is not None:
            angles = rotation.angles(positions.to(k.device)).to(rot_q.dtype)
            turns[..., : rotation.planes] = torch.polar(torch.full_like(angles, rotation.scaling), angles)
        return cls(q, k, turns, counts, logits, weights, bias, softcap, sink)

    def without_sink(self) -> QueryLogits:
        """Return the same queries without the keys of the sink; attention weights are unchanged."""
        first = self.sink
        return replace(
            self,
            k=self.k[:, first:],
            turns=self.turns[:, first:],
            counts=tuple(max(0, count - first) for count in self.counts),
            logits=self.logits[..., first:],
            weights=self.weights[..., first:],
            bias=None if self.bias is None else self.bias[..., first:],
            sink=0,
        )


def to_complex(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Return ``x`` ``(..., d)`` as complex ``(..., planes)``: rotated planes first, then pairs of other dimensions."""
    rest, turned = x, []
    if rotation is not None:
        turned = [torch.complex(*(x[..., half] for half in rotation.halves))]
        end = rotation.offset + 2 * rotation.planes
        rest = torch.cat([x[..., : rotation.offset], x[..., end:]], -1)
    rest = torch.nn.functional.pad(rest, (0, rest.shape[-1] % 2))
    return torch.cat([*turned, torch.complex(rest[..., 0::2], rest[..., 1::2])], -1)


def to_real(x: Tensor) -> Tensor:
    """Return complex ``(..., planes)`` as real ``(..., 2 planes)``: ``Re Σ conj(x) y`` is their dot product."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def in_blocks(x: Tensor, block: int) -> Tensor:
    """Return complex keys ``(groups, n, planes)`` as real blocks, ``(groups, block, n // block, 2 planes)``."""
    used = x.shape[1] // block * block
    return torch.unflatten(to_real(x[:, :used]), 1, (-1, block)).transpose(1, 2).contiguous()


def block_logits(x: Tensor, y: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return logits of blocks of keys at blocks of positions, ``(groups, rows, columns)``: log-sum-exp over a block.

    Args:
        x: Product of queries with contents (or positions), ``(groups, block, rows, d)``.
        y: Positions (or contents), ``(groups or 1, block, columns, d)``.
        bias: Bias of the positions, broadcastable to ``(groups, block, rows, columns)``, if any.
        softcap: Soft-cap, if any.
    """
    groups, block, rows, _ = x.shape
    if len(y) == 1 < groups:  # one product instead of one per group
        logits = (x.transpose(0, 1).flatten(1, 2) @ y[0].mT).view(block, groups, rows, -1).transpose(0, 1)
    else:
        logits = x @ y.mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if block > 2:
        return logits.logsumexp(1)
    return logits[:, 0] if block == 1 else torch.logaddexp(logits[:, 0], logits[:, 1])


_ENTRIES = {"cpu": 2**23, "cuda": 2**26}
"""Logits of queries with keys held at a time."""


def queries_at_once(attention: LayerAttention) -> int:
    """Return how many queries of a layer are computed at a time."""
    return max(1, _ENTRIES.get(attention.rot_q.device.type, _ENTRIES["cpu"]) // (attention.heads * attention.m))


def query_logits(
    attention: LayerAttention, queries: Sequence[int], *, skip: int = 0, sink_tokens: int = 0
) -> Iterator[tuple[list[int], QueryLogits]]:
    """Yield the logits of queries with any key at any position before them, for every head.

    Queries whose keys are the first ones of the same list are yielded together.

    Args:
        attention: One layer of a pass over one text without cache, whose keys each depend on one token.
        queries: Positions of the queries.
        skip: Number of first keys that are never swapped.
        sink_tokens: Number of first tokens that are the attention sink.

    Yields:
        Indices into ``queries``, and logits with the key heads as groups. Rows are the query heads of a key head, each
        with these queries.
    """
    step = queries_at_once(attention)
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        keys = keys_before(attention, part, skip=skip)
        rows = constant_tensor(tuple(part), attention.rot_q.device)
        logits, weights, bias = _actual(attention, rows)
        dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
        rot_q = attention.rot_q[0][:, rows].to(dtype) * attention.scale
        for columns in _nested(keys):
            most = max((keys[x] for x in columns), key=len)
            longest = consecutive(most)
            part_rows = slice(None) if len(columns) == len(part) else columns

            def grouped(x: Tensor, rows_here: slice | list[int] = part_rows, keys: slice | Tensor = longest) -> Tensor:
                """Return entries of queries and keys, ``(kv_heads, heads of a key head · queries, keys)``."""
                return x[:, rows_here][..., keys].reshape(attention.kv_heads, -1, x[0, 0, keys].shape[0])

            yield (
                [start + x for x in columns],
                QueryLogits.of(
                    rot_q[:, part_rows].reshape(attention.kv_heads, -1, rot_q.shape[-1]),
                    attention.k[0][:, longest].to(dtype),
                    attention.rotation,
                    attention.positions.reshape(-1, attention.m)[0, longest],
                    counts=tuple(len(keys[x]) for x in columns) * (attention.heads // attention.kv_heads),
                    logits=grouped(logits),
                    weights=grouped(weights),
                    bias=None if bias is None else grouped(bias),
                    softcap=attention.softcap,
                    sink=int((most < sink_tokens).sum()),
                ),
            )


def _actual(attention: LayerAttention, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logits and attention weights in float64, and the bias, of some queries, ``(heads, rows, m)`` each."""
    # In float64: weights enter an exponential divided by τ, and τ is small.
    rot_q, rot_k = attention.rot_q[0][:, rows].double(), attention.rot_k[0].double()
    logits = (rot_q.view(attention.kv_heads, -1, rot_q.shape[-1]) @ rot_k.mT).view(*rot_q.shape[:2], -1)
    logits *= attention.scale
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    bias = attention.bias(rows)
    if bias is not None:
        bias = bias[0].expand_as(logits)
        logits = logits + bias.double()
    return logits, attention.weigh(logits[None], rows)[0], bias


def _nested(lists: list[Tensor]) -> list[list[int]]:
    """Return the indices of lists, ascending, in groups whose shorter lists are the start of the longest."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lists)), key=lambda index: -len(lists[index])):
        for group in groups:
            if torch.equal(lists[group[0]][: len(lists[index])], lists[index]):
                group.append(index)
                break
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def consecutive(index: Tensor) -> slice | Tensor:
    """Return ascending indices as a slice where they are consecutive: it needs no copy to a GPU."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == len(index) else index


def keys_before(attention: LayerAttention, queries: Sequence[int], *, skip: int = 0) -> list[Tensor]:
    """Return the visible keys before each query, without the first ``skip``: indices ``(n,)`` each, on the CPU."""
    check_single_text(attention)
    for query in queries:
        if not 0 <= query < attention.n:
            raise MeasureError(f"there is no query at position {query} of {attention.n} tokens")
    if attention.mask.only_causal:
        key_indices = [torch.arange(skip, max(skip, query)) for query in queries]
    else:
        rows = torch.tensor(queries, device=attention.mask.device)
        visible = attention.visible(rows)[0].cpu()
        if not bool((visible == visible[:1]).all()):
            raise MeasureError(f"heads of layer {attention.layer} see different keys: swaps need the same keys for all")
        index, before = torch.arange(attention.m), torch.tensor(queries)[:, None]
        key_indices = [x.nonzero()[:, 0] for x in visible[0] & (index < before) & (index >= skip)]
    for query, keys in zip(queries, key_indices, strict=True):
        if len(keys) < 2:
            after = f" after the first {skip}" if skip else ""
            raise MeasureError(
                f"the query at position {query} sees {len(keys)} keys before it{after}: a swap needs two; choose a "
                "later query"
            )
    return key_indices


def choose_queries(n: int, *, count: int, positions: Sequence[int] = ()) -> list[int]:
    """Return positions of queries in a text of ``n`` tokens.

    Args:
        n: Number of tokens.
        count: Number of queries, spread evenly up to the last token; 0 for all with at least two keys before them.
        positions: Positions to use instead, in this order; negative ones count from the end.
    """
    if positions:
        chosen = [p + n if p < 0 else p for p in positions]
        for p in chosen:
            if not 2 <= p < n:
                raise MeasureError(f"a query at position {p} of {n} tokens cannot be scored: 2 to {n - 1} can")
        return chosen
    if n < 3:
        raise MeasureError(f"{n} tokens leave no query with two keys before it: give at least 3")
    if count == 0:
        return list(range(2, n))
    return sorted({max(2, round((i + 1) * n / count) - 1) for i in range(count)})
