"""Declaration of ``wherewhat split``: position and content parts of queries, keys and logits, over documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.measures.measurement import (
    SHARE,
    DocumentScores,
    DocumentsMeasurement,
    Metric,
    Subject,
    Text,
    check_minimum,
)
from wherewhat.measures.split import LEAST_DOCUMENTS
from wherewhat.options import option


@dataclass(frozen=True)
class SplitConfig:
    """Options of the split measurement."""

    skip: int = option(1, "number of first tokens to leave out (the first is often the same in every document)")

    def __post_init__(self) -> None:
        """Check the values."""
        check_minimum(self, 0, "skip")


class SplitMeasurement(DocumentsMeasurement):
    """``wherewhat split``."""

    name = "split"
    group = "Decomposition"
    summary = "Position and content parts of queries, keys and logits, over documents."
    config = SplitConfig
    least_documents = LEAST_DOCUMENTS
    metrics = (
        Metric(
            "q_position",
            "position in q",
            "Share of the queries' variance that documents have in common at a position; 0 if positions are shuffled.",
            error="q_position_se",
        ),
        Metric(
            "k_position",
            "position in k",
            "Share of the keys' variance that documents have in common at a position; 0 if positions are shuffled.",
            error="k_position_se",
        ),
        Metric(
            "logit_pp",
            "position · position",
            "Share of the logits' variance that is the same in every document; the control is the share of mean query "
            "and mean key, by rotation alone.",
            control="logit_pp_mean",
            control_title="mean vectors",
            error="logit_pp_se",
        ),
        Metric(
            "logit_pc",
            "position · content",
            "Share from the product of the query's position part and the key's content; the control is the mean query.",
            control="logit_pc_mean",
            control_title="mean query",
            error="logit_pc_se",
        ),
        Metric(
            "logit_cp",
            "content · position",
            "Share from the product of the query's content and the key's position part; the control is the mean key.",
            control="logit_cp_mean",
            control_title="mean key",
            error="logit_cp_se",
        ),
        Metric(
            "logit_cc",
            "content · content",
            "Share of the logits' variance from the product of the contents of query and key.",
            error="logit_cc_se",
        ),
        Metric(
            "logit_covariance",
            "covariance of the four",
            "Share of the covariances of the four terms: the four and this sum to one.",
        ),
        Metric(
            "axes_pp",
            "position in the axes",
            "Share of position · position in the three-axis part of the logits (see axes).",
            error="axes_pp_se",
        ),
        Metric(
            "distance_pp",
            "position in distance",
            "Share of position · position in the logits' distance curve.",
            error="distance_pp_se",
        ),
        Metric(
            "q_position_raw",
            "position in q, raw",
            "Position in q without the correction for few documents; the control is shuffled positions.",
            control="q_position_shuffled",
            control_title="positions shuffled",
            range=SHARE,
        ),
        Metric(
            "k_position_raw",
            "position in k, raw",
            "Position in k without the correction for few documents; the control is shuffled positions.",
            control="k_position_shuffled",
            control_title="positions shuffled",
            range=SHARE,
        ),
    )
    limits = (
        "Position is what documents have in common at a position, including what texts typically begin with. Content "
        "is the rest. In the logits, position parts include the mean query and the mean key, which depend on position "
        "only through rotation: compare the terms with their controls. Biases (ALiBi) and soft-caps are not part of "
        "the logits here. Errors of terms with content take the position parts as given: too small if content "
        "dominates."
    )

    def measure(self, subject: Subject, texts: Sequence[Text], config: SplitConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.split.logits import split_documents

        return split_documents(subject, [text.ids[0] for text in texts], config)
