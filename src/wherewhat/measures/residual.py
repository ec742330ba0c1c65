"""``wherewhat residual``: loss with the non-additive part of the logits scaled down.

Inside the forward pass the logits W of a head are replaced by ``a + b + c + λ · (W - a - b - c)``, with the three-axis
fit of the same pass, or an axis is subtracted from them. λ = 1 is the model itself, λ = 0 makes its logits additive.
The control of λ = 0 adds noise of the same size to the logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherewhat.errors import CaptureError, ConfigError
from wherewhat.measures.measurement import Subject, Text, TextMeasurement, check_minimum
from wherewhat.options import option
from wherewhat.scores import NON_NEGATIVE, Column, Metric, Scores, loss_metric, stored_metric

if TYPE_CHECKING:
    import torch
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
    revision = 4
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

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: ResidualConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        import torch

        return measure_all_residuals(subject, torch.cat([text.ids for text in texts]), config)


def mixed_attention(
    attention: LayerAttention,
    fit: AxesFit,
    *,
    strength: float | Tensor = 1.0,
    without: str = "",
    heads: Tensor | None = None,
    noise: bool = False,
    block_mib: int = 64,
) -> Tensor:
    """Compute the attention output with changed logits, a block of queries at a time.

    Args:
        attention: One layer, n queries over n keys.
        fit: The three-axis fit over all visible pairs of its merged heads, see :attr:`LayerAttention.merged`.
        strength: λ, the factor on the non-additive part; a tensor ``(texts,)`` for each text its own.
        without: Axes to subtract, e.g. ``"a"``. The query axis cancels in softmax, so subtracting it has no effect. A
            sink column keeps its weight.
        heads: True for the heads to change, ``(heads,)``; None for all.
        noise: Add Gaussian noise instead, the same in each call and each text, with the root mean square that the
            change by ``strength`` has in a head.
        block_mib: Memory for one block of logits of a text, in MiB.

    Returns:
        Output ``(texts, n, heads, d_v)``.
    """
    import torch

    from wherewhat.measures.attention import attention_output

    texts, merged = attention.texts, attention.merged
    dtype = torch.promote_types(attention.rot_q.dtype, torch.float32)
    device = attention.rot_q.device
    a, b, c = (x.to(device, dtype) for x in (fit.a, fit.b, fit.c))
    size = (fit.sse / fit.pairs).sqrt().to(device, dtype)[:, None, None]
    if isinstance(strength, torch.Tensor):
        strength = strength.to(device, dtype).repeat_interleave(attention.heads)[:, None, None]
    chosen = None if heads is None else heads.to(device).repeat(texts).view(1, -1, 1, 1)

    def pattern(block: slice) -> Tensor:
        scores = merged.attn_scores(block)

        def term(axis: str) -> Tensor:
            if axis == "a":
                i = torch.arange(block.start, block.stop, device=device)
                return a[:, (i[:, None] - torch.arange(attention.m, device=device)).clamp(0, a.shape[1] - 1)]
            return b[:, block, None] if axis == "b" else c[:, None]

        if isinstance(strength, float | int) and strength == 1:
            changed = scores
        elif noise:
            drawn = gaussian_noise(attention, block).to(dtype).repeat(texts, 1, 1)
            changed = scores + (1 - strength) * size * drawn
        else:
            changed = strength * scores + term("a").add_(term("b")).add_(term("c")).mul_(1 - strength)
        if without:
            changed = _subtract(merged, changed, [term(axis) for axis in without], block)
        if chosen is not None:
            changed = torch.where(chosen, changed, scores)
        return merged.weigh(changed, block)

    output = attention_output(merged, block_mib=block_mib * texts, pattern=pattern)
    return torch.unflatten(output[0], 1, (texts, -1)).movedim(1, 0)


def gaussian_noise(attention: LayerAttention, rows: slice) -> Tensor:
    """Return Gaussian noise for the logits of some queries, ``(heads, rows, m)`` float32.

    It is a function of layer, head, query and key: the same on every device, for blocks of any size and in each text.
    """
    from wherewhat.measures.tensors import hashed_noise

    return hashed_noise(attention.layer, attention.heads, rows, attention.m, attention.rot_q.device)


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


@dataclass(frozen=True)
class _Variant:
    """A change of the logits of some heads, ``(heads,)`` by layer; None for all."""

    strength: float = 1.0
    without: str = ""
    noise: bool = False
    only: Mapping[int, Tensor] | None = None

    @property
    def kind(self) -> tuple[bool, str, bool, int]:
        """What variants that are computed together have in common."""
        return self.strength != 1, self.without, self.noise, id(self.only)

    @property
    def fitted(self) -> bool:
        """Whether the change needs the axes."""
        return self.strength != 1 or bool(self.without)


class _ResidualRuns:
    """Runs a model on texts ``(texts, n)`` with changed logits: variants and texts are rows of a batch."""

    def __init__(self, subject: Subject, ids: Tensor, block_mib: int, most: int) -> None:
        self._subject, self._ids, self._block_mib, self.most = subject, ids, block_mib, most

    def losses(self, variants: Sequence[_Variant]) -> list[Tensor]:
        """Return the loss of each text under each variant, ``(texts,)`` float64 each."""
        import torch

        from wherewhat.measures.batches import edited_rows
        from wherewhat.measures.tensors import text_losses

        count = len(self._ids)
        # Variants that are computed together, and those with a fit, are consecutive.
        order = sorted(range(len(variants)), key=lambda index: (variants[index].fitted, variants[index].kind[:3]))
        rows = [variants[index] for index in order for _ in range(count)]
        ids = self._ids.repeat(len(order), 1)

        def read(logits: Tensor, chunk: slice) -> list[Tensor]:
            return list(text_losses(logits, ids[chunk]).mean(-1))

        def edit(attention: LayerAttention, chunk: slice) -> Tensor | None:
            return self._output(attention, rows[chunk])

        losses = torch.stack(edited_rows(self._subject.edited, ids, edit, read, most=self.most)).view(-1, count)
        return [losses[order.index(index)] for index in range(len(variants))]

    def _output(self, attention: LayerAttention, rows: Sequence[_Variant]) -> Tensor | None:
        """Return the output of a layer whose texts are rows; None if none of them changes it."""
        import torch

        from wherewhat.measures.attention import attention_output
        from wherewhat.measures.axes.fit import fit_layer
        from wherewhat.measures.batches import equal_runs

        changes = [row.only is None or attention.layer in row.only for row in rows]
        if not any(changes):
            return None
        fitted = [row.fitted and changed for row, changed in zip(rows, changes, strict=True)]
        outputs = []
        fit, first = None, 0
        for (changed, _), own in equal_runs([(x, row.kind) for x, row in zip(changes, rows, strict=True)]):
            part, variant = attention.selected(own), rows[own.start]
            if not changed:
                outputs.append(part.output)
            elif not variant.fitted:
                outputs.append(attention_output(part, block_mib=self._block_mib))
            else:
                if fit is None:  # of all rows that need one, which are consecutive
                    first = fitted.index(True)
                    last = len(fitted) - fitted[::-1].index(True)
                    fit = fit_layer(attention.selected(slice(first, last)).merged)
                heads = slice((own.start - first) * attention.heads, (own.stop - first) * attention.heads)
                outputs.append(
                    mixed_attention(
                        part,
                        replace(fit, **{name: getattr(fit, name)[heads] for name in ("a", "b", "c", "sse")}),
                        strength=_strengths(tuple(row.strength for row in rows[own]), attention.rot_q.device),
                        without=variant.without,
                        heads=None if variant.only is None else variant.only[attention.layer],
                        noise=variant.noise,
                        block_mib=self._block_mib,
                    )
                )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def layer_costs(self, heads: Mapping[int, int], intact: Tensor) -> dict[int, Tensor]:
        """Return the cost ``(texts,)`` of making each layer alone additive, by layer.

        Layers below it are computed once, if the model can be run from the middle.

        Args:
            heads: Number of heads of each layer.
            intact: Loss of each text, ``(texts,)``.
        """
        import torch

        try:
            runs = self._subject.variants(self._ids)
        except (CaptureError, ConfigError):
            alone = [_Variant(0.0, only={layer: torch.ones(n, dtype=torch.bool)}) for layer, n in heads.items()]
            return {layer: loss - intact for layer, loss in zip(heads, self.losses(alone), strict=True)}
        return {layer: runs.run(layer, [(0.0, slice(None))], self.additive).loss[:, 0] - intact for layer in heads}

    def head_costs(self, heads: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the cost ``(texts, heads)`` of making each head alone additive, by layer."""
        runs = self._subject.variants(self._ids)
        return {
            layer: runs.run(layer, [(0.0, slice(head, head + 1)) for head in range(count)], self.additive).loss
            - runs.loss[:, None]
            for layer, count in heads.items()
        }

    def additive(self, attention: LayerAttention, strength: float) -> Tensor:
        """Return the output of a layer at one λ in all heads."""
        from wherewhat.measures.axes.fit import fit_layer

        return mixed_attention(attention, fit_layer(attention.merged), strength=strength, block_mib=self._block_mib)


