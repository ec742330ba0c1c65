"""Pattern statistics by name, and words for them."""

from __future__ import annotations

import math

from torch import Tensor

from wherewhat.measure.attention.spread import SPREAD_METRICS
from wherewhat.measure.base import Curve, Metric
from wherewhat.measure.patterns.statistics import PatternStatistics


def layer_scores(stats: PatternStatistics) -> tuple[dict[str, Tensor], dict[str, float], dict[str, Curve]]:
    """Values per head, controls and curves of one layer, as ``LayerScores`` takes them.

    Values that the text does not define, such as induction where no token comes twice, are NaN; controls that it
    does not define are left out.
    """
    slashes, rank_one = stats.slashes, stats.rank_one
    heads = {
        "slash_max": slashes.largest,
        "slash_lag": slashes.lag,
        "previous_token": stats.previous_token,
        "duplicate_token": stats.duplicate_token.mass,
        "induction": stats.induction.mass,
        "retrieval": stats.retrieval.mass,
        "retrieval_argmax": stats.retrieval.hits,
        "rank_one_q": rank_one.q,
        "rank_one_k": rank_one.k,
        "rank_one_q_centred": rank_one.q_centred,
        "rank_one_k_centred": rank_one.k_centred,
    }
    controls = {
        "slash_max_uniform": slashes.largest_uniform,
        "previous_token_uniform": stats.previous_token_uniform,
        "duplicate_token_uniform": stats.duplicate_token.uniform,
        "induction_uniform": stats.induction.uniform,
        "retrieval_uniform": stats.retrieval.uniform,
        "rank_one_gaussian": rank_one.gaussian,
    }
    controls |= stats.spread.controls()
    curves = {
        "slash": Curve(slashes.by_lag.float(), ("head", "lag")),
        "slash_uniform": Curve(slashes.uniform.float(), ("lag",)),
    }
    defined = {name: value for name, value in controls.items() if not math.isnan(value)}
    return heads | stats.spread.heads(), defined, curves


_EVEN = "even spread"
_NOISE = "noise"

METRICS = (
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
