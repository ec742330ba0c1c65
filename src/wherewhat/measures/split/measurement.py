"""``wherewhat split``: the position and content parts of queries, keys and logits over documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.measurement import DocumentScores, DocumentsMeasurement, Metric, Subject, Text
from wherewhat.measures.split import LEAST_DOCUMENTS
from wherewhat.options import option

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


class SplitMeasurement(DocumentsMeasurement):
    """``wherewhat split``."""

    name = "split"
    group = "Decomposition"
    summary = "What of queries, keys and logits belongs to the position and what to the content, over many documents."
    config = SplitConfig
    least_documents = LEAST_DOCUMENTS
    metrics = (
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
    )
    limits = (
        "Position is what documents have in common at a place: also what texts tend to have at their beginning. "
        "Content is all the rest. In the logits, position parts include the mean query and the mean key, which know "
        "no position before they are rotated: read the terms beside their controls. Biases (ALiBi) and soft-caps are "
        "not part of the logits here. Errors of terms with content take the position parts as given: too small where "
        "content is nearly all."
    )

    def measure(self, subject: Subject, texts: Sequence[Text], config: SplitConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.split.documents import split_documents

        return split_documents(subject, [text.ids[0] for text in texts], config)
