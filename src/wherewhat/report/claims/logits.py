"""Claims about logits: a sum of distance, query and key terms, its origin in RoPE planes, and its limits."""

from __future__ import annotations

import math

from wherewhat.measures.statistics import Interval, interval, wilson
from wherewhat.report.claims.claim import (
    CLEAR,
    COSTLY,
    HAN,
    HIGH_R,
    ClaimNumber,
    ClaimPart,
    Evidence,
    Judged,
    at_least,
    at_most,
    both,
    claim,
    control_mean,
    document_difference,
    document_mean,
    head_means,
    model_mean,
    untrained_difference,
)
from wherewhat.runs.results import StoredRun


@claim(
    1,
    source=HAN,
    change="another threshold than 0.9, longer texts (a longer text has a lower noise floor)",
    needs=("axes",),
)
def additive(evidence: Evidence) -> Judged:
    """Logits are close to a sum of a distance, a query and a key term (correlation 0.959)."""
    run, random, shuffled = evidence.run("axes"), evidence.find("axes", "random"), evidence.find("axes", "shuffled")
    pooled, within = model_mean(run, "pooled_r"), model_mean(run, "pooled_r_within")
    mean, behaviour = document_mean(run, "r"), document_mean(run, "r_behaviour")
    numbers = [
        ClaimNumber("r pooled over all heads", pooled, model_mean(run, "pooled_r_means").mean, "means of heads alone"),
        ClaimNumber("r pooled within heads", within, control_mean(run, "noise_floor"), "noise floor"),
        ClaimNumber("mean r over heads", mean, control_mean(random, "r"), "random model"),
        ClaimNumber("mean r over heads", mean, control_mean(shuffled, "r"), "shuffled model"),
        ClaimNumber("r of behaviour", behaviour, control_mean(random, "r_behaviour"), "random model"),
        ClaimNumber("r of behaviour", behaviour, control_mean(run, "r_behaviour_gaussian"), "Gaussian q and k"),
    ]
    readings = {
        "r pooled over all heads": (pooled, "the logits of all heads are pooled, with the differences of their means"),
        "r pooled within heads": (within, "the logits of all heads are pooled, each around its mean"),
        "mean r over heads": (mean, "heads are fitted one by one"),
        "r of behaviour": (behaviour, "what softmax sees is meant, without the query term"),
    }
    parts = [
        ClaimPart(f"{title} is at least {HIGH_R}", at_least(value, HIGH_R), condition)
        for title, (value, condition) in readings.items()
    ]
    return Judged([number for number in numbers if number.control is not None], parts)


@claim(
    2,
    source=HAN,
    change="another grid of dummy distances, distances beyond the text",
    needs=("distance", "axes"),
    rotary=True,
)
def two_terms(evidence: Evidence) -> Judged:
    """The two terms f(q, d) + g(q, k) fit as well as three axes."""
    distance, axes = evidence.run("distance"), evidence.run("axes")
    shares, r = distance.document_means("additive_share"), axes.document_means("r")
    two = interval([math.sqrt(max(0.0, share)) for share in shares.values()])
    less = [math.sqrt(max(0.0, share)) - r[name] for name, share in shares.items() if name in r]
    above = document_difference(distance, "additive_share", distance, "additive_share_scrambled")
    numbers = [
        ClaimNumber(
            "r of f(q, d) + g(q, k) over dummy distances", two, document_mean(axes, "r").mean, "r of three axes"
        ),
        _against(distance, "additive_share", "additive share of the variance"),
    ]
    parts = [
        ClaimPart(
            f"r is at most {CLEAR} below that of three axes",
            at_least(interval(less), -CLEAR) if less else None,
            "only the quality of the fit counts",
        ),
        ClaimPart(
            f"the additive share is at least {CLEAR} above that of keys with random phases",
            at_least(above, CLEAR),
            "only the difference to keys with random phases counts",
        ),
    ]
    return Judged(
        numbers, parts, ["The two fits use different distances: dummy ones on a grid, and those of the text."]
    )


@claim(
    3,
    source=HAN,
    change="distances beyond the text, another control than random phases",
    needs=("distance",),
    rotary=True,
)
def dummy_distance(evidence: Evidence) -> Judged:
    """At dummy distances the key component stays and the distance component moves."""
    run = evidence.run("distance")
    stays, moves = document_mean(run, "key_rank_correlation"), document_mean(run, "distance_share")
    above = document_difference(run, "key_rank_correlation", run, "key_rank_correlation_scrambled")
    numbers = [
        _against(run, "key_rank_correlation", "rank correlation of keys with those at real distances"),
        _against(run, "shape_drift", "drift of the key component's shape"),
        _against(run, "distance_share", "share of the distance component"),
    ]
    parts = [
        ClaimPart("the rank correlation is at least 0.7", at_least(stays, 0.7), "only the order of the keys counts"),
        ClaimPart(
            f"it is at least {CLEAR} above that of keys with random phases",
            at_least(above, CLEAR),
            "the keys with random phases are the measure",
        ),
        ClaimPart(
            f"the distance component has a share of at least {CLEAR}",
            at_least(moves, CLEAR),
            "only the distance component is meant",
        ),
    ]
    return Judged(numbers, parts)


