"""Claims about logits: a sum of distance, query and key terms, its origin in RoPE planes, and its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from wherewhat.measures.statistics import Interval, interval, wilson
from wherewhat.rules.claims.claim import CLEAR, COSTLY, HAN, HIGH_R, Evidence, claim
from wherewhat.rules.numbers import control_mean, head_means, mean, over_documents, untrained_difference
from wherewhat.rules.rule import Item, Number, Statement, at_least, at_most
from wherewhat.runs.results import StoredRun


@claim(
    1,
    "axes",
    title="Logits are additive",
    source=HAN,
    change="another threshold than 0.9, longer texts (a longer text has a lower noise floor)",
)
def additive(evidence: Evidence) -> Iterator[Item]:
    """Logits are close to a sum of a distance, a query and a key term (correlation 0.959)."""
    run, random, shuffled = evidence.run("axes"), evidence.find("axes", "random"), evidence.find("axes", "shuffled")
    all_heads, within = "r pooled over all heads", "r pooled within heads"
    over_heads, behaviour = "mean r over heads", "r of behaviour"
    values = {
        all_heads: mean(run, "pooled_r"),
        within: mean(run, "pooled_r_within"),
        over_heads: mean(run, "r"),
        behaviour: mean(run, "r_behaviour"),
    }
    for title, control, control_title in (
        (all_heads, mean(run, "pooled_r_means").mean, "means of heads alone"),
        (within, control_mean(run, "noise_floor"), "noise floor"),
        (over_heads, control_mean(random, "r"), "random model"),
        (over_heads, control_mean(shuffled, "r"), "shuffled model"),
        (behaviour, control_mean(random, "r_behaviour"), "random model"),
        (behaviour, control_mean(run, "r_behaviour_gaussian"), "Gaussian q and k"),
    ):
        if control is not None:
            yield Number(title, values[title], control, control_title)
    for title, condition in (
        (all_heads, "the logits of all heads are pooled, with the differences of their means"),
        (within, "the logits of all heads are pooled, each around its mean"),
        (over_heads, "heads are fitted one by one"),
        (behaviour, "what softmax sees is meant, without the query term"),
    ):
        high = at_least(values[title], HIGH_R)
        yield Statement(f"{title} is {high}", high, condition=condition)


@claim(
    2,
    "distance",
    "axes",
    title="Two terms are enough",
    source=HAN,
    change="another grid of dummy distances, distances beyond the text",
    rotary=True,
)
def two_terms(evidence: Evidence) -> Iterator[Item]:
    """The two terms f(q, d) + g(q, k) fit as well as three axes."""
    distance, axes = evidence.run("distance"), evidence.run("axes")
    two = over_documents(distance, _root, "additive_share")
    yield Number("r of f(q, d) + g(q, k) over dummy distances", two, mean(axes, "r").mean, "r of three axes")
    yield _against_phases(distance, "additive_share", "additive share of the variance")
    shares, three = distance.document_means("additive_share"), axes.document_means("r")
    below = [three[name] - _root(share) for name, share in shares.items() if name in three]
    near = at_most(interval(below) if below else None, CLEAR)
    yield Statement(f"r is {near} below that of three axes", near, condition="only the quality of the fit counts")
    above = at_least(mean(distance, "additive_share", less="additive_share_scrambled"), CLEAR)
    statement = f"the additive share is {above} above that of keys with random phases"
    yield Statement(statement, above, condition="only the difference to keys with random phases counts")
    yield "The two fits use different distances: dummy ones on a grid, and those of the text."


@claim(
    3,
    "distance",
    title="Keys stay, distances move",
    source=HAN,
    change="distances beyond the text, another control than random phases",
    rotary=True,
)
def dummy_distance(evidence: Evidence) -> Iterator[Item]:
    """At dummy distances the key component stays and the distance component moves."""
    run = evidence.run("distance")
    yield _against_phases(run, "key_rank_correlation", "rank correlation of keys with those at real distances")
    yield _against_phases(run, "shape_drift", "drift of the key component's shape")
    yield _against_phases(run, "distance_share", "share of the distance component")
    stays = at_least(mean(run, "key_rank_correlation"), 0.7)
    yield Statement(f"the rank correlation is {stays}", stays, condition="only the order of the keys counts")
    above = at_least(mean(run, "key_rank_correlation", less="key_rank_correlation_scrambled"), CLEAR)
    statement = f"it is {above} above that of keys with random phases"
    yield Statement(statement, above, condition="the keys with random phases are the measure")
    moves = at_least(mean(run, "distance_share"), CLEAR)
    statement = f"the distance component has a share of {moves}"
    yield Statement(statement, moves, condition="only the distance component is meant")


@claim(
    4,
    "planes",
    title="Phases explain additivity",
    source=HAN,
    change="a tighter bound, longer texts (more planes turn)",
    rotary=True,
)
def plane_patterns(evidence: Evidence) -> Iterator[Item]:
    """Queries and keys have magnitude and phase patterns in RoPE planes that make logits additive, with a bound."""
    run, random = evidence.run("planes"), evidence.find("planes", "random")
    for x in "qk":
        metric = f"{x}_concentration"
        yield Number(f"phase concentration of {x}", mean(run, metric), control_mean(random, metric), "random model")
    bounds, shares = head_means(run, "residual_bound"), head_means(run, "residual_share")
    valid = wilson([float(bounds[place] >= shares[place] - 1e-6) for place in bounds])
    useful = wilson([float(bound < 1) for bound in bounds.values()])
    yield Number("share of heads on which the bound holds", valid)
    yield Number("share of heads with a bound below 1", useful)
    q, k = (at_least(mean(run, f"{x}_concentration", less="random_concentration"), 0.1) for x in "qk")
    statement = f"the phase concentrations of q and k are {q} above those of random phases"
    yield Statement(statement, q, k, condition="only the pattern of phases is meant")
    statement = "the bound holds on all heads, and is below 1 for at least half of them"
    yield Statement(statement, valid.mean == 1, at_least(useful, 0.5), condition="only the bound is meant")


@claim(
    5,
    "axes",
    title="Not in untrained models",
    source=HAN,
    change="other seeds of the random model (--seed), another measure than r",
    also=("planes",),
    drawn=True,
)
def untrained(evidence: Evidence) -> Iterator[Item]:
    """Randomly initialised models do not show it."""
    if evidence.runs.own == "random":
        yield "This model is itself untrained."
        return
    note = "It has no random control model."
    for title, name, metric, condition in (
        ("r", "axes", "r", "additivity is measured by r"),
        ("r of behaviour", "axes", "r_behaviour", "additivity is measured by r of behaviour"),
        ("phase concentration of k", "planes", "k_concentration", "the pattern is measured by the phases of keys"),
    ):
        run, random = evidence.find(name), evidence.find(name, "random")
        if run is not None and random is not None:
            yield Number(title, mean(run, metric), control_mean(random, metric), "random model")
            above = at_least(untrained_difference(run, metric, random), CLEAR)
            yield Statement(f"{title} is {above} above that of a random model", above, condition=condition)
            note = "One untrained model was drawn; how much others differ is estimated from its heads."
    yield note


@claim(
    6,
    "axes",
    title="RoPE can be non-additive",
    source=HAN,
    change="nothing about the model: it is a property of the rotation",
    rotary=True,
)
def non_additive(evidence: Evidence) -> Iterator[Item]:
    """RoPE could express non-additive logits."""
    run = evidence.run("axes")
    title = "r of Gaussian q and k with the norms of the model"
    yield Number(title, mean(run, "r_gaussian"), control_mean(run, "noise_floor"), "noise")
    above = at_most(mean(run, "r_gaussian", less="noise_floor"), 0.1)
    yield Statement(f"r is {above} above the noise floor", above)
    yield "Gaussian q and k stand for a head that is constructed to be non-additive."


@claim(
    21,
    "residual",
    "axes",
    title="RoPE entangles what/where",
    source="arXiv 2509.10534",
    change="the measure: share of variance or loss; additive logits fitted without later tokens",
    rotary=True,
)
def entangled(evidence: Evidence) -> Iterator[Item]:
    """RoPE entangles what and where (against claim 1)."""
    residual, axes = evidence.run("residual"), evidence.run("axes")
    cost, within = mean(residual, "loss_strength_0", less="loss"), mean(axes, "pooled_r_within")
    low, high = (None if r is None else 1 - r**2 for r in (within.high, within.low))
    share = Interval(1 - within.mean**2, low, high, within.n)
    for part, title in (("a", "without distance"), ("c", "without key")):
        control = mean(residual, f"cost_without_{part}").mean
        yield Number("rise of the loss with exactly additive logits", cost, control, title)
    yield Number("non-additive share of the variance within heads", share, 1 - HIGH_R**2, "threshold of claim 1")
    costly, large = at_least(cost, COSTLY), at_least(share, 1 - HIGH_R**2)
    condition = "use is measured: the loss with exactly additive logits"
    yield Statement(f"exactly additive logits cost {costly} nats", costly, condition=condition)
    statement = f"the non-additive share of the variance within heads is {large:.2f}"
    yield Statement(statement, large, condition="variance of the logits is measured")


def _root(share: float) -> float:
    return math.sqrt(max(0.0, share))


def _against_phases(run: StoredRun, metric: str, title: str) -> Number:
    """Return a metric of controlled distance with that of keys with random phases."""
    return Number(title, mean(run, metric), control_mean(run, f"{metric}_scrambled"), "random phases")


CLAIMS = (additive, two_terms, dummy_distance, plane_patterns, untrained, non_additive, entangled)
