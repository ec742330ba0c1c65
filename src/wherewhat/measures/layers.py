"""Functions of one captured layer: axes, swap scores, planes, frequencies and attention statistics.

Each takes a :class:`~wherewhat.captures.attention.LayerAttention`, which :func:`wherewhat.attention` returns, and uses
its scale, mask, window, bias, soft-cap and sinks. Layers of several texts, of padded or packed ones, or with a cache
are refused, and other masks that are no causal band (chunks, prefixes) by the functions that are not defined on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from wherewhat.caches.attention import check_unpadded
from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.attention import AttentionStats, attention_stats
from wherewhat.measures.axes import Method
from wherewhat.measures.axes.fit import AxesFit, fit_layer
from wherewhat.measures.frequencies.planes import (
    frequency_use,
    mean_frequency,
    mean_frequency_softmax,
    plane_swaps,
)
from wherewhat.measures.heads import AttentionConfig
from wherewhat.measures.measurement import KEYS_MIX
from wherewhat.measures.planes.statistics import PlaneStats, layer_stats
from wherewhat.measures.swaps import TAU
from wherewhat.measures.swaps.layer import Swaps, check_exclusion, layer_swaps
from wherewhat.measures.swaps.logits import choose_queries
from wherewhat.measures.tensors import check_finite, check_single_text
from wherewhat.options import checked, short_repr

Queries = Literal["last", "all"] | int | Sequence[int]
"""``last``, ``all`` with at least two keys before them, a number of evenly spaced queries, or their positions.