@functools.lru_cache(maxsize=64)
def _strengths(values: tuple[float, ...], device: torch.device) -> float | Tensor:
    """Return one λ for all rows or a tensor ``(rows,)``, kept because a copy to a GPU waits for it."""
    import torch

    return values[0] if len(set(values)) == 1 else torch.tensor(values, device=device)


def measure_residual(subject: Subject, ids: Tensor, config: ResidualConfig) -> Scores:
    """Return the scores of one text ``(1, n)``; see :func:`measure_all_residuals`."""
    return measure_all_residuals(subject, ids, config)[0]


def measure_all_residuals(subject: Subject, ids: Tensor, config: ResidualConfig) -> list[Scores]:
    """Return the loss of texts ``(texts, n)`` at each λ, without each axis, and with layers or heads made additive."""
    from wherewhat.measures.batches import rows_at_once
    from wherewhat.measures.tensors import check_faithful, text_losses

    dtypes: dict[int, torch.dtype] = {}
    heads: dict[int, int] = {}

    def note(attention: LayerAttention) -> None:
        dtypes[attention.layer], heads[attention.layer] = attention.rot_q.dtype, attention.heads

    plain = subject.run(ids, note, logits=True)
    assert plain is not None
    intact = text_losses(plain, ids).mean(-1).cpu()
    runs = _ResidualRuns(subject, ids, config.block_mib, rows_at_once(plain))
    del plain
    variants = {f"loss_strength_{strength:g}": _Variant(strength) for strength in config.strengths}
    if 0.0 in config.strengths and config.control:
        variants["loss_noise"] = _Variant(0.0, noise=True)
    if config.axes:
        variants |= {f"cost_without_{axis}": _Variant(without=axis) for axis in "ac"}
    losses = dict(zip(variants, runs.losses([*variants.values()]), strict=True))
    layer_costs = runs.layer_costs(heads, intact) if config.layers else {}
    head_costs = runs.head_costs(heads) if config.heads else {}
    documents = []
    for text, loss in enumerate(intact.tolist()):
        own = {name: float(x[text]) for name, x in losses.items()}
        by_strength = {strength: own[f"loss_strength_{strength:g}"] for strength in config.strengths}
        if 1.0 in by_strength:
            check_faithful("λ = 1", by_strength[1.0], loss, dtypes=dtypes.values(), precision=_FAITHFUL)
        whole = {"loss": loss} | {name: x - loss if name.startswith("cost") else x for name, x in own.items()}
        if 0.0 in by_strength:
            whole |= {"loss_additive": by_strength[0.0], "additive_cost": by_strength[0.0] - loss}
        curves = {"loss_by_strength": _curve(by_strength, "strength")}
        if config.heads:
            costs = {layer: x[text] for layer, x in head_costs.items()}
            shared = _ResidualRuns(subject, ids[text : text + 1], config.block_mib, runs.most)
            joint = shared.losses([_Variant(0.0, only=_cheapest(costs, share)) for share in _SHARES])
            by_share = {share: float(x) for share, x in zip(_SHARES, joint, strict=True)}
            curves["loss_by_share"] = _curve({0.0: loss} | by_share, "share")
        layers = [
            Scores(
                layer=layer,
                heads={"additive_cost_of_head": head_costs[layer][text]} if head_costs else {},
                whole={"additive_cost_of_layer": float(layer_costs[layer][text])} if layer_costs else {},
            )
            for layer in layer_costs or head_costs
        ]
        documents.append(Scores(layers=layers, whole=whole, curves=curves))
    return documents


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
