"""``wherewhat residual``: loss with the non-additive part of the logits scaled down.

Inside the forward pass the logits W of a head are replaced by ``a + b + c + λ · (W - a - b - c)``, with the three-axis
fit of the same pass, or an axis is subtracted from them. λ = 1 is the model itself, λ = 0 makes its logits additive.
The control of λ = 0 adds noise of the same size to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import Subject, Text, TextMeasurement, check_minimum
from wherewhat.options import option
from wherewhat.scores import NON_NEGATIVE, Column, Metric, Scores, loss_metric, stored_metric

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.captures.attention import LayerAttention
    from wherewhat.measures.axes.fit import AxesFit

_SHARES = (0.1, 0.3, 0.5, 1.0)
"""Shares of heads, the cheapest ones first, that are made additive together."""

_FAITHFUL = 1e-3
"""Largest relative change of the loss at λ = 1."""


@dataclass(frozen=True)
class ResidualConfig:
    """Options of the residual measurement."""

    strengths: tuple[float, ...] = option((0.0, 0.25, 0.5, 0.75, 1.0), "values of λ, in all heads at once")
    layers: bool = option(True, "also make each layer alone additive")
    heads: bool = option(False, "also make each head alone additive, and the cheapest heads together")
    axes: bool = option(True, "also subtract each axis from all heads' logits")
    control: bool = option(True, "also add noise to all logits that changes them by as much as λ = 0")
    block_mib: int = option(64, "memory for one block of logits, in MiB")

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.strengths or len(set(self.strengths)) < len(self.strengths):
            raise ConfigError(f"strengths={self.strengths}: give one or more different values of λ")
        check_minimum(self, 1, "block_mib")


class ResidualMeasurement(TextMeasurement):
    """``wherewhat residual``."""

    name = "residual"
    revision = 3
    summary = "Loss with the non-additive part of the logits scaled down."
    config = ResidualConfig
    controls = ()
    metrics = (
        loss_metric("loss", "loss", "Mean next-token loss of the intact model."),
        *(
            loss_metric(
                f"loss_strength_{strength}",
                f"loss at λ = {strength}",
                reading,
                control="loss_noise" if strength == "0" else None,
                control_title="noise" if strength == "0" else "",
            )
            for strength, reading in (
                ("1", "Loss through the replacement: must equal the loss."),
                ("0.75", "Loss with three quarters of the residual."),
                ("0.5", "Loss with half of the residual."),
                ("0.25", "Loss with a quarter of the residual."),
                (
                    "0",
                    "Loss with exactly additive logits in all heads; the control adds noise of the same size to them.",
                ),
            )
        ),
        *(
            Metric(name, title, f"Increase of the loss {reading}.", unit="nats")
            for name, title, reading in (
                (
                    "cost_without_a",
                    "cost without distance",
                    "without the distance term; a sink column keeps its weight",
                ),
                ("cost_without_c", "cost without key", "without the key term; a sink column keeps its weight"),
                (
                    "additive_cost_of_layer",
                    "cost of one layer",
                    "with one layer alone made additive, mean over layers",
                ),
                ("additive_cost_of_head", "cost of one head", "with one head alone made additive"),
            )
        ),
    )
    stored = (
        stored_metric("loss_additive", unit="nats", range=NON_NEGATIVE),
        stored_metric("additive_cost", unit="nats"),
    )
    limits = (
        "The fit uses the whole text, later tokens included: the loss at λ < 1 is that of the best additive logits for "
        "this text, not of a model trained with additive logits. In layers with a sink column, subtracting an axis "
        "changes the weights of the keys relative to each other, but not the weight of the sink."
    )

    def measure(self, subject: Subject, text: Text, config: ResidualConfig) -> Scores:
        """Return the scores."""
        return measure_residual(subject, text.ids, config)


def mixed_attention(
    attention: LayerAttention,
    fit: AxesFit,
    *,
    strength: float = 1.0,
    without: str = "",
    heads: Tensor | None = None,
    noise: bool = False,
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
        noise: Add Gaussian noise instead, the same in each call, with the root mean square that the change by
            ``strength`` has in a head.
        block_mib: Memory for one block of logits, in MiB.

    Returns:
        Output ``(1, n, heads, d_v)``.
    """
    import torch

    from wherewhat.measures.attention import attention_output

    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    device = attention.rot_q.device
    a, b, c = (x.to(device, dtype) for x in (fit.a, fit.b, fit.c))
    size = (fit.sse / fit.pairs).sqrt().to(device, dtype)[:, None, None]
    drawn = torch.Generator().manual_seed(attention.layer)

    def pattern(block: slice) -> Tensor:
        scores = attention.attn_scores(block)
        i = torch.arange(block.start, block.stop, device=device)
        distance = (i[:, None] - torch.arange(attention.m, device=device)).clamp(0, a.shape[1] - 1)
        terms = {"a": a[:, distance], "b": b[:, block, None], "c": c[:, None]}
        if strength == 1:
            changed = scores
        elif noise:
            # Drawn row by row and on the CPU, so that the noise depends on neither blocks nor the device.
            even = torch.rand(len(i), attention.heads, attention.m, generator=drawn).transpose(0, 1).to(device, dtype)
            changed = scores + (1 - strength) * size * torch.special.ndtri(even.clamp_min(2**-25))
        else:
            changed = strength * scores + (1 - strength) * (sum(terms.values()))
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
    before, after = (x.masked_fill(hidden, -math.inf).logsumexp(-1, keepdim=True) for x in (scores, less))
    return less + (before - after)


