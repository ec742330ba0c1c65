"""Captions: one sentence under each chart that says what it shows on this model, by rules as the findings are.

A caption states a comparison only where :func:`~wherewhat.report.findings.supports` allows it; else it says that the
numbers do not decide, or gives the numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wherewhat.measures.statistics import in_words, interval
from wherewhat.report.claims.claim import LEAST_DOCUMENTS, document_difference, document_mean, model_mean
from wherewhat.report.data import count_documents
from wherewhat.report.findings import RULES, supports
from wherewhat.report.measurements import Runs
from wherewhat.runs.results import StoredRun

_CLEAR = 0.05
"""Smallest difference of correlations and scores that is called one."""

Caption = Callable[[Runs], str | None]


def captions(runs: Runs) -> dict[str, str]:
    """Return the caption of each chart that is drawn, by the chart's name on the page."""
    found = ((name, rule(runs)) for name, rule in CAPTIONS.items())
    return {name: text for name, text in found if text is not None}


def _scatter(runs: Runs) -> str | None:
    """Give the correlation of the two scores over heads, beside that of the untrained model."""
    both = runs.weights("heads")
    metric = "corr_pos_sym_no_sink"
    if runs.own not in both or not both[runs.own].values(metric):
        return None
    own, all_keys = (model_mean(both[runs.own], name) for name in (metric, "corr_pos_sym"))
    text = (
        f"Over heads, the positional and the symbolic score correlate by {in_words(own)} over the keys after the sink "
        f"and by {in_words(all_keys)} over all keys ({_documents(own.n)})"
    )
    if "random" in both and runs.own != "random" and both["random"].values(metric):
        text += f"; in one untrained model by {in_words(model_mean(both['random'], metric))} after the sink"
    return f"{text}."


def _distance(runs: Runs) -> str | None:
    """Compare the order of keys at dummy distances with that of keys with random phases."""
    run = runs.find("distance")
    if run is None:
        return None
    own, control = (document_mean(run, f"key_rank_correlation{end}") for end in ("", "_scrambled"))
    change = document_difference(run, "key_rank_correlation", run, "key_rank_correlation_scrambled")
    if change is None or not own.n or not control.n:
        return None
    numbers = f"rank correlation {in_words(own)}, with random phases {in_words(control)} ({_documents(own.n)})"
    if not supports(change, 0.0, _CLEAR):
        return f"How well the order of keys is kept: {numbers}."
    if change.mean > 0:
        return f"The order of keys is kept better than with random phases: {numbers}."
    return (
        f"The order of keys is kept less well than with random phases: {numbers}. The phases of this model move the "
        "order of its keys."
    )


def _bands(runs: Runs) -> str | None:
    """Name the band whose removal costs most beyond that of random planes, if any does."""
    run = runs.find("frequencies")
    if run is None:
        return None
    count = int(run.options["bands"])
    costs = {
        band: interval(values, tests=count)
        for band in range(1, count + 1)
        if (values := run.values(f"loss_without_band_{band}", less="loss_without_random"))
    }
    clear = {band: cost for band, cost in costs.items() if cost.mean > 0 and supports(cost, 0.0, _CLEAR)}
    if not costs:
        return None
    documents = _documents(next(iter(costs.values())).n)
    if len(run.documents) < LEAST_DOCUMENTS:
        return _undecided(run)
    if not clear:
        return f"No band costs clearly more than as many random planes when it is masked ({documents})."
    band = max(clear, key=lambda band: clear[band].mean)
    total, random = (model_mean(run, f"loss_without_{name}", less="loss") for name in (f"band_{band}", "random"))
    return (
        f"Masking band {band} costs most: {in_words(total)} nats, against {in_words(random)} for as many random planes "
        f"({documents})."
    )


def _by_rule(rule: str, measurement: str, otherwise: str) -> Caption:
    """Return the caption that repeats a finding, or says that there is none."""

    def caption(runs: Runs) -> str | None:
        run = runs.find(measurement)
        if run is None:
            return None
        finding = RULES[rule](runs)
        if finding is not None:
            return finding.text
        return (
            _undecided(run)
            if len(run.documents) < LEAST_DOCUMENTS
            else f"{otherwise} ({_documents(len(run.documents))})."
        )

    return caption


CAPTIONS: Mapping[str, Caption] = {
    "scatter": _scatter,
    "distance": _distance,
    "bands": _bands,
    "perturbation": _by_rule(
        "perturbation", "perturb", "No perturbation raises the loss of the other tokens clearly, by 0.02 nats or more"
    ),
    "length": _by_rule(
        "length", "extend", "No method lowers the loss beyond the trained length clearly, by 0.02 nats or more"
    ),
}
"""The rules by chart."""


def _documents(count: int) -> str:
    return f"{count_documents(count)}{', too few for a comparison' if count < LEAST_DOCUMENTS else ''}"


def _undecided(run: StoredRun) -> str:
    counted = "One document is" if len(run.documents) == 1 else "Two documents are"
    return f"{counted} too few to say which differences are more than chance."