@claim(4, source=HAN, change="a tighter bound, longer texts (more planes turn)", needs=("planes",), rotary=True)
def plane_patterns(evidence: Evidence) -> Judged:
    """Queries and keys have magnitude and phase patterns in RoPE planes that make logits additive, with a bound."""
    run = evidence.run("planes")
    q, k = (document_difference(run, f"{x}_concentration", run, "random_concentration") for x in "qk")
    bounds, shares = head_means(run, "residual_bound"), head_means(run, "residual_share")
    valid = wilson([float(bounds[place] >= shares[place] - 1e-6) for place in bounds])
    useful = wilson([float(bound < 1) for bound in bounds.values()])
    random = evidence.find("planes", "random")
    numbers = [
        ClaimNumber(
            f"phase concentration of {x}",
            document_mean(run, f"{x}_concentration"),
            control_mean(random, f"{x}_concentration"),
            "random model",
        )
        for x in "qk"
    ]
    numbers += [
        ClaimNumber("share of heads on which the bound holds", valid),
        ClaimNumber("share of heads with a bound below 1", useful),
    ]
    parts = [
        ClaimPart(
            "the phase concentrations of q and k are at least 0.1 above those of random phases",
            both(at_least(q, 0.1), at_least(k, 0.1)),
            "only the pattern of phases is meant",
        ),
        ClaimPart(
            "the bound holds on all heads, and is below 1 for at least half of them",
            both(valid.mean == 1, at_least(useful, 0.5)),
            "only the bound is meant",
        ),
    ]
    return Judged(numbers, parts)


@claim(
    5,
    source=HAN,
    change="other seeds of the random model (--seed), another measure than r",
    needs=("axes",),
    also=("planes",),
)
def untrained(evidence: Evidence) -> Judged:
    """Randomly initialised models do not show it."""
    if evidence.runs.own == "random":
        return Judged([], [], ["This model is itself untrained."])
    sources = {
        "r": ("axes", "r", "additivity is measured by r"),
        "r of behaviour": ("axes", "r_behaviour", "additivity is measured by r of behaviour"),
        "phase concentration of k": ("planes", "k_concentration", "the pattern is measured by the phases of keys"),
    }
    numbers, parts = [], []
    for title, (name, metric, condition) in sources.items():
        run, random = evidence.find(name), evidence.find(name, "random")
        if run is None or random is None:
            continue
        change = untrained_difference(run, metric, random)
        numbers.append(ClaimNumber(title, document_mean(run, metric), control_mean(random, metric), "random model"))
        statement = f"{title} is at least {CLEAR} above that of a random model"
        parts.append(ClaimPart(statement, at_least(change, CLEAR), condition))
    note = "One untrained model was drawn; how much others differ is estimated from its heads."
    return Judged(numbers, parts, [note if parts else "It has no random control model."])


@claim(6, source=HAN, change="nothing about the model: it is a property of the rotation", needs=("axes",), rotary=True)
def non_additive(evidence: Evidence) -> Judged:
    """RoPE could express non-additive logits."""
    run = evidence.run("axes")
    above = document_difference(run, "r_gaussian", run, "noise_floor")
    number = ClaimNumber(
        "r of Gaussian q and k with the norms of the model",
        document_mean(run, "r_gaussian"),
        control_mean(run, "noise_floor"),
        "noise",
    )
    part = ClaimPart("r is at most 0.1 above the noise floor", at_most(above, 0.1), "")
    return Judged([number], [part], ["Gaussian q and k stand for a head that is constructed to be non-additive."])


@claim(
    21,
    source="arXiv 2509.10534",
    change="the measure: share of variance or loss; additive logits fitted without later tokens",
    needs=("residual", "axes"),
    rotary=True,
)
def entangled(evidence: Evidence) -> Judged:
    """RoPE entangles what and where (against claim 1)."""
    residual, axes = evidence.run("residual"), evidence.run("axes")
    cost = model_mean(residual, "loss_strength_0", less="loss")
    within = model_mean(axes, "pooled_r_within")
    share = Interval(1 - within.mean**2, None, None, within.n)
    if within.low is not None and within.high is not None:
        share = Interval(1 - within.mean**2, 1 - within.high**2, 1 - within.low**2, within.n)
    title = "rise of the loss with exactly additive logits"
    numbers = [
        ClaimNumber(title, cost, model_mean(residual, "cost_without_a").mean, "without distance"),
        ClaimNumber(title, cost, model_mean(residual, "cost_without_c").mean, "without key"),
        ClaimNumber("non-additive share of the variance within heads", share, 1 - HIGH_R**2, "threshold of claim 1"),
    ]
    parts = [
        ClaimPart(
            f"exactly additive logits cost at least {COSTLY} nats",
            at_least(cost, COSTLY),
            "use is measured: the loss with exactly additive logits",
        ),
        ClaimPart(
            f"the non-additive share of the variance within heads is at least {1 - HIGH_R**2:.2f}",
            at_least(share, 1 - HIGH_R**2),
            "variance of the logits is measured",
        ),
    ]
    return Judged(numbers, parts)


def _against(run: StoredRun, metric: str, title: str) -> ClaimNumber:
    """Return a metric of controlled distance with that of keys with random phases."""
    return ClaimNumber(title, document_mean(run, metric), control_mean(run, f"{metric}_scrambled"), "random phases")


CLAIMS = (additive, two_terms, dummy_distance, plane_patterns, untrained, non_additive, entangled)
