"""Views: how measurements look in a report, in a terminal and as a figure, by name; with a default for any other.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherewhat.lengths import find_method
from wherewhat.measures.frequencies import BANDS
from wherewhat.measures.measurement import (
    ChoicesMeasurement,
    Control,
    LayerMeasurement,
    Measurement,
    QuestionMeasurement,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from wherewhat.measures.statistics import Interval
    from wherewhat.rules.length_methods import ComparisonTable
    from wherewhat.runs.results import StoredRun


@dataclass(frozen=True)
class Capacity:
    """Properties of a model and its texts that decide what a report measures.

    Attributes:
        trained: Tokens of the texts that the model was trained on; None if unknown.
        hard_limit: Whether the model cannot compute positions beyond its table of positions.
        planes: Smallest number of planes in a layer that rotates; 0 if none rotates.
        shortest: Tokens of the shortest text.
    """

    trained: int | None
    hard_limit: bool
    planes: int
    shortest: int

    @property
    def rotates(self) -> bool:
        """Whether any layer rotates its queries and keys."""
        return self.planes > 0


@dataclass(frozen=True)
class ReportRun:
    """How a report runs a measurement.

    Attributes:
        passes: Wall time relative to one forward pass over the same tokens, both on two cores with two threads
            (``benchmarks/report.py``): a pass uses them better than most of what is computed from it.
        documents: Largest number of documents; None for no limit.
        tokens: Largest number of tokens of each; None likewise.
        controls: Control models to run it on as well.
        options: Options that differ from the measurement's defaults.
        beyond: Whether texts are longer than the trained length.
    """

    passes: float
    documents: int | None = None
    tokens: int | None = None
    controls: tuple[Control, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    beyond: bool = False


@dataclass(frozen=True)
class View:
    """How a measurement is shown.

    Attributes:
        group: Panel of ``wherewhat --help`` that lists it.
        page: Name of its documentation page, without ``.md``; None for its own name.
        figure: Name of the default figure.
        over: What the means in a table are taken over.
        report: How a report runs it, or a function that decides by the model and the tokens of each text and may return
            in one line why this model's report is without it; None leaves it out of all reports without a word.
        draw: Function that returns a Plotly figure of a finished run, in place of ``figure``.
        compare: Function from means with intervals, by metric, and options to the alternatives that a run compares,
            with verdicts; ``more_metrics`` are then shown only there.
    """

    group: str = "Measurements"
    page: str | None = None
    figure: str = "map"
    over: str = "mean over heads and documents"
    report: ReportRun | Callable[[Capacity, int], ReportRun | str] | None = None
    draw: Callable[[StoredRun], Figure] | None = None
    compare: Callable[[Mapping[str, Interval], Any], ComparisonTable] | None = None

    def report_run(self, capacity: Capacity, *, tokens: int) -> ReportRun | str | None:
        """Return how a report runs it on texts of ``tokens`` tokens, or why this model's report is without it."""
        return self.report(capacity, tokens) if callable(self.report) else self.report


_REPORTED = ("none", "sliding-window", "streaming-llm", "lm-infinite", "yarn")
_BEYOND = 4
"""Length of a report's text in trained lengths."""
_LONGEST = 2048
"""Largest number of tokens of a report's text."""
_THREE_PLANTED = 32
"""Smallest trained length in which three sequences can be planted."""


def _beyond_trained(capacity: Capacity, tokens: int) -> ReportRun | str:
    """Return a length curve beyond the trained length, or why there is none.

    Texts of up to four trained lengths are run if twice ``tokens`` are at least two of them. Shorter ones show
    little of a model made for longer ones.
    """
    trained, most = capacity.trained, min(2 * tokens, capacity.shortest, _LONGEST)
    if trained is None:
        return "the model does not state its trained length; state it with wherewhat extend MODEL --set trained=N"
    if capacity.hard_limit:
        return f"the model accepts no more than {trained} tokens"
    if most < 2 * trained:
        return (
            f"the page's texts are too short to show what happens beyond the trained length of {trained} tokens; "
            f"measure longer ones with wherewhat extend MODEL --tokens {2 * trained} --beyond --text FILE"
        )
    methods = tuple(name for name in _REPORTED if capacity.rotates or not find_method(name).rotary)
    options: dict[str, Any] = {"methods": methods, "depths": (0,), "run": 2}
    if trained >= _THREE_PLANTED:
        options |= {"depths": (0, 50, 100), "run": max(2, min(16, trained // 16))}
    length = min(_BEYOND * trained, most)
    return ReportRun(3 + 5.5 * len(methods), documents=3, tokens=length, options=options, beyond=True)


def _verdicts(estimates: Mapping[str, Interval], config: Any) -> ComparisonTable:
    """Return the verdict on each length method."""
    from wherewhat.rules.length_methods import compare_methods

    return compare_methods(estimates, config.methods)


def _few_bands(capacity: Capacity, tokens: int) -> ReportRun:
    """Return a run with no more bands than there are planes."""
    del tokens
    options = {"bands": capacity.planes} if 0 < capacity.planes < BANDS else {}
    return ReportRun(33.0, documents=3, tokens=128, options=options)


_WORDS = {
    "kinds": ("words", "position_jitter"),
    "rates": (0.01, 0.05, 0.1, 0.2, 0.5),
    "seeds": 1,
    "axes": False,
    "equivalence": False,
}
_ADDITIVE = {"strengths": (0.0, 1.0), "layers": False, "axes": False}
_PARTS, _HEADS, _BEHAVIOUR = "Decomposition", "Heads", "Behaviour"

VIEWS: dict[str, View] = {
    "axes": View(_PARTS, report=ReportRun(1.9, controls=("random", "shuffled"))),
    "distance": View(_PARTS, "controlled-distance", report=ReportRun(8.0, documents=1, tokens=256)),
    "planes": View(_PARTS, report=ReportRun(5.0, documents=1, tokens=256)),
    "residual": View(_PARTS, report=ReportRun(7.0, documents=1, tokens=256, options=_ADDITIVE)),
    "split": View(_PARTS),
    "heads": View(
        _HEADS,
        figure="plane",
        report=ReportRun(10.0, documents=4, tokens=256, controls=("random",), options={"queries": 8}),
    ),
    "removal": View(_HEADS),  # half a pass for every head is more than a tenth of a report
    "frequencies": View(_HEADS, report=_few_bands),
    "attention": View(_HEADS),  # a report has the same numbers from heads
    "prompts": View(_BEHAVIOUR, over="mean over prompts"),
    "perturb": View(_BEHAVIOUR, figure="rates", report=ReportRun(15.0, documents=3, tokens=256, options=_WORDS)),
    "choices": View(_BEHAVIOUR, "evaluate", over="mean over items"),
    "extend": View(_BEHAVIOUR, figure="positions", report=_beyond_trained, compare=_verdicts),
}
"""Views of measurements by name."""

GROUPS = (_PARTS, _HEADS, _BEHAVIOUR)
"""Panels of the help with measurements; those of other packages follow."""


def view_of(measurement: Measurement) -> View:
    """Return the view of a measurement: its own, or a default for what it is measured on."""
    if measurement.name in VIEWS:
        return VIEWS[measurement.name]
    over = {QuestionMeasurement: "mean over prompts", ChoicesMeasurement: "mean over items"}
    means = next((words for kind, words in over.items() if isinstance(measurement, kind)), View.over)
    run = ReportRun(2.0, documents=1) if isinstance(measurement, LayerMeasurement) else None
    return View(over=means, report=run)


def register_view(name: str, view: View) -> None:
    """Set how the measurement of a name is shown, in place of the default."""
    VIEWS[name] = view