def measure_residual(subject: Subject, ids: Tensor, config: ResidualConfig) -> Scores:
    """Return the loss of a text ``(1, n)`` at each λ, without each axis, and with layers or heads made additive."""
    import torch

    from wherewhat.measures.axes.fit import fit_layer
    from wherewhat.measures.tensors import check_faithful, next_token_loss

    dtypes: dict[int, torch.dtype] = {}
    heads: dict[int, int] = {}

    def note(attention: LayerAttention) -> None:
        dtypes[attention.layer], heads[attention.layer] = attention.rot_q.dtype, attention.heads

    plain = subject.run(ids, note, logits=True)
    assert plain is not None
    intact = next_token_loss(plain, ids)
    del plain

    def loss(
        strength: float = 1.0, without: str = "", only: Mapping[int, Tensor] | None = None, noise: bool = False
    ) -> float:
        def edit(attention: LayerAttention) -> Tensor | None:
            if only is not None and attention.layer not in only:
                return None
            return mixed_attention(
                attention,
                fit_layer(attention),
                strength=strength,
                without=without,
                heads=None if only is None else only[attention.layer],
                noise=noise,
                block_mib=config.block_mib,
            )

        return next_token_loss(subject.edited(ids, edit), ids)

    by_strength = {strength: loss(strength) for strength in config.strengths}
    if 1.0 in by_strength:
        check_faithful("λ = 1", by_strength[1.0], intact, dtypes=dtypes.values(), precision=_FAITHFUL)
    whole = {"loss": intact} | {f"loss_strength_{s:g}": x for s, x in by_strength.items()}
    if 0.0 in by_strength:
        whole["loss_additive"] = by_strength[0.0]
        whole["additive_cost"] = by_strength[0.0] - intact
        if config.control:
            whole["loss_noise"] = loss(0.0, noise=True)
    if config.axes:
        whole |= {f"cost_without_{axis}": loss(without=axis) - intact for axis in "ac"}
    curves = {"loss_by_strength": _curve(by_strength, "strength")}
    of_layers: dict[int, dict[str, float]] = {}
    if config.layers:
        for layer, count in heads.items():
            cost = loss(0.0, only={layer: torch.ones(count, dtype=torch.bool)}) - intact
            of_layers[layer] = {"additive_cost_of_layer": cost}
    of_heads: dict[int, dict[str, Tensor]] = {}
    if config.heads:
        runs = subject.variants(ids)

        def additive(attention: LayerAttention, strength: float) -> Tensor:
            return mixed_attention(attention, fit_layer(attention), strength=strength, block_mib=config.block_mib)

        costs = {
            layer: runs.run(layer, [(0.0, slice(head, head + 1)) for head in range(count)], additive)[0][0] - runs.loss
            for layer, count in heads.items()
        }
        of_heads = {layer: {"additive_cost_of_head": x} for layer, x in costs.items()}
        by_share = {share: loss(0.0, only=_cheapest(costs, share)) for share in _SHARES}
        curves["loss_by_share"] = _curve({0.0: intact} | by_share, "share")
    layers = [
        Scores(layer=layer, heads=of_heads.get(layer, {}), whole=of_layers.get(layer, {}))
        for layer in of_layers or of_heads
    ]
    return Scores(layers=layers, whole=whole, curves=curves)


def _cheapest(costs: Mapping[int, Tensor], share: float) -> dict[int, Tensor]:
    """Return True for the heads with the smallest costs over all layers, ``(heads,)`` by layer that has any."""
    import torch

    listed = sorted((value, layer, head) for layer, x in costs.items() for head, value in enumerate(x.tolist()))
    chosen: dict[int, Tensor] = {}
    for _, layer, head in listed[: round(share * len(listed))]:
        chosen.setdefault(layer, torch.zeros(len(costs[layer]), dtype=torch.bool))[head] = True
    return chosen


def _curve(losses: Mapping[float, float], axis: str) -> Column:
    import torch

    return Column(torch.tensor([[x, loss] for x, loss in sorted(losses.items())]), (axis, f"{axis} and loss"))
