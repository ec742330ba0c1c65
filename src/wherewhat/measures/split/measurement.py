"""``wherewhat split``: the position and content parts of queries, keys and logits over documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.captures.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measures.axes.measurement import band_width
from wherewhat.measures.measurement import DocumentScores, LayerScores, Measurement, Metric, Subject, option
from wherewhat.measures.split.logits import LEAST_DOCUMENTS, LogitSums, flattened
from wherewhat.measures.split.statistics import Estimate, Others, PositionSums, jackknife_error


class LayerSplit:
    """One layer's sums over documents, in two passes.

    Holds sums over documents of queries and keys in float64, 2 · (heads + kv_heads) · n · d numbers.
    """

    def __init__(self, documents: int, *, skip: int) -> None:
        self._skip = skip
        self._q, self._k = PositionSums(documents), PositionSums(documents)
        self._logits: LogitSums | None = None
        self._groups = 1

    def first(self, attention: LayerAttention) -> None:
        """Take in a document."""
        if attention.rot_q.shape[0] != 1 or attention.n != attention.m:
            raise MeasureError(
                f"layer {attention.layer} holds {attention.rot_q.shape[0]} texts and {attention.m} keys for "
                f"{attention.n} queries: split one text at a time, without a cache"
            )
        self._groups = attention.heads // attention.kv_heads
        self._q.add(attention.q[0, :, self._skip :])
        self._k.add(attention.k[0, :, self._skip :])

    def second(self, attention: LayerAttention) -> None:
        """Take in the same document again, now that the position parts are known."""
        of_q = self._q.compare(attention.q[0, :, self._skip :])
        of_k = self._k.compare(attention.k[0, :, self._skip :])
        if self._logits is None:
            self._logits = LogitSums(window=band_width(attention))

        def rotated(x: Tensor) -> Tensor:
            return self._rotated(x, attention)

        self._logits.add(
            attention.rot_q[0, :, self._skip :],
            attention.rot_k[0, :, self._skip :],
            (Others(rotated(of_q.mean), rotated(of_q.noise)), Others(rotated(of_k.mean), rotated(of_k.noise))),
            (rotated(flattened(of_q.mean)), rotated(flattened(of_k.mean))),
        )

    def scores(self, layer: int) -> tuple[LayerScores, dict[str, Tensor]]:
        """The layer's numbers, and what those that have an error would be without each document."""
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

    def _rotated(self, x: Tensor, attention: LayerAttention) -> Tensor:
        """Vectors ``(heads, n, d)`` as the layer would rotate them: linear, so parts of a vector rotate along."""
        if attention.rotation is None:
            return x
        positions = attention.positions.reshape(-1, attention.m)[0, self._skip :]
        return attention.rotation.rotate(x, positions)


def errors_of_means(left_out: dict[str, Tensor]) -> dict[str, float]:
    """Standard errors of means over heads, from estimates ``(documents, heads)``; heads share their documents."""
    errors = {f"{name}_se": float(jackknife_error(values.nanmean(-1))) for name, values in left_out.items()}
    return {name: error for name, error in errors.items() if error == error}


_LEAST = 4
"""Tokens that a triangle of logits needs."""


@dataclass(frozen=True)
class SplitConfig:
    """Options of the split."""

    skip: int = option(1, "leave out the first so many tokens (the first is often the same in every document)")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        if self.skip < 0:
            raise ConfigError(f"skip is {self.skip}: it must not be negative")


def split_documents(subject: Subject, documents: Sequence[Tensor], config: SplitConfig) -> DocumentScores:
    """Split queries, keys and logits of a model over documents of one length.

    The model runs on every document twice. Held for every layer are 2 · (heads + kv_heads) · n · d float64 numbers,
    whatever the number of documents.

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
    if lengths[0] - config.skip < _LEAST:
        raise MeasureError(
            f"skip is {config.skip}, but the texts have only {lengths[0]} tokens: at least {_LEAST} must be left"
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


SPLIT = Measurement(
    name="split",
    summary="What of queries, keys and logits belongs to the position and what to the content, over many documents.",
    config=SplitConfig,
    measure=None,
    across=split_documents,
    least_documents=LEAST_DOCUMENTS,
    metrics=(
        Metric(
            "q_position",
            "position in q",
            "",
            "Share of the queries' variance that documents have in common at a position; 0 if positions are shuffled.",
            error="q_position_se",
        ),
        Metric(
            "k_position",
            "position in k",
            "",
            "Share of the keys' variance that documents have in common at a position; 0 if positions are shuffled.",
            error="k_position_se",
        ),
        Metric(
            "logit_pp",
            "position · position",
            "",
            "Share of the logits' variance that is the same for every document; the control is what the mean query and "
            "the mean key make of it, by rotation alone.",
            "logit_pp_mean",
            "mean vectors",
            error="logit_pp_se",
        ),
        Metric(
            "logit_pc",
            "position · content",
            "",
            "Share of the query's position part on the key's content; the control is the mean query's.",
            "logit_pc_mean",
            "mean query",
            error="logit_pc_se",
        ),
        Metric(
            "logit_cp",
            "content · position",
            "",
            "Share of the query's content on the key's position part; the control is the mean key's.",
            "logit_cp_mean",
            "mean key",
            error="logit_cp_se",
        ),
        Metric(
            "logit_cc",
            "content · content",
            "",
            "Share of the logits' variance in which the contents of query and key meet.",
            error="logit_cc_se",
        ),
        Metric(
            "logit_covariance",
            "covariance of the four",
            "",
            "What the terms' covariances add: the four and this sum to one.",
        ),
        Metric(
            "axes_pp",
            "position in the axes",
            "",
            "Share of the three-axis part of the logits (see axes) that position · position gives.",
            error="axes_pp_se",
        ),
        Metric(
            "distance_pp",
            "position in distance",
            "",
            "Share of the logits' distance curve that position · position gives.",
            error="distance_pp_se",
        ),
        Metric(
            "q_position_raw",
            "position in q, raw",
            "",
            "The same as position in q without the correction for few documents; shuffled positions give the control.",
            "q_position_shuffled",
            "positions shuffled",
        ),
        Metric(
            "k_position_raw",
            "position in k, raw",
            "",
            "The same as position in k without the correction for few documents; shuffled positions give the control.",
            "k_position_shuffled",
            "positions shuffled",
        ),
    ),
    limits=(
        "Position is what documents have in common at a place: also what texts tend to have at their beginning. "
        "Content is all the rest. In the logits, position parts include the mean query and the mean key, which know "
        "no position before they are rotated: read the terms beside their controls. Biases (ALiBi) and soft-caps are "
        "not part of the logits here. Errors of terms with content take the position parts as given: too small where "
        "content is nearly all."
    ),
)
