"""Declaration of ``wherewhat split``: position and content parts of queries, keys and logits, over documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wherewhat.measures.measurement import DocumentsMeasurement, Subject, Text
from wherewhat.measures.split import LEAST_DOCUMENTS, SplitConfig
from wherewhat.scores import SHARE, Metric, Scores

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


def _estimate(name: str, title: str, reading: str, *, mean: str = "") -> Metric:
    """Return a metric with a standard error, and with the share of what ``mean`` says as control, if given."""
    return Metric(
        name, title, reading, control=f"{name}_mean" if mean else None, control_title=mean, error=f"{name}_se"
    )


class SplitMeasurement(DocumentsMeasurement):
    """``wherewhat split``."""

    name = "split"
    revision = 2
    summary = "Position and content parts of queries, keys and logits, over documents."
    config = SplitConfig
    least_documents = LEAST_DOCUMENTS
    metrics = (
        *(
            _estimate(
                f"{x}_position",
                f"position in {x}",
                f"Share of the {vectors}' variance that documents have in common at a position; 0 if positions are "
                "shuffled.",
            )
            for x, vectors in (("q", "queries"), ("k", "keys"))
        ),
        _estimate(
            "logit_pp",
            "position · position",
            "Share of the logits' variance that is the same in every document; the control is the share of mean query "
            "and mean key, by rotation alone.",
            mean="mean vectors",
        ),
        _estimate(
            "logit_pc",
            "position · content",
            "Share from the product of the query's position part and the key's content; the control is the mean query.",
            mean="mean query",
        ),
        _estimate(
            "logit_cp",
            "content · position",
            "Share from the product of the query's content and the key's position part; the control is the mean key.",
            mean="mean key",
        ),
        _estimate(
            "logit_cc",
            "content · content",
            "Share of the logits' variance from the product of the contents of query and key.",
        ),
        Metric(
            "logit_covariance",
            "covariance of the four",
            "Share of the covariances of the four terms: the four and this sum to one.",
        ),
        _estimate(
            "axes_pp",
            "position in the axes",
            "Share of position · position in the three-axis part of the logits (see axes).",
        ),
        _estimate("distance_pp", "position in distance", "Share of position · position in the logits' distance curve."),
        *(
            Metric(
                f"{x}_position_raw",
                f"position in {x}, raw",
                f"Position in {x} without the correction for few documents; the control is shuffled positions.",
                control=f"{x}_position_shuffled",
                control_title="positions shuffled",
                range=SHARE,
            )
            for x in "qk"
        ),
    )
    limits = (
        "Position is what documents have in common at a position, including what texts typically begin with. Content "
        "is the rest. In the logits, position parts include the mean query and the mean key, which depend on position "
        "only through rotation: compare the terms with their controls. Biases (ALiBi) and soft-caps are not part of "
        "the logits here. Errors of terms with content take the position parts as given: too small if content "
        "dominates."
    )

    def measure(self, subject: Subject, texts: Sequence[Text], config: SplitConfig) -> Scores:
        """Return the scores."""
        from wherewhat.measures.split.logits import split_documents

        return split_documents(subject, [text.ids[0] for text in texts], config)

    def measure_layer(self, layer: LayerAttention, config: SplitConfig) -> Scores:
        """Return the scores of one layer of a pass over all texts."""
        from wherewhat.measures.split.logits import split_layer

        return split_layer(layer, config)

    def joined(self, layers: Sequence[Scores]) -> Scores:
        """Return the scores of the model from those of its layers."""
        from wherewhat.measures.split.logits import joined

        return joined(layers)
