"""Contribution of each RoPE plane to a head's logits, swap scores of planes, and the plane of the largest norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.swaps import SCORES, TAU
from wherewhat.measures.swaps.dense import has_kernels, score_all_swaps, score_softmax_swaps, takes_all
from wherewhat.measures.swaps.layer import layer_swaps
from wherewhat.measures.swaps.logits import QueryLogits, consecutive, keys_before, query_logits
from wherewhat.measures.swaps.scores import score_swaps
from wherewhat.measures.tensors import per_query_head
from wherewhat.numerics import constant_tensor
from wherewhat.scores import Column, Scores


def dimensions(attention: LayerAttention) -> list[Tensor]:
    """Return head dimensions of the planes, ``(planes, 2)``, and those that are not rotated, ``(1, rest)``, if any."""
    assert attention.rotation is not None
    pairs = attention.rotation.pairs
    turned = set(pairs.flatten().tolist())
    rest = [x for x in range(attention.rot_q.shape[-1]) if x not in turned]
    return [pairs, torch.tensor([rest])] if rest else [pairs]


def frequency_ids(inv_freq: Tensor) -> Tensor:
    """Return the rank of each plane by frequency, ``(planes,)`` float64: 1 is the fastest."""
    order = inv_freq.abs().argsort(descending=True, stable=True)
    ids = torch.empty(len(inv_freq), dtype=torch.float64)
    ids[order.cpu()] = torch.arange(1, len(inv_freq) + 1, dtype=torch.float64)
    return ids


def frequency_use(attention: LayerAttention, queries: Sequence[int]) -> Tensor:
    """Return the largest logit contribution of each rotated plane, ``(heads, planes)`` float64.

    The largest absolute contribution over the keys before a query, averaged over queries (arXiv 2511.11579).
    """
    assert attention.rotation is not None
    rows = constant_tensor(tuple(queries), attention.rot_q.device)
    # Products of numbers in half precision are exact in float32.
    dtype = torch.float32 if attention.rot_q.dtype.itemsize == 2 else torch.float64
    q = attention.rot_q[0][:, rows].to(dtype).view(attention.kv_heads, -1, len(queries), attention.rot_q.shape[-1])
    k = attention.rot_k[0].to(dtype)[:, None]
    (first_q, first_k), (second_q, second_k) = ((q[..., half], k[..., half]) for half in attention.rotation.halves)
    total = torch.zeros(*q.shape[:2], attention.rotation.planes, dtype=torch.float64, device=q.device)
    for index, keys in enumerate(keys_before(attention, queries)):
        own, seen = slice(index, index + 1), consecutive(keys)
        products = first_q[:, :, own] * first_k[:, :, seen]  # (kv_heads, heads of a key head, keys, planes)
        products.addcmul_(second_q[:, :, own], second_k[:, :, seen])
        total += torch.maximum(products.amax(2), -products.amin(2))
    return total.flatten(0, 1) * (attention.scale / len(queries))


def mean_frequency(use: Tensor, inv_freq: Tensor) -> Tensor:
    """Return the mean frequency ID with linear weights, ``(heads,)``: planes weigh as much as they are used.

    A plane with a small contribution counts too, so that many of them outweigh one dominant plane; see
    :func:`mean_frequency_softmax`.

    Args:
        use: Use of each plane, ``(heads, planes)``.
        inv_freq: Radians per token of each plane, ``(planes,)``.

    Returns:
        Mean ID, 1 for the fastest plane; NaN where all use is zero.
    """
    total = use.sum(-1)
    return torch.where(total > 0, use @ _ids_like(use, inv_freq) / total.clamp_min(1e-300), torch.nan)


def mean_frequency_softmax(use: Tensor, inv_freq: Tensor) -> Tensor:
    """Return the mean frequency ID with softmax weights, ``(heads,)``, as in arXiv 2605.31558.

    The weights are the softmax over planes of their use, a logit contribution: a plane that contributes a few logits
    more than the others determines the mean. Arguments and result are those of :func:`mean_frequency`.
    """
    mean = use.double().softmax(-1) @ _ids_like(use, inv_freq)
    return torch.where(use.sum(-1) > 0, mean, torch.nan)


def _ids_like(use: Tensor, inv_freq: Tensor) -> Tensor:
    """Return :func:`frequency_ids` on the device of ``use``, without a wait for it."""
    return constant_tensor(tuple(frequency_ids(inv_freq).int().tolist()), use.device).double()


_ENTRIES = {"cpu": 2**21, "cuda": 2**26}
"""Logits of planes with keys processed at a time, 32 bytes each."""


def plane_swaps(
    attention: LayerAttention, queries: Sequence[int], *, tau: float = TAU, skip: int = 0
) -> tuple[Tensor, Tensor]:
    """Return positional and symbolic scores of every plane of every head, each treated as a head.

    A plane's logits are its contribution to those of its head, before soft-cap and bias, which do not consist of
    planes. Its attention is their softmax over the keys before the query, without the query's own key and sinks.

    Args:
        attention: One layer of a pass over one text without cache, with rotation, whose keys each depend on one token.
        queries: Positions of the queries.
        tau: Temperature of the swap weights.
        skip: Number of first keys that are never swapped.

    Returns:
        Positional and symbolic scores, ``(heads, queries, planes)`` each; the unrotated dimensions are the last plane.
    """
    if tau <= 0:
        raise MeasureError(f"tau={tau} must be positive: it divides weight differences")
    if attention.rotation is None:
        raise MeasureError(f"layer {attention.layer} does not rotate its queries and keys: it has no planes")

    def both(part: QueryLogits) -> tuple[Tensor, ...]:
        swaps = (
            score_all_swaps(part, taus=(tau,))[0]
            if takes_all(part.counts, (tau,), part.k.device)
            else score_swaps(part, taus=(tau,), effective=False)
        )
        return swaps.s_pos[..., 0], swaps.s_sym[..., 0]

    s_pos, s_sym = _by_head(attention, queries, 2, both, plane_queries(attention, queries, skip=skip))
    return s_pos, s_sym


def _by_head(
    attention: LayerAttention,
    queries: Sequence[int],
    number: int,
    score: Callable[[QueryLogits], tuple[Tensor, ...]],
    parts: Iterator[tuple[list[int], int, QueryLogits]],
) -> Tensor:
    """Return a number of scores of planes, ``(number, heads, queries, planes)``, each ``(groups, rows)`` of a part."""
    planes = sum(len(dims) for dims in dimensions(attention))
    shape = number, attention.heads, len(queries), planes
    scores = torch.empty(shape, dtype=torch.float64, device=attention.rot_q.device)
    for columns, first, part in parts:
        index = slice(None) if len(columns) == len(queries) else constant_tensor(tuple(columns), scores.device)
        for values, result in zip(scores, score(part), strict=True):
            # (kv_heads · planes, heads of a key head · queries) to (heads, queries, planes)
            by_head = torch.unflatten(result, 0, (attention.kv_heads, -1)).mT
            values[:, index, first : first + by_head.shape[-1]] = by_head.reshape(attention.heads, len(columns), -1)
    return scores


def _mean_plane_scores(
    attention: LayerAttention, queries: Sequence[int], tau: float, sink_tokens: int
) -> dict[str, Tensor]:
    """Return means over queries of the scores of planes, with and without the sink, ``(heads, planes)`` each.

    Those without the sink are left out if no query has two keys after it.
    """
    later = [query for query in queries if query >= sink_tokens + 2]
    device, dtype = attention.rot_q.device, torch.promote_types(attention.rot_q.dtype, torch.float32)
    if has_kernels(device, dtype) and takes_all((max(queries),), (tau,), device):
        parts = plane_queries(attention, queries, sink_tokens=sink_tokens, weighed=False)
        every = _by_head(attention, queries, 4, lambda part: score_softmax_swaps(part, tau).unbind(-1), parts)
        scores = [*every[:2]]
        if later:
            index = constant_tensor(tuple(queries.index(query) for query in later), device)
            scores += every[2:, :, index]
    else:
        scores = [*plane_swaps(attention, queries, tau=tau)]
        if later:
            scores += plane_swaps(attention, later, tau=tau, skip=sink_tokens)
    return {name: values.mean(1) for name, values in zip(SCORES, scores, strict=False)}


def plane_queries(
    attention: LayerAttention,
    queries: Sequence[int],
    *,
    skip: int = 0,
    sink_tokens: int = 0,
    weighed: bool = True,
) -> Iterator[tuple[list[int], int, QueryLogits]]:
    """Yield planes of a layer that rotates as heads: some planes at a time, then the unrotated dimensions.

    Summed over planes, ``logits`` are those of :func:`~wherewhat.measures.swaps.logits.query_logits` before soft-cap
    and bias; the arguments are its own. Unless they are to be ``weighed``, ``weights`` are empty.

    Yields:
        Indices into ``queries``, the first plane, and logits with ``kv_heads · planes`` groups, grouped by key head.
    """
    device = attention.rot_q.device
    keys_of = keys_before(attention, queries, skip=skip)
    for columns, whole in query_logits(attention, queries, skip=skip, sink_tokens=sink_tokens):
        keys = consecutive(max((keys_of[x] for x in columns), key=len))
        rows = constant_tensor(tuple(queries[x] for x in columns), device)
        rot_q = attention.rot_q[0][:, rows].double().reshape(attention.kv_heads, -1, attention.rot_q.shape[-1])
        rot_k = attention.rot_k[0][:, keys].double()
        hidden = torch.arange(rot_k.shape[1], device=device) >= constant_tensor(whole.counts, device)[:, None]
        entries = _ENTRIES.get(device.type, _ENTRIES["cpu"])
        step = max(1, entries // (rot_q.shape[0] * rot_q.shape[1] * rot_k.shape[1]))
        turns = whole.turns.expand(attention.kv_heads, -1, -1)
        first = plane = 0  # complex number, and plane
        for dims in (part for kind in dimensions(attention) for part in torch.split(kind, step)):
            planes, width = len(dims), (dims.shape[1] + 1) // 2
            part = slice(first, first + planes * width)
            index = constant_tensor(tuple(dims.flatten().tolist()), device)

            def split(x: Tensor, part: slice = part, planes: int = planes) -> Tensor:
                """Move planes of ``(kv_heads, n, all planes)`` to the groups."""
                return torch.unflatten(x[..., part], -1, (planes, -1)).movedim(2, 1).flatten(0, 1)

            q, k = (
                torch.unflatten(x[..., index], -1, tuple(dims.shape)).movedim(2, 1).flatten(0, 1)
                for x in (rot_q, rot_k)
            )
            logits = (q @ k.mT) * attention.scale  # (kv_heads · planes, rows, keys)
            yield (
                columns,
                plane,
                QueryLogits(
                    q=split(whole.q),
                    k=split(whole.k),
                    turns=split(turns),
                    counts=whole.counts,
                    logits=logits,
                    weights=logits.masked_fill(hidden, -torch.inf).softmax(-1) if weighed else logits.new_empty(0),
                    sink=whole.sink,
                ),
            )
            first, plane = first + planes * width, plane + planes


def layer_frequencies(
    attention: LayerAttention, queries: Sequence[int], *, tau: float, sink_tokens: int, scored: bool
) -> Scores:
    """Return scores and curves of one layer that rotates, of a pass over one text, averaged over queries.

    They stay on the layer's device. The layer may be the merged one of several texts.

    Unless it is ``scored``, which takes keys that each depend on one token, its swap scores are NaN; so are those
    without the sink if no query has two keys after it.
    """
    assert attention.rotation is not None
    planes, inv_freq = attention.rotation.planes, attention.rotation.inv_freq
    use = frequency_use(attention, queries)
    heads = {
        "mean_frequency_softmax": mean_frequency_softmax(use, inv_freq),
        "mean_frequency": mean_frequency(use, inv_freq),
    }
    nothing = torch.full((attention.heads, planes), torch.nan, dtype=torch.float64, device=use.device)
    single = dict.fromkeys(SCORES, nothing)
    if scored:
        swaps = layer_swaps(attention, queries, tau=tau, sink_tokens=sink_tokens, from_logits=False)
        heads |= {name: getattr(swaps, name).nanmean(-1) for name in SCORES}
        heads["effective_swaps"] = swaps.effective.mean(-1)
        single |= _mean_plane_scores(attention, queries, tau, sink_tokens)
    else:
        heads |= dict.fromkeys((*SCORES, "effective_swaps"), nothing[:, 0])
    heads |= {f"{name}_rest": values[:, planes] for name, values in single.items() if values.shape[1] > planes}
    by_plane = {**{f"plane_{name}": values[:, :planes] for name, values in single.items()}, "frequency_use": use}
    return Scores(
        layer=attention.layer,
        heads=heads,
        whole={"mean_frequency_even": (planes + 1) / 2},
        curves={name: Column(x.float(), ("head", "plane")) for name, x in by_plane.items()}
        | {"inv_freq": Column(inv_freq.abs().cpu(), ("plane",))},
    )


TURN = 3.657
"""Radians by which the plane of the predicted index turns over the trained length."""


def predicted_band(inv_freq: Tensor, length: int) -> float:
    """Return the predicted index of the plane with the largest norm, counted from 0, the fastest.

    ``j* = d/2 · log_base(L / 3.657)``: the plane that turns by 3.657 radians over the trained length L (ICLR 2026
    submission PR1PPxvG9Q). For frequencies that are not ``base^(-2j/d)`` the index is interpolated between planes, on a
    logarithmic scale, and extrapolated beyond the first and the last of them.

    Args:
        inv_freq: Radians per token of each plane, ``(planes,)``.
        length: Largest distance that the layer was trained on: the trained length, or its window if that is shorter.
    """
    if length < 2:
        raise MeasureError(f"the trained length is {length}: a band of frequencies needs at least 2 tokens")
    turning = inv_freq.abs().double().cpu()
    logs = turning[turning > 0].log().sort(descending=True).values
    if len(logs) < 2 or float(logs[0]) == float(logs[-1]):
        raise MeasureError(f"{len(logs)} planes that turn have no band: at least 2 different frequencies are needed")
    wanted = math.log(TURN / length)
    right = int((logs > wanted).sum().clamp(1, len(logs) - 1))
    left, step = float(logs[right - 1]), float(logs[right - 1] - logs[right])
    return right - 1 + (left - wanted) / step if step > 0 else float(right)


def slower_planes(inv_freq: Tensor, index: float) -> Tensor:
    """Return True for the planes slower than an index of :func:`predicted_band`, ``(planes,)`` bool."""
    return frequency_ids(inv_freq) - 1 > index


def plane_norms(attention: LayerAttention) -> Tensor:
    """Return the mean length of queries times that of keys in each plane, by frequency, ``(heads, planes)`` float64.

    Planes are in the order of frequency, the fastest first. Rotation does not change lengths.
    """
    assert attention.rotation is not None
    pairs = attention.rotation.pairs[attention.rotation.inv_freq.abs().argsort(descending=True, stable=True).cpu()]
    q, k = (
        x[0][..., pairs.to(x.device)].double().square().sum(-1).sqrt().mean(1)  # (heads, planes)
        for x in (attention.rot_q, attention.rot_k)
    )
    return (q * per_query_head(k, attention)).cpu()


def peak_band(norms: Tensor) -> int:
    """Return the index of the plane with the largest mean share over heads of norms ``(heads, planes)``."""
    return int((norms / norms.sum(-1, keepdim=True).clamp_min(1e-300)).mean(0).argmax())
