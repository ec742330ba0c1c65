"""Position and content parts of queries, keys and logits over documents, for all layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import MeasureError
from wherewhat.measures.axes.fit import band_width
from wherewhat.measures.measurement import DocumentScores, LayerScores, Subject
from wherewhat.measures.split import LEAST_DOCUMENTS
from wherewhat.measures.split.logits import LogitSums, flattened
from wherewhat.measures.split.measurement import SplitConfig
from wherewhat.measures.split.statistics import Estimate, Others, PositionSums, jackknife_error
from wherewhat.measures.tensors import check_single_text, defined

_LEAST_TOKENS = 4
"""Smallest number of tokens for a three-axis fit."""


class LayerSplit:
    """Sums over documents for one layer, in two passes.

    Holds 2 · (heads + kv_heads) · n · d float64 numbers.
    """

    def __init__(self, documents: int, *, skip: int) -> None:
        self._skip = skip
        self._q, self._k = PositionSums(documents), PositionSums(documents)
        self._logits: LogitSums | None = None
        self._groups = 1

    def first(self, attention: LayerAttention) -> None:
        """Add a document in the first pass."""
        check_single_text(attention)
        self._groups = attention.heads // attention.kv_heads
        self._q.add(attention.q[0, :, self._skip :])
        self._k.add(attention.k[0, :, self._skip :])

    def second(self, attention: LayerAttention) -> None:
        """Add the same document in the second pass, when the position parts are known."""
        of_q = self._q.compare(attention.q[0, :, self._skip :])
        of_k = self._k.compare(attention.k[0, :, self._skip :])
        if self._logits is None:
            self._logits = LogitSums(window=band_width(attention))

        def rotated(x: Tensor) -> Tensor:
            """Rotate vectors ``(heads, n, d)`` as the layer does; rotation is linear, so parts rotate separately."""
            if attention.rotation is None:
                return x
            positions = attention.positions.reshape(-1, attention.m)[0, self._skip :]
            return attention.rotation.rotate(x, positions)

        self._logits.add(
            attention.rot_q[0, :, self._skip :],
            attention.rot_k[0, :, self._skip :],
            (Others(rotated(of_q.mean), rotated(of_q.noise)), Others(rotated(of_k.mean), rotated(of_k.noise))),
            (rotated(flattened(of_q.mean)), rotated(flattened(of_k.mean))),
        )

    def scores(self, layer: int) -> tuple[LayerScores, dict[str, Tensor]]:
        """Return the layer's scores, and the estimates with a jackknife error without each document."""
        assert self._logits is not None
        estimates: dict[str, Estimate] = {}
        heads: dict[str, Tensor] = {}
        for name, share, groups in (("q", self._q.share(), 1), ("k", self._k.share(), self._groups)):
            both = (share.share.value, share.share.left_out)
            estimates[f"{name}_position"] = Estimate(*(x.repeat_interleave(groups, -1) for x in both))
            heads[f"{name}_position_raw"] = share.raw.repeat_interleave(groups)
            heads[f"{name}_position_shuffled"] = share.shuffled.repeat_interleave(groups)
        split = self._logits.split()
        for term in ("pp", "pc", "cp", "cc"):
            estimates[f"logit_{term}"] = getattr(split, term)
        for term in ("covariance", "pp_mean", "pc_mean", "cp_mean"):
            heads[f"logit_{term}"] = getattr(split, term)
        estimates |= {"axes_pp": split.axes_pp, "distance_pp": split.distance_pp}
        for name, estimate in estimates.items():
            heads |= {name: estimate.value, f"{name}_se": estimate.error}
        left_out = {name: estimate.left_out.cpu() for name, estimate in estimates.items()}
        heads = {name: values.cpu() for name, values in heads.items()}
        return LayerScores(layer, heads, whole=errors_of_means(left_out)), left_out


def errors_of_means(left_out: dict[str, Tensor]) -> dict[str, float]:
    """Return standard errors of means over heads, from leave-one-out estimates ``(documents, heads)``."""
    return defined({f"{name}_se": float(jackknife_error(values.nanmean(-1))) for name, values in left_out.items()})


def split_documents(subject: Subject, documents: Sequence[Tensor], config: SplitConfig) -> DocumentScores:
    """Split queries, keys and logits of a model into position and content over documents of one length.

    The model runs on every document twice. Memory is 2 · (heads + kv_heads) · n · d float64 numbers per layer,
    independent of the number of documents.

    Args:
        subject: The model.
        documents: Token ids of each document, ``(n,)``.
        config: Options.
    """
    if len(documents) < LEAST_DOCUMENTS:
        raise MeasureError(
            f"documents={len(documents)} cannot be split: at least {LEAST_DOCUMENTS} are needed, 8 or more are better"
        )
    lengths = sorted({len(ids) for ids in documents})
    if len(lengths) > 1:
        raise MeasureError(f"documents have from {lengths[0]} to {lengths[-1]} tokens: cut all to one length")
    if lengths[0] - config.skip < _LEAST_TOKENS:
        raise MeasureError(
            f"skip is {config.skip}, but the texts have only {lengths[0]} tokens: at least {_LEAST_TOKENS} must be left"
        )
    layers: dict[int, LayerSplit] = {}

    def first(attention: LayerAttention) -> None:
        layers.setdefault(attention.layer, LayerSplit(len(documents), skip=config.skip)).first(attention)

    def second(attention: LayerAttention) -> None:
        layers[attention.layer].second(attention)

    passes: tuple[Callable[[LayerAttention], None], ...] = (first, second)
    for reducer in passes:
        for ids in documents:
            subject.run(ids[None], reducer)
    found = {index: layers[index].scores(index) for index in sorted(layers)}
    names = next(iter(found.values()))[1] if found else {}
    left_out = {name: torch.cat([of_layer[name] for _, of_layer in found.values()], -1) for name in names}
    return DocumentScores([scores for scores, _ in found.values()], whole=errors_of_means(left_out))
