"""``wherewhat split``: what of queries, keys and logits belongs to the position, over many documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.errors import ConfigError, MeasureError
from wherewhat.measure.base import DocumentScores, Measurement, Metric, Subject, option
from wherewhat.measure.split.layer import LayerSplit, errors_of_means
from wherewhat.measure.split.logits import LEAST_DOCUMENTS

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

    Raises:
        MeasureError: If there are fewer than three documents, lengths differ, too few tokens are left, or the tensors
            cannot be split.
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
