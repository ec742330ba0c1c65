"""Words for the numbers of the heads measurement."""

from __future__ import annotations

from wherewhat.measure.base import Metric
from wherewhat.measure.patterns import METRICS as PATTERN_METRICS

METRICS = (
    Metric(
        "s_pos",
        "positional score",
        "",
        "1 where attention stays in its places when two tokens change theirs: the head looks at where.",
    ),
    Metric(
        "s_sym",
        "symbolic score",
        "",
        "1 where attention goes along with the tokens that change places: the head looks at what. Even attention has "
        "both.",
    ),
    Metric("heads_positional", "pure positional heads", "", "Share of heads with a high positional score alone."),
    Metric("heads_symbolic", "pure symbolic heads", "", "Share of heads with a high symbolic score alone."),
    Metric("heads_uniform", "uniform heads", "", "Share of heads with both scores high: their attention is even."),
    Metric("heads_mixed", "mixed heads", "", "Share of all other heads."),
    Metric(
        "s_pos_logits",
        "positional, of logits",
        "",
        "The positional score from logits and all pairs alike: no softmax, no temperature.",
    ),
    Metric("s_sym_logits", "symbolic, of logits", "", "The symbolic score from logits and all pairs alike."),
    Metric(
        "exclusion",
        "exclusion",
        "",
        "Squared deviations from both over the variance of logits, smallest over queries: never below 1.",
    ),
    Metric("corr_pos_sym", "positional ~ symbolic", "", "Correlation of the two scores over heads."),
    Metric(
        "mean_frequency",
        "mean frequency ID",
        "",
        "Mean rank of the RoPE planes a head uses, weighted by its largest logit from each: 1 turns fastest.",
        "mean_frequency_even",
        "even use",
    ),
    Metric("corr_pos_frequency", "positional ~ frequency", "", "Correlation over heads with the mean frequency ID."),
    Metric("corr_sym_frequency", "symbolic ~ frequency", "", "Correlation over heads with the mean frequency ID."),
    Metric("r", "r of three axes", "", "Correlation of logits with a[i-j] + b[i] + c[j]; see the axes measurement."),
    Metric("r_a", "distance alone", "", "Correlation of logits with a distance curve alone."),
    Metric("r_c", "key alone", "", "Correlation of logits with a key term alone."),
    Metric(
        "corr_pos_distance",
        "positional ~ distance",
        "",
        "Correlation over heads: do positional heads have logits made of distance.",
    ),
    Metric(
        "corr_sym_key",
        "symbolic ~ key",
        "",
        "Correlation over heads: do symbolic heads have logits made of a key term.",
    ),
    Metric("corr_pos_r", "positional ~ r", "", "Correlation over heads of the positional score with r."),
    Metric("rerun", "layers run again", "", "Share of layers whose keys are not made token by token."),
    *PATTERN_METRICS,
)

LIMITS = (
    "Scores are of swaps of two tokens at the chosen queries of these texts: another text, another query, larger "
    "blocks or another temperature (stored as curves) give other numbers. With a small temperature the weights of "
    "swaps fall on the pairs with the largest difference in attention, so a head with a sink is judged by what happens "
    "when the sink is swapped away (leave it in place with skip=1). Intervals of a head's scores are Student's "
    "over the means of documents; those of a single document are over its queries, and say nothing of other texts. "
    "Attention on a kind of token is not yet what the head does to the output."
)
