"""The five numbers a report begins with, each beside its controls and with one sentence on how to read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from wherewhat.measure.registry import find
from wherewhat.pipeline.summary import Interval, MetricSummary, summarise
from wherewhat.report.measuring import Runs

_TWINS = {"random": "random twin", "shuffled": "shuffled twin"}


@dataclass(frozen=True)
class Value:
    """A mean under a name, with its interval over documents where there is one."""

    name: str
    value: Interval


@dataclass(frozen=True)
class Number:
    """One of the numbers.

    Attributes:
        title: What it is.
        values: The model's; two where two scores belong together.
        controls: What to read them against.
        reading: How to read it, in one sentence.
        kinds: The model's and its control models' for each kind of layer, where there are several.
    """

    title: str
    values: list[Value]
    controls: list[Value]
    reading: str
    kinds: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class _Wanted:
    title: str
    measurement: str
    metrics: tuple[tuple[str, str], ...]
    reading: str


_WANTED = (
    _Wanted(
        "Where + what: r",
        "axes",
        (("r", "r"),),
        "Correlation of every head's logits with a distance term plus a query term plus a key term; read it beside the "
        "random twin, because a high r alone does not show that anything was learned.",
    ),
    _Wanted(
        "r of behaviour",
        "axes",
        (("r_behaviour", "r of behaviour"),),
        "The same without the query term, which softmax cancels: how far the attention pattern itself is where plus "
        "what.",
    ),
    _Wanted(
        "Only the key explains",
        "axes",
        (("unique_c", "share of variance"),),
        "Share of the logits' variance that neither distance nor query can stand in for: what, regardless of where.",
    ),
    _Wanted(
        "Positional and symbolic",
        "heads",
        (("s_pos", "positional"), ("s_sym", "symbolic")),
        "When two tokens change places, a positional head keeps attending to the places (1) and a symbolic one follows "
        "the tokens (1); even attention scores 1 on both.",
    ),
    _Wanted(
        "Pure heads",
        "heads",
        (("heads_positional", "positional"), ("heads_symbolic", "symbolic")),
        "Share of heads with one of the two scores high and the other low: heads that look at where alone, or at what "
        "alone.",
    ),
)


def headline(runs: Runs) -> list[Number]:
    """The numbers that the runs hold."""
    summaries = {
        (request.measurement, str(request.model.weights)): {
            summary.metric.name: summary for summary in summarise(find(request.measurement), directory)
        }
        for request, directory in runs.finished
    }
    numbers = []
    for wanted in _WANTED:
        own = summaries.get((wanted.measurement, runs.own), {})
        twins = [
            (twin, of_twin)
            for weights, twin in _TWINS.items()
            if weights != runs.own and (of_twin := summaries.get((wanted.measurement, weights)))
        ]
        metrics = [(name, title) for name, title in wanted.metrics if name in own]
        if not metrics:
            continue
        numbers.append(
            Number(
                title=wanted.title,
                values=[Value(title, own[name].overall) for name, title in metrics],
                controls=[
                    *_floors([own[name] for name, _ in metrics]),
                    *(
                        Value(f"{twin}, {title}" if len(metrics) > 1 else twin, of_twin[name].overall)
                        for twin, of_twin in twins
                        for name, title in metrics
                        if name in of_twin
                    ),
                ],
                reading=wanted.reading,
                kinds=[
                    Value(", ".join([kind, *([title] if len(metrics) > 1 else []), *named]), found[name].kinds[kind])
                    for name, title in metrics
                    for kind in own[name].kinds
                    for named, found in [([], own), *(([twin], of_twin) for twin, of_twin in twins)]
                    if name in found and kind in found[name].kinds
                ],
            )
        )
    return numbers


def _floors(summaries: list[MetricSummary]) -> list[Value]:
    return [
        Value(summary.metric.control_title, Interval(summary.control, None, None, summary.overall.n))
        for summary in summaries
        if summary.control is not None
    ]
