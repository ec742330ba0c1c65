"""What a plan says in sentences: what it costs, how selector and share were chosen, and whether its goal is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wherewhat.measures.statistics import Interval, in_words
from wherewhat.plans.costs import PlanOutcome
from wherewhat.plans.goals import Attempt, attempt
from wherewhat.plans.request import PlanRequest
from wherewhat.plans.selectors import SCORED


def describe_choice(auto: Sequence[Mapping[str, Any]], documents: int, tried: Sequence[Attempt] = ()) -> str:
    """Return which selector was taken, and its costs beside those of the others.

    Args:
        auto: Selectors and their costs, the one that was taken first.
        documents: Number of documents for choosing.
        tried: What was measured to reach a goal; ``auto`` are those that reach it with the smallest share.
    """
    costs = [f"{row['selector']} {with_interval(row['cost'])}" for row in auto]
    others = f"; {', '.join(costs[1:])}" if costs[1:] else ""
    where = f"on the {documents} documents for choosing, each with scores of the others"
    if not tried:
        return (
            f"The selector is {auto[0]['selector']}: rise of the loss plus lost retrieval {where}, nats: "
            f"{costs[0]}{others}."
        )
    share = min(x.share for x in tried if x.reached)
    found = {row["selector"] for row in auto}
    # Of each the largest share: where it misses the goal and another reaches it, it is not measured further.
    missed = {
        x.selector: x.share for x in sorted(tried, key=lambda x: x.share) if not (x.reached or x.selector in found)
    }
    shares = dict.fromkeys(missed.values())
    rest = "; ".join(f"{', '.join(x for x in missed if missed[x] == own)} at {own:.0%}" for own in shares)
    return (
        f"The selector is {auto[0]['selector']}: {share:.0%} is the smallest share that reaches the goal {where}; rise "
        f"of the loss plus lost retrieval with it, nats: {costs[0]}{others}."
        + (f" The goal is missed by {rest}." if rest else "")
    )


def describe_goal(
    request: PlanRequest, chosen: Attempt, own: Mapping[str, Any] | None, base: Mapping[str, Any] | None
) -> str:
    """Return whether a plan reaches the goal on the documents for measuring, and its numbers on those for choosing."""
    sentence = f"On the documents for choosing the goal is met: {chosen.in_words}"
    if own is None or base is None:
        return f"{sentence}."
    loss, found = base["loss"]["mean"], base["found"]["mean"]
    after = PlanOutcome(loss + own["rise"]["mean"], own["found"]["mean"])
    measured = attempt(request, chosen.selector, chosen.share, [PlanOutcome(loss, found)], [after])
    if request.min_found is not None and measured.part is None:
        return f"{sentence}; those for measuring have no retrieval to keep a part of: {measured.in_words}."
    verdict = "met" if measured.reached else f"missed by {measured.missed:.2g} nats"
    return f"{sentence}; on those for measuring it is {verdict}: {measured.in_words}."


def with_interval(row: Mapping[str, float | None], *, percent: bool = False) -> str:
    """Return a mean of a plan's costs in words, with its interval where it has one."""
    mean = row["mean"]
    assert mean is not None
    return in_words(Interval(mean, row["low"], row["high"], 3), percent=percent)


def better_selector(rows: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the selector that finds most at the share of ``own``, if its advantage is beyond both intervals."""

    def is_better(row: Mapping[str, Any]) -> bool:
        mine, theirs = own["part"], row["part"]
        measured = all(x is not None and x["high"] is not None for x in (mine, theirs))
        return measured and theirs["low"] > mine["high"] and row["rise"]["mean"] <= own["rise"]["mean"]

    other = [x for x in rows if x["share"] == own["share"] and x["selector"] not in (own["selector"], "random", "all")]
    # Of equal ones, one that needs no other option.
    return max(filter(is_better, other), key=lambda row: (row["part"]["mean"], row["selector"] in SCORED), default=None)


def describe_plan(
    request: PlanRequest,
    share: float,
    own: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    documents: int,
) -> str:
    """Return in one sentence or two what a plan costs and how sure that is."""
    first = f" and the first {request.sinks}" if request.sinks else ""
    choice = f"{share:.0%} of the {request.unit}s see the whole text, the others the last {request.keys}{first} keys"
    if own is None or base is None:
        others = "" if request.share is not None else " on documents that were not used for choosing"
        return f"{choice}; what this costs{others} was not measured and is unknown."
    whole = base["found"]["mean"]
    part = (
        "" if own["part"] is None else f", {with_interval(own['part'], percent=True)} of the {whole:.3f} without limits"
    )
    sure = (
        "one document has no interval, so measure more with --documents"
        if documents == 1
        else f"± is the 95 % interval over {documents} documents that were not used for choosing"
    )
    return (
        f"{choice}: on texts of {request.tokens} tokens the loss rises by {with_interval(own['rise'])} nats, and "
        f"planted sequences gain {own['found']['mean']:.3f} nats{part}; {sure}."
    )
