"""What the part of the logits that is not additive does: it is turned down, and the model's loss is measured.

Inside the forward pass the logits W of a head are replaced by ``a + b + c + λ · (W - a - b - c)``, with the three-axis
fit of that very pass, or an axis is taken out of them. λ = 1 is the model itself, λ = 0 one with additive logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import AxesFit
from wherewhat.measures.axes.layer import fit_layer
from wherewhat.measures.measurement import Curve, DocumentScores, LayerScores, Subject
from wherewhat.measures.residual.measurement import ResidualConfig
from wherewhat.measures.tensors import allowed_change, next_token_loss

_FAITHFUL = 1e-3
"""Share of the loss that a replacement which changes nothing may change."""


def mixed_attention(
    attention: LayerAttention,
    fit: AxesFit,
    *,
    strength: float = 1.0,
    without: str = "",
    heads: Tensor | None = None,
    block_mib: int = 64,
) -> Tensor:
    """Attention output with the logits changed, a block of queries at a time.

    Args:
        attention: One layer, batch 1, n queries over n keys.
        fit: Its three-axis fit over all visible pairs.
        strength: λ on what is not additive.
        without: Axes to take out, e.g. ``"a"``. What is the same for all keys of a query cancels, so taking out the
            query axis changes nothing; where there is a sink column, it keeps the weight it had.
        heads: True for the heads to change, ``(heads,)``; None for all.
        block_mib: Memory for one block of logits.

    Returns:
        Output ``(1, n, heads, d_v)``.
    """
    n, count = attention.n, attention.heads
    rows = max(1, block_mib * 2**20 // (4 * count * attention.m))
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    a, b, c = (x.to(attention.rot_q.device, dtype) for x in (fit.a, fit.b, fit.c))
    value = attention.value.to(dtype).repeat_interleave(count // attention.value.shape[1], 1)
    output = torch.empty(1, n, count, value.shape[-1], dtype=dtype, device=value.device)
    for start in range(0, n, rows):
        block = slice(start, min(n, start + rows))
        scores = attention.attn_scores(block)
        i = torch.arange(block.start, block.stop, device=value.device)
        distance = (i[:, None] - torch.arange(attention.m, device=value.device)).clamp(0, a.shape[1] - 1)
        terms = {"a": a[:, distance], "b": b[:, block, None], "c": c[:, None]}
        changed = scores if strength == 1 else strength * scores + (1 - strength) * (sum(terms.values()))
        if without:
            changed = _taken_out(attention, changed, [terms[axis] for axis in without], block)
        if heads is not None:
            changed = torch.where(heads.to(value.device).view(1, -1, 1, 1), changed, scores)
        output[:, block] = (attention.weigh(changed, block) @ value).transpose(1, 2)
    return output


def _taken_out(attention: LayerAttention, scores: Tensor, terms: Sequence[Tensor], rows: slice) -> Tensor:
    """Logits ``(1, heads, rows, m)`` less some terms, the weight of the sink column as before."""
    less = scores - sum(terms)
    if attention.sinks is None:
        return less
    # How a constant is shared between the axes is a convention, but against a sink it counts. The sum of exponentials
    # of a row is put back: the keys share what the sink leaves them by the new logits, whatever the convention.
    hidden = ~attention.visible(rows)
    before, after = (x.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True) for x in (scores, less))
    return less + (before - after)


def measure_residual(subject: Subject, ids: Tensor, config: ResidualConfig) -> DocumentScores:
    """Return the loss with the non-additive part of the logits scaled down."""
    found: dict[int, torch.dtype] = {}
    plain = subject.run(ids, lambda attention: found.update({attention.layer: attention.rot_q.dtype}), logits=True)
    assert plain is not None
    untouched = next_token_loss(plain, ids)
    del plain

    def loss(strength: float = 1.0, without: str = "", only: int | None = None) -> float:
        def edit(attention: LayerAttention) -> Tensor | None:
            if only is not None and attention.layer != only:
                return None
            fit = fit_layer(attention)
            return mixed_attention(attention, fit, strength=strength, without=without, block_mib=config.block_mib)

        return next_token_loss(subject.edited(ids, edit), ids)

    by_strength = {strength: loss(strength) for strength in config.strengths}
    allowed = allowed_change(untouched, found.values(), _FAITHFUL)
    if 1.0 in by_strength and not abs(by_strength[1.0] - untouched) <= allowed:
        raise MeasureError(
            f"λ = 1 gives a loss of {by_strength[1.0]:.5f}, the untouched model {untouched:.5f}: the replacement is "
            "not faithful on this model"
        )
    whole = {"loss": untouched} | {f"loss_strength_{s:g}": x for s, x in by_strength.items()}
    if 0.0 in by_strength:
        whole["loss_additive"] = by_strength[0.0]
        whole["additive_cost"] = by_strength[0.0] - untouched
    if config.axes:
        whole |= {f"cost_without_{axis}": loss(without=axis) - untouched for axis in "ac"}
    layers = (
        [LayerScores(layer, {}, {"additive_cost_of_layer": loss(0.0, only=layer) - untouched}) for layer in found]
        if config.layers
        else []
    )
    curve = Curve(torch.tensor([[s, x] for s, x in sorted(by_strength.items())]), ("strength", "strength and loss"))
    return DocumentScores(layers, whole, {"loss_by_strength": curve})
