"""Declarations of ``wherewhat heads`` and ``wherewhat attention``: swap scores, patterns and entropy of every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from wherewhat.errors import MeasureError
from wherewhat.measures.heads import AttentionConfig, HeadsConfig
from wherewhat.measures.measurement import LayerMeasurement, Subject, Text
from wherewhat.measures.swaps import LABELS, SCORES
from wherewhat.scores import CORRELATION, NON_NEGATIVE, SHARE, Metric, Scores, stored_metric

if TYPE_CHECKING:
    from wherewhat.captures.attention import LayerAttention


def _share(name: str, title: str, reading: str) -> Metric:
    return Metric(name, title, reading, range=SHARE)


def _labelled(name: str, title: str, reading: str) -> Metric:
    """Return the share of heads with a label, ``heads_LABEL``, or ``heads_LABEL_no_sink`` for labels without the sink.

    Sinks are a label of the second version alone.
    """
    label = name.removeprefix("heads_").removesuffix("_no_sink")
    labels = "label_no_sink" if label == "sink" or name.endswith("_no_sink") else "label"
    reading = (
        f"{reading} Counted by labels over all documents together; the share is the mean over documents, each alone."
    )
    return Metric(name, title, reading, range=SHARE, counts=(labels, label))


def _correlation(name: str, title: str, reading: str) -> Metric:
    return Metric(name, title, reading, range=CORRELATION)


def _pattern(name: str, title: str, reading: str) -> Metric:
    """Return a metric with its value for uniform attention as control."""
    return Metric(name, title, reading, control=f"{name}_uniform", control_title="even spread", range=SHARE)


def _rank_one(name: str, title: str, reading: str) -> Metric:
    """Return a metric with the rank-one share of Gaussian noise as control."""
    return Metric(name, title, reading, control="rank_one_gaussian", control_title="noise", range=SHARE)


SPREAD_METRICS = (
    Metric(
        "entropy",
        "entropy",
        "Entropy of the attention weights; its exponential is the effective number of keys. The control is uniform "
        "attention.",
        unit="nats",
        control="entropy_uniform",
        control_title="even spread",
        range=NON_NEGATIVE,
    ),
    _pattern("sink_mass", "sink mass", "Share of attention on the first tokens; the control is uniform attention."),
    Metric(
        "learned_sink_mass",
        "learned sink",
        "Share of attention on the model's own sink column; only of models that have one.",
        range=SHARE,
    ),
)

_VECTORS = (("q", "queries"), ("k", "keys"))
_KINDS = (("pos", "positional"), ("sym", "symbolic"))

PATTERN_METRICS = (
    _pattern(
        "slash_max",
        "slash",
        "Mean attention at the distance with the most attention: 1 for a head that always attends the same number of "
        "tokens back. The control is the maximum of uniform attention.",
    ),
    Metric(
        "slash_lag",
        "distance of the slash",
        "The distance with the most attention; meaningful where the slash is above its control.",
        unit="tokens",
        range=NON_NEGATIVE,
    ),
    _pattern("previous_token", "previous token", "Mean attention on the previous token."),
    _pattern(
        "duplicate_token",
        "duplicate token",
        "Attention on earlier occurrences of the same token, mean over queries that see one.",
    ),
    _pattern(
        "induction",
        "induction",
        "Attention on tokens that followed earlier occurrences of the same token, mean over queries that see one.",
    ),
    _pattern(
        "retrieval",
        "retrieval",
        "Attention on occurrences of the next token of the text, mean over queries that see one: the attention of a "
        "head that copies the token.",
    ),
    Metric(
        "retrieval_argmax",
        "retrieval, top key",
        "Share of queries whose most attended key is the next token of the text; the control is a random key.",
        control="retrieval_uniform",
        control_title="random key",
        range=SHARE,
    ),
    *(
        _rank_one(
            f"rank_one_{x}",
            f"rank one of {x}",
            f"Share of the {vectors}, before rotation, in one direction; 1 if all {vectors} are parallel.",
        )
        for x, vectors in _VECTORS
    ),
    *(
        _rank_one(
            f"rank_one_{x}_centred",
            f"rank one of {x} - mean",
            f"Share of the deviations of {vectors} from their mean in one direction.",
        )
        for x, vectors in _VECTORS
    ),
    *SPREAD_METRICS,
)


class HeadsMeasurement(LayerMeasurement):
    """``wherewhat heads``."""

    name = "heads"
    swaps_keys = True
    revision = 6
    summary = "Positional and symbolic scores of every head, with attention patterns."
    config = HeadsConfig
    stored = (
        *(
            stored_metric(f"{name}{together}", categories=LABELS)
            for name in ("label_no_sink", "label")
            for together in ("", "_together")
        ),
        *(
            stored_metric(f"{name}{bound}{together}", range=SHARE)
            for name in SCORES
            for bound in ("", "_low", "_high")
            for together in ("", "_together")
            if bound or together
        ),
        *(stored_metric(f"heads_{name}_strict", range=SHARE) for name in ("positional", "symbolic")),
        stored_metric("r_behaviour", range=SHARE),
    )
    metrics = (
        _share(
            "s_pos_no_sink",
            "positional score",
            "1 if attention stays at its positions when two tokens after the sink are swapped: the head attends by "
            "position (where).",
        ),
        _share(
            "s_sym_no_sink",
            "symbolic score",
            "1 if attention follows the tokens when two of them after the sink are swapped: the head attends by "
            "content (what). Uniform attention has both scores.",
        ),
        _labelled(
            "heads_sink",
            "sink heads",
            "Heads whose attention on the first tokens exceeds that of uniform attention by the threshold.",
        ),
        _labelled(
            "heads_positional_no_sink",
            "pure positional heads",
            "Heads that are no sink and have a high positional score alone.",
        ),
        _labelled(
            "heads_symbolic_no_sink",
            "pure symbolic heads",
            "Heads that are no sink and have a high symbolic score alone.",
        ),
        _labelled(
            "heads_uniform_no_sink",
            "uniform heads",
            "Heads that are no sink and have two high scores: their attention is uniform.",
        ),
        _labelled("heads_mixed_no_sink", "mixed heads", "All other heads that are no sink."),
        _share(
            "s_pos",
            "positional, all keys",
            "The positional score with swaps of the sink as well, as in the papers. Such a swap moves the sink, "
            "attention follows it, and a sink head is called symbolic.",
        ),
        _share("s_sym", "symbolic, all keys", "The symbolic score with swaps of the sink as well, as in the papers."),
        _labelled(
            "heads_positional",
            "pure positional heads, all keys",
            "Heads with a high positional score over all keys alone; sinks are no exception.",
        ),
        _labelled(
            "heads_symbolic",
            "pure symbolic heads, all keys",
            "Heads with a high symbolic score over all keys alone; sink heads are among them.",
        ),
        _labelled("heads_uniform", "uniform heads, all keys", "Heads with two high scores over all keys."),
        _labelled("heads_mixed", "mixed heads, all keys", "All other heads by their scores over all keys."),
        Metric(
            "s_pos_logits",
            "positional, of logits",
            "The positional score from logits with equal weights for all pairs: no softmax, no temperature.",
        ),
        Metric(
            "s_sym_logits", "symbolic, of logits", "The symbolic score from logits with equal weights for all pairs."
        ),
        Metric(
            "exclusion",
            "exclusion",
            "Squared positional and symbolic deviations over the variance of logits, minimum over queries: at least 1.",
        ),
        _correlation("corr_pos_sym_no_sink", "positional ~ symbolic", "Correlation of the two scores over heads."),
        _correlation(
            "corr_pos_sym", "positional ~ symbolic, all keys", "Correlation over heads of the two scores of all keys."
        ),
        Metric(
            "mean_frequency_softmax",
            "mean frequency ID",
            "Mean rank of the RoPE planes, weighted by the softmax of the largest logit of each: 1 is the fastest.",
            control="mean_frequency_even",
            control_title="even use",
        ),
        Metric(
            "mean_frequency",
            "mean frequency ID, linear",
            "Mean rank of the RoPE planes, weighted by the largest logit of each.",
            control="mean_frequency_even",
            control_title="even use",
        ),
        *(
            _correlation(
                f"corr_{score}_frequency_softmax_no_sink",
                f"{title} ~ frequency",
                f"Correlation over heads of the {title} score with the mean frequency ID.",
            )
            for score, title in _KINDS
        ),
        *(
            _correlation(
                f"corr_{score}_{frequency}",
                f"{title} ~ frequency{linear}, all keys",
                f"Correlation over heads of the {title} score of all keys with the{linear.strip(',')} mean frequency "
                "ID.",
            )
            for frequency, linear in (("frequency_softmax", ""), ("frequency", ", linear"))
            for score, title in _KINDS
        ),
        _share("r", "r of three axes", "Correlation of logits with a[i-j] + b[i] + c[j]; see the axes measurement."),
        _share("r_a", "distance alone", "Correlation of logits with a distance curve alone."),
        _share("r_c", "key alone", "Correlation of logits with a key term alone."),
        _correlation(
            "corr_pos_distance",
            "positional ~ distance",
            "Correlation over heads of the positional score of all keys with r of the distance term.",
        ),
        _correlation(
            "corr_sym_key",
            "symbolic ~ key",
            "Correlation over heads of the symbolic score of all keys with r of the key term.",
        ),
        _correlation(
            "corr_pos_r", "positional ~ r", "Correlation over heads of the positional score of all keys with r."
        ),
        Metric(
            "effective_swaps",
            "effective number of swaps",
            "Exponential of the entropy of the swap weights, mean over queries: 1 if one swap determines both scores.",
            range=NON_NEGATIVE,
        ),
        _share(
            "swap_bound",
            "weight left out",
            "Total weight of the swaps that were not computed, maximum over queries: both scores are exact up to it.",
        ),
        _share(
            "swaps_kept",
            "swaps computed",
            "Share of the swaps that were computed, mean over queries: small unless attention is nearly uniform.",
        ),
        _share("rerun", "layers run again", "Share of layers whose keys depend on several tokens."),
        *PATTERN_METRICS,
    )
    limits = (
        "Scores are from swaps of two tokens at the chosen queries of these texts: another text, query, block size or "
        "temperature (stored as curves) gives other numbers. With a small temperature the swap weights concentrate on "
        "the pairs with the largest difference in attention, so the scores of all keys of a head with a sink describe "
        "the sink: the label and the first scores leave the first sink_tokens keys in place. Another key that draws "
        "attention whatever the query is swapped like any other. A sink head may have another role on the few queries "
        "that need it. Intervals of a head's scores are Student's over the means of documents; of "
        "a single document they are over its queries and say nothing about other texts. Intervals of the shares of "
        "sinks and of symbolic heads that are no sink are not 95 %: a few texts have many more sinks, and 3 or 4 "
        "documents without such a text do not show it. The same is true of heads with another role in few texts. "
        "Attention on a kind of token is not the effect of the head on the output."
    )

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: HeadsConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        import torch

        from wherewhat.measures.heads.scores import layer_scores

        return layer_scores(layer, torch.cat([text.ids for text in texts]), config)

    def check(self, layers: Sequence[Scores]) -> None:
        """Refuse attention that is not finite, and scores that are impossible."""
        from wherewhat.measures.heads.scores import check_layers

        check_layers(layers)

    def complete(self, subject: Subject, text: Text, scores: Scores, config: HeadsConfig) -> Scores:
        """Return the scores with those of layers that are run again."""
        from wherewhat.measures.heads.scores import complete

        return complete(subject, text.ids, scores, config)

    def pooled(self, layers: Sequence[Scores]) -> Mapping[str, float]:
        """Return correlations over heads."""
        from wherewhat.measures.heads.scores import head_correlations

        return head_correlations(layers)

    def combine(self, documents: Sequence[Scores], config: HeadsConfig) -> Scores:
        """Return scores of all documents together."""
        from wherewhat.measures.heads.scores import combine_documents

        return combine_documents(documents, config)


class AttentionMeasurement(LayerMeasurement):
    """``wherewhat attention``."""

    name = "attention"
    revision = 2
    summary = "Attention entropy, sink mass, and effective rank of queries and keys, per head."
    config = AttentionConfig
    metrics = (
        *SPREAD_METRICS,
        *(
            Metric(
                f"{x}_rank",
                f"rank of {x}",
                f"Effective rank of the {vectors}: 1 if all {vectors} are parallel. The control is Gaussian noise.",
                control="rank_gaussian",
                control_title="noise",
            )
            for x, vectors in _VECTORS
        ),
    )
    limits = (
        "Entropy and sink mass describe the attention weights, not their effect on the output; both depend on the text "
        "and its length. Effective rank counts directions, not their importance for the logits."
    )

    def measure_texts(self, layer: LayerAttention, texts: Sequence[Text], config: AttentionConfig) -> Sequence[Scores]:
        """Return the scores of each text."""
        from wherewhat.measures.attention import layer_scores

        return layer_scores(layer, config)

    def check(self, layers: Sequence[Scores]) -> None:
        """Refuse values that are not finite."""
        for layer in layers:
            for name, values in layer.heads.items():
                if not bool(values.isfinite().all()):
                    raise MeasureError(f"{name} of layer {layer.layer} is not finite: the model's activations overflow")
