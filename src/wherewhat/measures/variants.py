"""Loss and retrieval of planted sequences in variants of a model that differ in one layer, run in batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import cross_entropy

from wherewhat.caches.edits import SharedPrefix
from wherewhat.caches.visibility import full_attention
from wherewhat.captures.attention import LayerAttention
from wherewhat.captures.proof import Proof
from wherewhat.captures.session import Editor
from wherewhat.errors import CaptureError
from wherewhat.measures.batches import batch_mib, chunks, read_at_once
from wherewhat.measures.extend.retrieval import Planting, plant
from wherewhat.measures.tensors import right_logits, text_losses
from wherewhat.options import short_repr

Kind = TypeVar("Kind", bound=Hashable)

DEPTHS = (0, 25, 50, 75)
"""Depths of planted sequences, in percent of the text; deeper ones could be inside the window."""

RUN = 16
"""Tokens of a planted sequence."""

LEAST_GAIN = 0.05
"""Smallest gain of the unchanged model, in nats, of which a part makes sense."""

_SAME = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Largest change of the logits by a variant that changes nothing, relative to the largest."""


@dataclass(frozen=True)
class Outcomes:
    """What variants of a model reach on texts, ``(documents, variants)`` float64 each.

    Attributes:
        loss: Mean loss of the next token, nats.
        found: Gain from planted sequences, nats; NaN without them.
        logit: Mean logit of the next token, less the mean over the vocabulary; NaN where it is not read.
    """

    loss: Tensor
    found: Tensor
    logit: Tensor

    __repr__ = short_repr


