"""Logits of a query with any key at any position, and swap scores computed by running every swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.logits import QueryLogits, on_device
from wherewhat.measures.tensors import check_single_text

_ENTRIES = {"cpu": 2**23, "cuda": 2**26}
"""Logits of queries with keys held at a time."""


def queries_at_once(attention: LayerAttention) -> int:
    """Return how many queries of a layer are computed at a time."""
    return max(1, _ENTRIES.get(attention.rot_q.device.type, _ENTRIES["cpu"]) // (attention.heads * attention.m))


def query_logits(
    attention: LayerAttention, queries: Sequence[int], *, skip: int = 0
) -> Iterator[tuple[list[int], QueryLogits]]:
    """Yield the logits of queries with any key at any position before them, for every head.

    Queries whose keys are the first ones of the same list are yielded together.

    Args:
        attention: One layer of a pass over one text without cache, whose keys each depend on one token.
        queries: Positions of the queries.
        skip: Number of first keys that are never swapped.

    Yields:
        Indices into ``queries``, and logits with the key heads as groups. Rows are the query heads of a key head, each
        with these queries.
    """
    step = queries_at_once(attention)
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        keys = keys_before(attention, part, skip=skip)
        rows = on_device(tuple(part), attention.rot_q.device)
        logits, weights, bias = _actual(attention, rows)
        dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
        rot_q = attention.rot_q[0][:, rows].to(dtype) * attention.scale
        for columns in _nested(keys):
            longest = _slice(max((keys[x] for x in columns), key=len))
            some = slice(None) if len(columns) == len(part) else columns

            def grouped(x: Tensor, some: slice | list[int] = some, keys: slice | Tensor = longest) -> Tensor:
                """Return entries of queries and keys, ``(kv_heads, heads of a key head · queries, keys)``."""
                return x[:, some][..., keys].reshape(attention.kv_heads, -1, x[0, 0, keys].shape[0])

            yield (
                [start + x for x in columns],
                QueryLogits.of(
                    rot_q[:, some].reshape(attention.kv_heads, -1, rot_q.shape[-1]),
                    attention.k[0][:, longest].to(dtype),
                    attention.rotation,
                    attention.positions.reshape(-1, attention.m)[0, longest],
                    counts=tuple(len(keys[x]) for x in columns) * (attention.heads // attention.kv_heads),
                    logits=grouped(logits),
                    weights=grouped(weights),
                    bias=None if bias is None else grouped(bias),
                    softcap=attention.softcap,
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


def _slice(index: Tensor) -> slice | Tensor:
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
        found = [torch.arange(skip, max(skip, query)) for query in queries]
    else:
        rows = torch.tensor(queries, device=attention.mask.device)
        visible = attention.visible(rows)[0].cpu()
        if not bool((visible == visible[:1]).all()):
            raise MeasureError(f"heads of layer {attention.layer} see different keys: swaps need the same keys for all")
        index, before = torch.arange(attention.m), torch.tensor(queries)[:, None]
        found = [x.nonzero()[:, 0] for x in visible[0] & (index < before) & (index >= skip)]
    for query, keys in zip(queries, found, strict=True):
        if len(keys) < 2:
            after = f" after the first {skip}" if skip else ""
            raise MeasureError(
                f"the query at position {query} sees {len(keys)} keys before it{after}: a swap needs two; choose a "
                "later query"
            )
    return found


def choose_queries(n: int, *, count: int, positions: Sequence[int] = ()) -> list[int]:
    """Return positions of queries in a text of ``n`` tokens.

    Args:
        n: Number of tokens.
        count: Number of queries, spread evenly up to the last token; 0 for all with at least two keys before them.
        positions: Positions to use instead; negative ones count from the end.
    """
    if positions:
        chosen = sorted({p + n if p < 0 else p for p in positions})
        for p in chosen:
            if not 2 <= p < n:
                raise MeasureError(f"a query at position {p} of {n} tokens cannot be scored: 2 to {n - 1} can")
        return chosen
    if n < 3:
        raise MeasureError(f"{n} tokens leave no query with two keys before it: give at least 3")
    if count == 0:
        return list(range(2, n))
    return sorted({max(2, round((i + 1) * n / count) - 1) for i in range(count)})


Swap = Callable[[int, int], LayerAttention]
"""``swap(i, j)`` returns the layer's attention with two blocks of input tokens, starting at i and j, swapped."""


def reference_scores(
    attention: LayerAttention, swap: Swap, queries: Sequence[int], *, tau: float = TAU, block: int = 1, skip: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return positional and symbolic scores and the effective number of swaps, ``(heads, queries)``, by definition.

    Runs the layer once per swap. Used for layers whose keys depend on several tokens, and as reference in tests of
    :func:`wherewhat.measures.swaps.scores.score_swaps`.

    Args:
        attention: The layer without a swap.
        swap: Runs the layer with two blocks swapped.
        queries: Positions of the queries.
        tau: Temperature of the swap weights.
        block: Tokens per block.
        skip: Number of first keys that are never swapped.
    """
    scores, weights = (_rows(f, queries) for f in (attention.attn_scores, attention.pattern))
    starts = {q: _starts(x, block) for q, x in zip(queries, keys_before(attention, queries, skip=skip), strict=True)}
    pairs = sorted({(i, j) for found in starts.values() for a, i in enumerate(found) for j in found[a + 1 :]})
    exponents = torch.full((len(pairs), *scores.shape[:2]), -torch.inf, dtype=torch.float64)
    same, reverse = torch.zeros_like(exponents), torch.zeros_like(exponents)
    for index, (i, j) in enumerate(pairs):
        after = _rows(swap(i, j).attn_scores, queries)
        v, w = (_direction(x, i, j, block) for x in (scores, after))
        same[index] = (v * w).sum(0)
        reverse[index] = (v.flip(0) * w).sum(0)
        first, second = (weights[..., start : start + block].mean(-1) for start in (i, j))
        exponents[index] = (first - second).abs() / tau
        for column, q in enumerate(queries):
            if i not in starts[q] or j not in starts[q]:
                exponents[index, :, column] = -torch.inf
    alpha = exponents.softmax(0)
    return (alpha * same).sum(0), (alpha * reverse).sum(0), torch.special.entr(alpha).sum(0).exp()


def _rows(compute: Callable[[slice], Tensor], queries: Sequence[int]) -> Tensor:
    """Return the logits or attention weights of some queries, ``(heads, queries, m)`` float64."""
    return torch.cat([compute(slice(q, q + 1))[0].double().cpu() for q in queries], 1)


def _direction(scores: Tensor, i: int, j: int, block: int) -> Tensor:
    """Return the direction of the weights of two blocks, ``(2, heads, queries)``, without underflow."""
    both = torch.stack([scores[..., start : start + block].logsumexp(-1) for start in (i, j)])
    return torch.nn.functional.normalize((both - both.amax(0)).exp(), dim=0)


def _starts(keys: Tensor, block: int) -> list[int]:
    """Return the first tokens of the complete blocks among consecutive keys."""
    first, count = int(keys[0]), len(keys) // block
    return [first + index * block for index in range(count)]
