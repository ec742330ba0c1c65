"""``wherewhat heads``: positional and symbolic scores of every head, with attention patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wherewhat.errors import ConfigError
from wherewhat.measures.attention.measurement import SPREAD_METRICS, AttentionConfig
from wherewhat.measures.measurement import Capacity, DocumentScores, Metric, ReportRun, Subject, Text, TextMeasurement
from wherewhat.measures.swaps import TAU
from wherewhat.options import option


@dataclass(frozen=True)
class PatternConfig(AttentionConfig):
    """Options of the pattern statistics."""

    max_lag: int = option(256, "largest distance between query and key that slashes are looked for at")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        if self.max_lag < 1:
            raise ConfigError(f"max_lag is {self.max_lag}: at least 1 is needed, the previous token")


_EVEN = "even spread"
_NOISE = "noise"

PATTERN_METRICS = (
    Metric(
        "slash_max",
        "slash",
        "",
        "Mean attention at the one distance that gets the most: 1 is a head that always looks the same number of "
        "tokens back. The control is the most that even attention has at a distance.",
        "slash_max_uniform",
        _EVEN,
    ),
    Metric(
        "slash_lag",
        "distance of the slash",
        "tokens",
        "The distance back that gets the most attention; it means something where the slash is above its control.",
    ),
    Metric(
        "previous_token",
        "previous token",
        "",
        "Mean attention on the token just before.",
        "previous_token_uniform",
        _EVEN,
    ),
    Metric(
        "duplicate_token",
        "duplicate token",
        "",
        "Attention on earlier occurrences of the same token, mean over tokens that have one in sight.",
        "duplicate_token_uniform",
        _EVEN,
    ),
    Metric(
        "induction",
        "induction",
        "",
        "Attention on what came after earlier occurrences of the same token, mean over tokens that have one in sight: "
        "it came next before, so it may again.",
        "induction_uniform",
        _EVEN,
    ),
    Metric(
        "retrieval",
        "retrieval",
        "",
        "Attention on occurrences of the token that the text goes on with, mean over tokens that have one in sight: "
        "what a head attends to that copies it.",
        "retrieval_uniform",
        _EVEN,
    ),
    Metric(
        "retrieval_argmax",
        "retrieval, top key",
        "",
        "How often the most attended key is the token that the text goes on with; the control is a key at random.",
        "retrieval_uniform",
        "random key",
    ),
    Metric(
        "rank_one_q",
        "rank one of q",
        "",
        "How much of the queries, before rotation, is one direction; at 1 all tokens ask the same question.",
        "rank_one_gaussian",
        _NOISE,
    ),
    Metric(
        "rank_one_k",
        "rank one of k",
        "",
        "How much of the keys, before rotation, is one direction; at 1 all tokens look alike.",
        "rank_one_gaussian",
        _NOISE,
    ),
    Metric(
        "rank_one_q_centred",
        "rank one of q - mean",
        "",
        "How much of what sets queries apart from their mean is one direction.",
        "rank_one_gaussian",
        _NOISE,
    ),
    Metric(
        "rank_one_k_centred",
        "rank one of k - mean",
        "",
        "How much of what sets keys apart from their mean is one direction.",
        "rank_one_gaussian",
        _NOISE,
    ),
    *SPREAD_METRICS,
)


@dataclass(frozen=True)
class HeadsConfig(PatternConfig):
    """Options of the heads measurement."""

    queries: int = option(16, "number of queries, spread evenly up to the last; 1 is the last alone, 0 all")
    positions: tuple[int, ...] = option((), "positions of the queries instead; negative ones count from the end")
    tau: float = option(TAU, "temperature of the weights of swaps")
    block: int = option(1, "tokens per swapped block")
    skip: int = option(0, "leave the first so many keys where they are (attention sinks)")
    gamma: float = option(0.1, "pure is a score of at least 1 - gamma beside one of at most gamma")
    taus: tuple[float, ...] = option((1e-3, 1e-2, 1e-1), "other temperatures, to show the sensitivity")
    blocks: tuple[int, ...] = option((2, 8, 32), "other block sizes, to show the sensitivity")
    rerun: bool = option(True, "run layers once per swap whose keys are not made token by token; else leave them out")

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        super().__post_init__()
        if self.queries < 0:
            raise ConfigError(f"queries is {self.queries}: give a number of queries, or 0 for all")
        if any(tau <= 0 for tau in (self.tau, *self.taus)):
            raise ConfigError(f"tau={min((self.tau, *self.taus)):g} must be positive: it divides the weights of swaps")
        if any(block < 1 for block in (self.block, *self.blocks)):
            raise ConfigError(f"block={min((self.block, *self.blocks))}: a block has at least 1 token")
        if not 0 < self.gamma < 0.5:
            raise ConfigError(f"gamma={self.gamma:g} must be between 0 and 0.5")
        if self.skip < 0:
            raise ConfigError(f"skip={self.skip} must not be negative")


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


PAIRS = {
    "corr_pos_sym": ("s_pos", "s_sym"),
    "corr_pos_frequency": ("s_pos", "mean_frequency"),
    "corr_sym_frequency": ("s_sym", "mean_frequency"),
    "corr_pos_distance": ("s_pos", "r_a"),
    "corr_sym_key": ("s_sym", "r_c"),
    "corr_pos_r": ("s_pos", "r"),
}
"""Correlations over heads, by name."""


class HeadsMeasurement(TextMeasurement):
    """``wherewhat heads``."""

    name = "heads"
    group = "Heads"
    revision = 3
    summary = "Whether every head is positional or symbolic, beside the other things that say what it does."
    config = HeadsConfig
    figure = "plane"
    metrics = METRICS
    limits = LIMITS

    def measure(self, subject: Subject, text: Text, config: HeadsConfig) -> DocumentScores:
        """Return the scores."""
        from wherewhat.measures.heads.scores import measure_heads

        return measure_heads(subject, text.ids, config)

    def combine(self, documents: Sequence[DocumentScores], config: HeadsConfig) -> DocumentScores:
        """Return scores of all documents together."""
        from wherewhat.measures.heads.scores import combine_documents

        return combine_documents(documents, config)

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun:
        """Return how a report runs it."""
        return ReportRun(8.0, documents=4, tokens=256, controls=("random",), options={"queries": 8})
