"""Captions: one sentence under each chart that says what it shows on this model, by rules as the findings are.

A caption states a comparison only where :func:`~wherewhat.rules.rule.clear` allows it; else it says that the numbers
do not decide, or gives the numbers alone. The first statement of a rule that holds is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from wherewhat.measures.statistics import in_words, interval
from wherewhat.rules.findings import FINDINGS
from wherewhat.rules.numbers import count_documents, mean, negative
from wherewhat.rules.rule import LEAST_DOCUMENTS, Rule, Statement, clear
from wherewhat.runs.collection import Runs
from wherewhat.runs.results import StoredRun

_CLEAR = 0.05
"""Smallest difference of correlations and scores that is called one."""


def captions(runs: Runs) -> dict[str, str]:
    """Return the caption of each chart that is drawn, by the chart's name on the page."""
    return {name: statement.text for name, rule in CAPTIONS.items() for statement in rule.held(runs)[:1]}


def additive_price(runs: Runs) -> str:
    """Return what exactly additive logits cost, in a sentence with its control; empty if it was not measured."""
    return next((statement.text for statement in PRICE.held(runs)), "")


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


def _price(runs: Runs) -> Iterator[Statement]:
    """Give the loss with exactly additive logits, and with noise of the same size added to the logits instead."""
    run = runs.other("residual") or runs.find("residual")
    if run is None:
        return
    before, after, noise = (run.values(name) for name in ("loss", "loss_strength_0", "loss_noise"))
    count = len(before)
    if not before or count != len(after):
        return
    text = f"With exactly additive logits the loss {_change(before, after)}"
    if len(noise) != count:
        text += "; a control was not measured"
    else:
        changed = _change(before, noise) if count > 1 else f"is {noise[0]:.2f}"
        text += f"; with noise of the same size added to the logits instead, it {changed}"
    size = f"{count_documents(count)} of {run.directory.config['tokens']} tokens"
    yield Statement(f"{text} ({size}{', no interval' if count == 1 else ''}).")


PRICE: Rule[Runs] = Rule(_price)
"""The rule of the sentence beside the share of variance that additive logits explain."""

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


def _change(before: Sequence[float], after: Sequence[float]) -> str:
    """Return a change of the loss in words, with the interval of the difference where there are several documents."""
    start, end = (f"{sum(values) / len(values):.2f}" for values in (before, after))
    change = interval([y - x for x, y in zip(before, after, strict=True)])
    if change.low is None or change.high is None:
        verb = "rises" if float(end) > float(start) else "falls"
        return f"stays at {end} nats" if start == end else f"{verb} from {start} to {end} nats"
    verb = "changes" if change.low <= 0 <= change.high else "rises" if change.mean > 0 else "falls"
    return f"{verb} by {in_words(negative(change) if verb == 'falls' else change)} nats, from {start} to {end}"


def _documents(count: int) -> str:
    return f"{count_documents(count)}{', too few for a comparison' if count < LEAST_DOCUMENTS else ''}"


def _undecided(run: StoredRun) -> Statement:
    counted = "One document is" if len(run.documents) == 1 else "Two documents are"
    text = f"{counted} too few to say which differences are more than chance."
    return Statement(text, len(run.documents) < LEAST_DOCUMENTS)
