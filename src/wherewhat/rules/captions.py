"""Captions: one sentence under each chart that says what it shows on this model, by rules as the findings are.

A caption states a comparison only where :func:`~wherewhat.rules.rule.clear` allows it; else it says that the numbers
do not decide, or gives the numbers alone. The first statement of a rule that holds is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wherewhat.measures.statistics import in_words
from wherewhat.rules.findings import FINDINGS
from wherewhat.rules.numbers import count_documents, mean
from wherewhat.rules.rule import LEAST_DOCUMENTS, Rule, Statement, clear
from wherewhat.runs.collection import Runs
from wherewhat.runs.results import StoredRun

_CLEAR = 0.05
"""Smallest difference of correlations and scores that is called one."""


def captions(runs: Runs) -> dict[str, str]:
    """Return the caption of each chart that is drawn, by the chart's name on the page."""
    return {name: statement.text for name, rule in CAPTIONS.items() for statement in rule.held(runs)[:1]}


def _scatter(runs: Runs) -> Iterator[Statement]:
    """Give the correlation of the two scores over heads, beside that of the untrained model."""
    run, untrained, metric = runs.run("heads"), runs.find("heads", "random"), "corr_pos_sym_no_sink"
    own, all_keys = mean(run, metric), mean(run, "corr_pos_sym")
    text = (
        f"Over heads, the positional and the symbolic score correlate by {in_words(own)} over the keys after the sink "
        f"and by {in_words(all_keys)} over all keys ({_documents(own.n)})"
    )
    if untrained is not None and mean(untrained, metric).n:
        text += f"; in one untrained model by {in_words(mean(untrained, metric))} after the sink"
    yield Statement(f"{text}.", own.n > 0)


def _distance(runs: Runs) -> Iterator[Statement]:
    """Compare the order of keys at dummy distances with that of keys with random phases."""
    run, metric, scrambled = runs.run("distance"), "key_rank_correlation", "key_rank_correlation_scrambled"
    own, control, change = mean(run, metric), mean(run, scrambled), mean(run, metric, less=scrambled)
    numbers = f"rank correlation {in_words(own)}, with random phases {in_words(control)} ({_documents(own.n)})"
    better, worse = (clear(change, side, least=_CLEAR) for side in ("above", "below"))
    yield Statement(f"The order of keys is kept better than with random phases: {numbers}.", better)
    text = (
        f"The order of keys is kept less well than with random phases: {numbers}. The phases of this model move the "
        "order of its keys."
    )
    yield Statement(text, worse)
    yield Statement(f"How well the order of keys is kept: {numbers}.", change.n > 0)


def _bands(runs: Runs) -> Iterator[Statement]:
    """Name the band whose removal costs most beyond that of random planes, if any does."""
    run = runs.run("frequencies")
    count, random = int(run.options["bands"]), "loss_without_random"
    costs = {band: mean(run, f"loss_without_band_{band}", less=random, tests=count) for band in range(1, count + 1)}
    costs = {band: cost for band, cost in costs.items() if cost.n}
    if not costs:
        return
    documents = _documents(next(iter(costs.values())).n)
    for band, cost in sorted(costs.items(), key=lambda item: -item[1].mean):
        total, control = (mean(run, name, less="loss") for name in (f"loss_without_band_{band}", random))
        yield Statement(
            f"Masking band {band} costs most: {in_words(total)} nats, against {in_words(control)} for as many random "
            f"planes ({documents}).",
            clear(cost, "above", least=_CLEAR),
        )
    yield _undecided(run)
    yield Statement(f"No band costs clearly more than as many random planes when it is masked ({documents}).")


def _by_finding(name: str, measurement: str, otherwise: str) -> Rule[Runs]:
    """Return the rule that repeats a finding, or says that there is none."""

    def judge(runs: Runs) -> Iterator[Statement]:
        yield from FINDINGS[name].held(runs)
        run = runs.run(measurement)
        yield _undecided(run)
        yield Statement(f"{otherwise} ({_documents(len(run.documents))}).")

    return Rule(judge, (measurement,))


CAPTIONS: Mapping[str, Rule[Runs]] = {
    "scatter": Rule(_scatter, ("heads",)),
    "distance": Rule(_distance, ("distance",)),
    "bands": Rule(_bands, ("frequencies",)),
    "perturbation": _by_finding(
        "perturbation", "perturb", "No perturbation raises the loss of the other tokens clearly, by 0.02 nats or more"
    ),
    "length": _by_finding(
        "length", "extend", "No method lowers the loss beyond the trained length clearly, by 0.02 nats or more"
    ),
}
"""The rules by chart."""


def _documents(count: int) -> str:
    return f"{count_documents(count)}{', too few for a comparison' if count < LEAST_DOCUMENTS else ''}"


def _undecided(run: StoredRun) -> Statement:
    counted = "One document is" if len(run.documents) == 1 else "Two documents are"
    text = f"{counted} too few to say which differences are more than chance."
    return Statement(text, len(run.documents) < LEAST_DOCUMENTS)
