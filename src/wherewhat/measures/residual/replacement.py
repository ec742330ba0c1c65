"""Loss with the non-additive part of the logits scaled down.

Inside the forward pass the logits W of a head are replaced by ``a + b + c + λ · (W - a - b - c)``, with the three-axis
fit of the same pass, or an axis is subtracted from them. λ = 1 is the model itself, λ = 0 makes its logits additive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.measures.attention.weights import attention_output
from wherewhat.measures.axes.fit import AxesFit
from wherewhat.measures.axes.layer import fit_layer
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject
from wherewhat.measures.residual.measurement import ResidualConfig
from wherewhat.measures.tensors import check_faithful, next_token_loss

_FAITHFUL = 1e-3
"""Largest relative change of the loss at λ = 1."""


def mixed_attention(
    attention: LayerAttention,
    fit: AxesFit,
    *,
    strength: float = 1.0,
    without: str = "",
    heads: Tensor | None = None,
    block_mib: int = 64,
) -> Tensor:
    """Compute the attention output with changed logits, a block of queries at a time.

    Args:
        attention: One layer, batch 1, n queries over n keys.
        fit: Its three-axis fit over all visible pairs.
        strength: λ, the factor on the non-additive part.
        without: Axes to subtract, e.g. ``"a"``. The query axis cancels in softmax, so subtracting it has no effect. A
            sink column keeps its weight.
        heads: True for the heads to change, ``(heads,)``; None for all.
        block_mib: Memory for one block of logits, in MiB.

    Returns:
        Output ``(1, n, heads, d_v)``.
    """
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    device = attention.rot_q.device
    a, b, c = (x.to(device, dtype) for x in (fit.a, fit.b, fit.c))

    def pattern(block: slice) -> Tensor:
        scores = attention.attn_scores(block)
        i = torch.arange(block.start, block.stop, device=device)
        distance = (i[:, None] - torch.arange(attention.m, device=device)).clamp(0, a.shape[1] - 1)
        terms = {"a": a[:, distance], "b": b[:, block, None], "c": c[:, None]}
        changed = scores if strength == 1 else strength * scores + (1 - strength) * (sum(terms.values()))
        if without:
            changed = _subtract(attention, changed, [terms[axis] for axis in without], block)
        if heads is not None:
            changed = torch.where(heads.to(device).view(1, -1, 1, 1), changed, scores)
        return attention.weigh(changed, block)

    return attention_output(attention, block_mib=block_mib, pattern=pattern)


def _subtract(attention: LayerAttention, scores: Tensor, terms: Sequence[Tensor], rows: slice) -> Tensor:
    """Subtract terms from logits ``(1, heads, rows, m)``, keeping the weight of the sink column."""
    less = scores - sum(terms)
    if attention.sinks is None:
        return less
    # The constants of the axes are a convention, but they matter relative to a sink. Restoring each row's sum of
    # exponentials makes the result independent of the convention.
    hidden = ~attention.visible(rows)
    before, after = (x.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True) for x in (scores, less))
    return less + (before - after)


def measure_residual(subject: Subject, ids: Tensor, config: ResidualConfig) -> DocumentScores:
    """Return the loss of a text ``(1, n)`` at each λ, without each axis, and with single layers made additive."""
    found: dict[int, torch.dtype] = {}
    plain = subject.run(ids, lambda attention: found.update({attention.layer: attention.rot_q.dtype}), logits=True)
    assert plain is not None
    intact = next_token_loss(plain, ids)
    del plain

    def loss(strength: float = 1.0, without: str = "", only: int | None = None) -> float:
        def edit(attention: LayerAttention) -> Tensor | None:
            if only is not None and attention.layer != only:
                return None
            fit = fit_layer(attention)
            return mixed_attention(attention, fit, strength=strength, without=without, block_mib=config.block_mib)

        return next_token_loss(subject.edited(ids, edit), ids)

    by_strength = {strength: loss(strength) for strength in config.strengths}
    if 1.0 in by_strength:
        check_faithful("λ = 1", by_strength[1.0], intact, dtypes=found.values(), precision=_FAITHFUL)
    whole = {"loss": intact} | {f"loss_strength_{s:g}": x for s, x in by_strength.items()}
    if 0.0 in by_strength:
        whole["loss_additive"] = by_strength[0.0]
        whole["additive_cost"] = by_strength[0.0] - intact
    if config.axes:
        whole |= {f"cost_without_{axis}": loss(without=axis) - intact for axis in "ac"}
    layers = (
        [LayerScores(layer, {}, {"additive_cost_of_layer": loss(0.0, only=layer) - intact}) for layer in found]
        if config.layers
        else []
    )
    curve = Curve(torch.tensor([[s, x] for s, x in sorted(by_strength.items())]), ("strength", "strength and loss"))
    return DocumentScores(layers, whole, {"loss_by_strength": curve})