Positions are kept in their order, repeated ones too; negative ones count from the end."""


def _layer(layer: Any) -> Any:
    """Return a layer that can be measured; refuse anything else in one line."""
    if not isinstance(layer, LayerAttention):
        listed = isinstance(layer, list | tuple) and any(isinstance(item, LayerAttention) for item in layer)
        advice = "give one of them, such as layers[0]" if listed else "give a layer that wherewhat.attention returned"
        raise MeasureError(f"layer is of type {type(layer).__name__}: {advice}")
    check_single_text(layer)
    check_unpadded(layer)
    check_finite(layer.rot_q, layer.rot_k)
    return layer


@checked(layer=_layer)
def axes(layer: LayerAttention, *, skip: int = 0, min_distance: int = 0, method: Method = "auto") -> AxesFit:
    """Fit the logits of every head by ``a[i-j] + b[i] + c[j]``, exactly as they enter softmax.

    Args:
        layer: One layer of one text.
        skip: Number of first keys to leave out, such as the attention sink.
        min_distance: Leave out smaller distances.
        method: ``linear`` (time n), ``blocked`` (time n²), or ``auto`` for the faster of the two that applies.

    Returns:
        Correlations ``r`` ``(heads,)``, curves ``a``, ``b``, ``c`` ``(heads, n)``, shares, and the noise floor.
    """
    return fit_layer(layer, skip=skip, min_distance=min_distance, method=method)


@checked(layer=_layer)
def swaps(
    layer: LayerAttention,
    queries: Queries = "last",
    *,
    tau: float = TAU,
    block: int = 1,
    skip: int = 0,
    sink_tokens: int = 1,
) -> Swaps:
    """Return positional and symbolic scores of every head, from all swaps of two keys.

    Args:
        layer: One layer of one text.
        queries: ``last``, ``all``, a number of evenly spaced queries, or positions in any order.
        tau: Temperature of the swap weights.
        block: Tokens per swapped block.
        skip: Number of first keys that are never swapped.
        sink_tokens: Number of first keys that are the attention sink, which the second version leaves in place.

    Returns:
        Scores ``s_pos`` and ``s_sym`` of all keys, and ``s_pos_no_sink`` and ``s_sym_no_sink`` of those after the sink,
        ``(heads, queries)`` each.
    """
    _check_keys(layer)
    chosen = _positions(layer, queries)
    scores = layer_swaps(layer, chosen, tau=tau, block=block, skip=skip, sink_tokens=sink_tokens).cpu()
    check_exclusion(layer.layer, float(scores.exclusion.amin()))
    return scores


@checked(layer=_layer)
def planes(layer: LayerAttention) -> PlaneStats:
    """Return size, concentration and alignment of queries and keys in each RoPE plane of every head.

    Soft-cap and bias do not consist of planes and have no effect.

    Args:
        layer: One layer of one text, with rotation.
    """
    _check_rotation(layer)
    return layer_stats(layer)


@dataclass(frozen=True)
class Frequencies:
    """Use of frequencies by the heads of one layer on one text; plane p turns by ``inv_freq[p]`` per token.

    Attributes:
        queries: Positions of the queries over which everything is averaged.
        inv_freq: Radians per token of each plane, ``(planes,)``.
        use: Largest absolute contribution of each plane to a logit, ``(heads, planes)`` (arXiv 2511.11579).
        mean_frequency: Mean rank of the planes by frequency, weighted by use, ``(heads,)``: 1 is the fastest.
        mean_frequency_softmax: The same, weighted by the softmax of use (arXiv 2605.31558).
        s_pos: Positional score of each plane as a head of its own, ``(heads, planes)``; one more column for dimensions
            that are not rotated, if there are any.
        s_sym: Symbolic score likewise.
    """

    queries: tuple[int, ...]
    inv_freq: Tensor
    use: Tensor
    mean_frequency: Tensor
    mean_frequency_softmax: Tensor
    s_pos: Tensor
    s_sym: Tensor

    __repr__ = short_repr


@checked(layer=_layer)
def frequencies(layer: LayerAttention, queries: Queries = "last", *, tau: float = TAU) -> Frequencies:
    """Return how much every head uses each RoPE plane, and the swap scores of single planes.

    Soft-cap, bias and sinks do not consist of planes and have no effect.

    Args:
        layer: One layer of one text, with rotation.
        queries: ``last``, ``all``, a number of evenly spaced queries, or positions in any order.
        tau: Temperature of the swap weights.
    """
    _check_rotation(layer)
    _check_keys(layer)
    assert layer.rotation is not None
    chosen = _positions(layer, queries)
    use = frequency_use(layer, chosen).cpu()
    s_pos, s_sym = (scores.mean(1).cpu() for scores in plane_swaps(layer, chosen, tau=tau))
    inv_freq = layer.rotation.inv_freq
    means = mean_frequency(use, inv_freq), mean_frequency_softmax(use, inv_freq)
    return Frequencies(tuple(chosen), inv_freq.abs().cpu(), use, *means, s_pos, s_sym)


@checked(layer=_layer)
def attention_statistics(layer: LayerAttention, *, sink_tokens: int = 1, block_mib: int = 32) -> AttentionStats:
    """Return entropy, sink mass and effective rank of every head, with the values of uniform attention.

    Args:
        layer: One layer of one text.
        sink_tokens: Number of first tokens that count as attention sink.
        block_mib: Memory for one block of attention weights, in MiB; time is O(n²).
    """
    return attention_stats(layer, AttentionConfig(sink_tokens=sink_tokens, block_mib=block_mib))


def _check_rotation(layer: LayerAttention) -> None:
    if layer.rotation is None:
        raise MeasureError(f"layer {layer.layer} does not rotate its queries and keys: it has no planes")


def _check_keys(layer: LayerAttention) -> None:
    """Refuse keys that depend on several tokens: a swap of tokens is then not a swap of keys."""
    if layer.key_mixing is not None and layer.key_mixing > KEYS_MIX:
        raise MeasureError(
            f"each key of layer {layer.layer} depends on several tokens, so that swapping keys is not swapping tokens: "
            "use wherewhat.measure('heads', model, …), which runs the layer again"
        )


def _positions(layer: LayerAttention, queries: Queries) -> list[int]:
    if isinstance(queries, str):
        return choose_queries(layer.n, count=1 if queries == "last" else 0)
    if not isinstance(queries, int):
        if not queries:
            raise MeasureError("queries is empty: give 'last', 'all', a number from 1, or positions")
        return choose_queries(layer.n, count=1, positions=list(queries))
    if queries < 1:
        raise MeasureError(f"queries is {queries}: give 'last', 'all', a number from 1, or positions")
    return choose_queries(layer.n, count=queries)
