"""Frequencies of one captured layer: use, single planes' scores, and the scores of whole heads beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.base import Curve, LayerScores
from wherewhat.measure.frequencies.planes import plane_swaps
from wherewhat.measure.frequencies.use import frequency_use, mean_frequency
from wherewhat.measure.swaps.layer import layer_swaps


def rotates(attention: LayerAttention) -> bool:
    """Whether a layer turns its queries and keys at all."""
    return attention.rotation is not None and bool(attention.rotation.inv_freq.any())


def layer_frequencies(attention: LayerAttention, queries: Sequence[int], *, tau: float, scored: bool) -> LayerScores:
    """Numbers and curves of one layer that rotates, means over queries.

    Args:
        attention: One layer of a pass over one text without cache.
        queries: Positions of the queries.
        tau: Temperature of the weights of swaps.
        scored: Whether its keys are made token by token: without that there are no swap scores, and they are NaN.
    """
    assert attention.rotation is not None
    planes, inv_freq = attention.rotation.planes, attention.rotation.inv_freq
    use = frequency_use(attention, queries)
    heads = {"mean_frequency": mean_frequency(use, inv_freq)}
    if scored:
        swaps = layer_swaps(attention, queries, tau=tau)
        heads |= {"s_pos": swaps.s_pos.mean(-1), "s_sym": swaps.s_sym.mean(-1)}
        single = [plane_swaps(attention, query, tau=tau) for query in queries]
        s_pos, s_sym = (torch.stack(x).mean(0).cpu() for x in ([p.s_pos for p in single], [p.s_sym for p in single]))
    else:
        nothing = torch.full((attention.heads, planes), torch.nan, dtype=torch.float64)
        s_pos = s_sym = nothing
        heads |= {"s_pos": nothing[:, 0], "s_sym": nothing[:, 0]}
    if s_pos.shape[1] > planes:
        heads |= {"s_pos_rest": s_pos[:, planes], "s_sym_rest": s_sym[:, planes]}
    by_plane = {"plane_s_pos": s_pos[:, :planes], "plane_s_sym": s_sym[:, :planes], "frequency_use": use}
    return LayerScores(
        attention.layer,
        heads,
        {"mean_frequency_even": (planes + 1) / 2},
        {name: Curve(x.float(), ("head", "plane")) for name, x in by_plane.items()}
        | {"inv_freq": Curve(inv_freq.abs().cpu(), ("plane",))},
    )