class VariantRuns:
    """Runs variants of a model that differ in one layer, in batches that start at this layer.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        proof: Its proof.
        ids: Texts ``(documents, n)``.
        base: Edit of all layers that the variants have in common; None for the unchanged model.
        start: Index of the first token from which a next one is predicted that counts in the loss.
        planted: Whether to run the texts with planted sequences, too; without them retrieval is NaN.
        logits: Whether to read the logits of the next tokens, too; without that they are NaN.
        memory_mib: Memory for logits of one batch, in MiB; by default that of :func:`batch_mib`. It changes the result
            by rounding only.
    """

    def __init__(
        self,
        model: Any,
        proof: Proof,
        ids: Tensor,
        *,
        base: Editor | None = None,
        start: int = 0,
        planted: bool = True,
        logits: bool = False,
        memory_mib: int | None = None,
    ) -> None:
        self._ids, self._base, self._start, self._reads_logits = ids, base, start, logits
        control = SharedPrefix(model, proof, ids, edit=base)
        self._prefixes = [control]
        self._plantings: list[Planting] = []
        if planted:
            self._plantings = [plant(text[None], DEPTHS, run=RUN) for text in ids]
            texts = torch.cat([planting.planted for planting in self._plantings])
            self._prefixes.append(SharedPrefix(model, proof, texts, keep=self._plantings[0].needed, edit=base))
        self._check_unchanged(
            control, sorted(layer.layer for layer in proof.layout.layers)[len(proof.layout.layers) // 2]
        )
        outcomes = [
            self._outcome(text, [prefix.logits[text : text + 1] for prefix in self._prefixes])[:, 0]
            for text in range(len(ids))
        ]
        self.loss, self.found, self.logit = torch.stack(outcomes, 1).cpu()
        """Loss, gain from planted sequences and logit of the base, as in :class:`Outcomes`, ``(documents,)`` each."""
        # As much again as the logits take is left for the hidden states of the batch.
        each = 2 * control.logits[0].nbytes
        self._most = max(1, (memory_mib or batch_mib(control.logits.device)) * 2**20 // each)
        for prefix in self._prefixes:
            prefix.logits = prefix.logits[:0]

    def run(
        self, layer: int, variants: Sequence[tuple[Kind, slice]], output: Callable[[LayerAttention, Kind], Tensor]
    ) -> Outcomes:
        """Return loss, gain and logit of variants of a layer.

        Args:
            layer: The layer that they change.
            variants: How each variant is changed, and the heads that it changes.
            output: Called with the layer's attention on some texts and a kind of change; returns the output
                ``(texts, n, heads, d_v)`` with all heads changed.
        """
        parts: list[tuple[int, slice, Tensor]] = []
        for texts in chunks(len(self._ids), max(1, self._most // len(variants))):
            for chunk in chunks(len(variants), self._most):

                def edit(attention: LayerAttention, own: Sequence[tuple[Kind, slice]] = variants[chunk]) -> Tensor:
                    outputs = self._unchanged(attention)[:, None].repeat(1, len(own), 1, 1, 1)
                    changed = {kind: output(attention, kind) for kind in dict.fromkeys(kind for kind, _ in own)}
                    for row, (kind, heads) in enumerate(own):
                        outputs[:, row, :, heads] = changed[kind][:, :, heads].to(outputs.dtype)
                    return outputs

                rows = chunk.stop - chunk.start
                logits = [prefix.run(layer, rows, edit, texts=texts) for prefix in self._prefixes]
                for row, text in enumerate(range(texts.start, texts.stop)):
                    parts.append((text, chunk, self._outcome(text, [text_logits[row] for text_logits in logits])))
                del logits
        outcomes = torch.zeros(3, len(self._ids), len(variants), dtype=torch.float64)
        for (text, chunk, _), part in zip(parts, read_at_once([part for *_, part in parts]), strict=True):
            outcomes[:, text, chunk] = part
        return Outcomes(*outcomes)

    def _unchanged(self, attention: LayerAttention) -> Tensor:
        """Return the output ``(texts, n, heads, d_v)`` of a layer of the base."""
        output = None if self._base is None else self._base(attention)
        return full_attention(attention) if output is None else output

    def _outcome(self, text: int, logits: Sequence[Tensor]) -> Tensor:
        """Return loss, gain and logit ``(3, variants)`` from logits ``(variants, n, vocabulary)`` of a text."""
        ids = self._ids[text : text + 1].expand(len(logits[0]), -1)
        losses = text_losses(logits[0], ids)[:, self._start :].mean(-1)
        gains = right = torch.full_like(losses, torch.nan)
        if self._plantings:
            before, after = (recalled(row, self._plantings[text]) for row in logits)
            gains = after - before
        if self._reads_logits:
            right = right_logits(logits[0], ids)[:, self._start :].mean(-1)
        return torch.stack([losses, gains, right])

    def _check_unchanged(self, prefix: SharedPrefix, layer: int) -> None:
        """Refuse a model in which a pass that starts at a layer is not the rest of the whole pass."""
        again = prefix.run(layer, 1, lambda attention: self._unchanged(attention)[:, None], texts=slice(0, 1))[:, 0]
        expected = prefix.logits[:1]
        # Without copies: logits of long texts are large.
        change, size = (float(vector_norm(x, torch.inf)) for x in (again.sub_(expected), expected))
        change /= max(size, 1e-30)
        if not change <= _SAME.get(expected.dtype, 1e-1):
            raise CaptureError(
                f"a pass that starts at layer {layer} differs from the whole pass by {change:.2g}: its blocks read "
                "more than the hidden states before them, so heads cannot be replaced one by one"
            )


def recalled(logits: Tensor, planting: Planting) -> Tensor:
    """Return the mean log-probability of the runs at the end of a text after their cues, ``(variants,)`` float64.

    Logits ``(variants, n, vocabulary)`` of the text's last tokens are sufficient.
    """
    targets = planting.control[0, planting.body :].to(logits.device).expand(len(logits), -1)
    losses = cross_entropy(logits[:, -planting.needed : -1].float().flatten(0, 1), targets.flatten(), reduction="none")
    runs = losses.view(len(logits), -1, planting.run)
    return -runs[..., planting.cue :].double().mean((1, 2))
