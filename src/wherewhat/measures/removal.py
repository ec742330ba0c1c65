"""``wherewhat removal``: loss and logits of the next token without each head, and what each head adds to the logits.

Inside the forward pass the output of one head, before the output projection, is replaced by zero, by its mean over the
tokens of the text, or, as the control, by itself plus a random vector of the same norm. All variants of a layer are one
batch that starts at this layer. What a head adds directly, past all later layers, follows from one pass (direct logit
attribution).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from wherewhat.errors import CaptureError, ConfigError
from wherewhat.measures.measurement import Subject, Text, TextMeasurement
from wherewhat.options import option
from wherewhat.scores import Metric, Scores, loss_metric

if TYPE_CHECKING:
    from torch import Tensor

    from wherewhat.captures.attention import LayerAttention
    from wherewhat.measures.variants import Outcomes, VariantRuns

_log = logging.getLogger(__name__)

Replacement = Literal["removal", "mean", "noise"]
"""What replaces the output of a head: zero, its mean over the tokens, or itself plus a random vector of its norm."""


@dataclass(frozen=True)
class RemovalConfig:
    """Options of the removal measurement."""

    layers: tuple[int, ...] = option((), "layers whose heads are removed, such as 3,5; all if empty")
    mean: bool = option(True, "also replace the output of each head by its mean over the tokens")
    control: bool = option(True, "also add a random vector of the same norm to the output of each head")
    direct: bool = option(True, "also compute what each head adds to the logits directly")

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.layers, default=0) < 0:
            raise ConfigError(f"layers holds {min(self.layers)}: layers are counted from 0")
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError(f"layers={self.layers}: give each layer once")

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """What the output of each head is replaced by, one after the other."""
        chosen: dict[Replacement, bool] = {"removal": True, "mean": self.mean, "noise": self.control}
        return tuple(name for name, wanted in chosen.items() if wanted)


class RemovalMeasurement(TextMeasurement):
    """``wherewhat removal``."""

    name = "removal"
    summary = "Loss and logits of the next token without each head."
    config = RemovalConfig
    controls = ()
    metrics = (
        Metric(
            "removal_loss",
            "loss without the head",
            "Rise of the mean next-token loss when the output of the head is zero; the control adds a random vector of "
            "the same norm to it instead.",
            unit="nats",
            control="noise_loss",
            control_title="noise",
        ),
        Metric(
            "mean_loss",
            "loss with its mean",
            "Rise of the loss when the output of the head is its mean over the tokens of the text.",
            unit="nats",
        ),
        Metric(
            "removal_logit",
            "logit without the head",
            "Change of the next token's logit, less the mean over the vocabulary, when the output of the head is zero: "
            "below 0 if the head raises it.",
            control="noise_logit",
            control_title="noise",
        ),
        Metric(
            "direct_logit",
            "direct logit",
            "What the head adds to the next token's logit, less the mean over the vocabulary, without the layers after "
            "it; the control is the same for the tokens of the text in any order.",
            control="direct_logit_shuffled",
            control_title="any order",
        ),
        loss_metric("loss", "loss", "Mean next-token loss of the intact model."),
    )
    limits = (
        "Heads are removed one at a time: two heads that do the same are both cheap to remove, and the costs of "
        "several do not add up. A loss without a head is that of this model, which was trained with it. The mean over "
        "the tokens includes later ones. The direct logit holds the scale of the final norm fixed and leaves out what "
        "later layers compute from the head."
    )

    def measure(self, subject: Subject, text: Text, config: RemovalConfig) -> Scores:
        """Return the scores."""
        return measure_removals(subject, text.ids, config)[0]

    def measure_texts(self, subject: Subject, texts: Sequence[Text], config: RemovalConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        import torch

        return measure_removals(subject, torch.cat([text.ids for text in texts]), config)


def replaced_heads(attention: LayerAttention, replacement: Replacement) -> Tensor:
    """Return the output ``(texts, n, heads, d_v)`` of a layer with that of every head replaced."""
    import torch

    from wherewhat.caches.visibility import full_attention
    from wherewhat.measures.tensors import hashed_noise

    output = full_attention(attention)
    if replacement == "removal":
        return torch.zeros_like(output)
    output = output.to(torch.promote_types(output.dtype, torch.float32))
    if replacement == "mean":
        return output.mean(1, keepdim=True).expand_as(output)
    width = output.shape[-1]
    noise = hashed_noise(attention.layer, attention.heads, slice(0, attention.n), width, output.device)
    noise = noise.transpose(0, 1).to(output.dtype)
    size: Tensor = output.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return output + size * noise


class _WholeRuns:
    """Runs variants of one layer as :class:`~wherewhat.measures.variants.VariantRuns` does, but from the first layer.

    For models whose blocks cannot be run from the middle.
    """

    def __init__(self, subject: Subject, ids: Tensor, logits: Tensor) -> None:
        from wherewhat.measures.batches import rows_at_once
        from wherewhat.measures.tensors import right_logits, text_losses

        self._subject, self._ids, self._most = subject, ids, rows_at_once(logits)
        self.loss, self.logit = (read(logits, ids).mean(-1).cpu() for read in (text_losses, right_logits))

    def run(
        self,
        layer: int,
        variants: Sequence[tuple[Replacement, slice]],
        output: Callable[[LayerAttention, Replacement], Tensor],
    ) -> Outcomes:
        """Return loss and logit of variants of a layer."""
        import torch

        from wherewhat.caches.visibility import full_attention
        from wherewhat.measures.batches import edited_rows
        from wherewhat.measures.tensors import right_logits, text_losses
        from wherewhat.measures.variants import Outcomes

        def edit(attention: LayerAttention, rows: slice) -> Tensor | None:
            if attention.layer != layer:
                return None
            outputs = full_attention(attention).clone()
            for row, (kind, heads) in enumerate(variants[rows]):
                outputs[row, :, heads] = output(attention.selected(slice(row, row + 1)), kind)[0, :, heads].to(outputs)
            return outputs

        losses, logits = [], []
        for text in self._ids:
            ids = text.expand(len(variants), -1)

            def read(of_rows: Tensor, rows: slice, ids: Tensor = ids) -> list[Tensor]:
                means = (numbers(of_rows, ids[rows]).mean(-1) for numbers in (text_losses, right_logits))
                return list(torch.stack([*means], 1))

            numbers = torch.stack(edited_rows(self._subject.edited, ids, edit, read, most=self._most))
            losses.append(numbers[:, 0])
            logits.append(numbers[:, 1])
        loss = torch.stack(losses)
        return Outcomes(loss, torch.full_like(loss, torch.nan), torch.stack(logits))


def measure_removals(subject: Subject, ids: Tensor, config: RemovalConfig) -> list[Scores]:
    """Return the scores of texts ``(texts, n)``: what every head does to the loss and to the next token's logit."""
    import torch

    heads: dict[int, int] = {}
    plain = subject.run(ids, lambda attention: heads.update({attention.layer: attention.heads}), logits=True)
    assert plain is not None
    missing = [layer for layer in config.layers if layer not in heads]
    if missing:
        raise ConfigError(f"layers holds {missing[0]}: the layers with attention are {', '.join(map(str, heads))}")
    runs: VariantRuns | _WholeRuns
    try:
        runs = subject.variants(ids, logits=True)
    except (CaptureError, ConfigError):
        runs = _WholeRuns(subject, ids, plain)
    del plain
    layers = [layer for layer in sorted(heads) if not config.layers or layer in config.layers]
    by_text: list[list[Scores]] = [[] for _ in ids]
    direct = _direct_logits(subject, ids) if config.direct else None
    for layer in layers:
        count = heads[layer]
        variants = [(kind, slice(head, head + 1)) for kind in config.replacements for head in range(count)]
        outcomes = runs.run(layer, variants, replaced_heads)
        rise = torch.unflatten(outcomes.loss - runs.loss[:, None], 1, (-1, count))
        change = torch.unflatten(outcomes.logit - runs.logit[:, None], 1, (-1, count))
        for text, scores in enumerate(by_text):
            of_heads: dict[str, Tensor] = {}
            for index, kind in enumerate(config.replacements):
                of_heads[f"{kind}_loss"] = rise[text, index]
                if kind != "mean":
                    of_heads[f"{kind}_logit"] = change[text, index]
            if not config.control:  # a control that was not asked for is undefined
                of_heads |= dict.fromkeys(("noise_loss", "noise_logit"), torch.full((count,), torch.nan))
            if direct is not None:
                of_heads |= {name: x[layer] for name, x in direct[text].items()}
            scores.append(Scores(layer=layer, heads=of_heads))
    return [
        Scores(layers=scores, whole={"loss": loss}) for scores, loss in zip(by_text, runs.loss.tolist(), strict=True)
    ]


def _direct_logits(subject: Subject, ids: Tensor) -> list[dict[str, dict[int, Tensor]]] | None:
    """Return the direct logits of each text by metric and layer, ``(heads,)`` each; None if the model has none."""
    from wherewhat.measures.batches import read_at_once

    try:
        stream = subject.stream()
        texts = [stream.direct_logits(text[None]) for text in ids]
    except (CaptureError, ConfigError) as error:
        _say_once(str(error))
        return None
    parts = [{"direct_logit": text.heads, "direct_logit_shuffled": text.shuffled} for text in texts]
    means = iter(read_at_once([x.mean(-1) for text in parts for layers in text.values() for x in layers.values()]))
    return [{name: {layer: next(means) for layer in layers} for name, layers in text.items()} for text in parts]


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("removal: no direct logits: %s", reason)
