"""The rule: statements about numbers of runs, each supported, contradicted or left open by thresholds.

Findings, captions, claims of papers, verdicts on length methods and claims about multi-hop models are made of rules. A
:class:`Rule` names what it needs, and yields statements, the numbers that these rest on, and notes. A
:class:`Statement` holds if all its tests do. A test is a :class:`Bound`, which writes its threshold into the text as
well, or the outcome of another comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from wherewhat.measures.statistics import Interval, in_brief, in_words
from wherewhat.models.source import Weights

LEAST_DOCUMENTS = 3
"""Fewest documents that a statement rests on: the spread of two is not known well enough."""

Side = Literal["at least", "at most", "less than", "above", "below", "apart from"]
_CLEAR: tuple[Side, ...] = ("above", "below", "apart from")
"""Sides of evidence for a difference, see :func:`clear`."""


@dataclass(frozen=True)
class Bound:
    """A number that must be on one side of a threshold; written as ``at least 0.9``.

    Attributes:
        value: The mean with its interval; None if there is none.
        side: The side.
        threshold: The threshold.
        least: Smallest difference to the threshold of a number that must be above, below or apart from it.
    """

    value: Interval | None
    side: Side
    threshold: float
    least: float = 0.0

    @property
    def outcome(self) -> bool | None:
        """True if the whole interval is on the stated side, False if it is on the other one.

        None if it includes the threshold, does not exist or is of fewer than :data:`LEAST_DOCUMENTS`. Above, below and
        apart from are also open if the difference is too small, or the interval has no width: equal documents are no
        evidence.
        """
        if self.value is None or self.value.low is None or self.value.high is None or self.value.n < LEAST_DOCUMENTS:
            return None
        low, high, threshold = self.value.low, self.value.high, self.threshold
        if self.side in _CLEAR and not (low < high and abs(self.value.mean - threshold) >= self.least):
            return None
        holds, fails = {
            "at least": (low >= threshold, high < threshold),
            "at most": (high <= threshold, low > threshold),
            "less than": (high < threshold, low >= threshold),
            "above": (low > threshold, high < threshold),
            "below": (high < threshold, low > threshold),
            "apart from": (high < threshold or low > threshold, False),
        }[self.side]
        return True if holds else False if fails else None

    @property
    def strength(self) -> float:
        """The difference to the threshold relative to half of the interval; infinite without an interval."""
        if self.value is None or self.value.low is None or self.value.high is None or self.value.low >= self.value.high:
            return math.inf
        return abs(self.value.mean - self.threshold) / ((self.value.high - self.value.low) / 2)

    def __format__(self, spec: str) -> str:
        """Return side and threshold in words, the threshold in a number's format."""
        return f"{self.side} {self.threshold:{spec}}"


Test = Bound | bool | None
"""A bound, or the outcome of another test; None if it is open."""


def at_least(value: Interval | None, threshold: float) -> Bound:
    """Demand an interval at or above a threshold."""
    return Bound(value, "at least", threshold)


def at_most(value: Interval | None, threshold: float) -> Bound:
    """Demand an interval at or below a threshold."""
    return Bound(value, "at most", threshold)


def less_than(value: Interval | None, threshold: float) -> Bound:
    """Demand an interval below a threshold: the opposite of :func:`at_least`."""
    return Bound(value, "less than", threshold)


def clear(value: Interval, side: Side = "apart from", reference: float = 0.0, *, least: float = 0.0) -> Bound:
    """Demand evidence for a difference to a reference, on one side or on any: the support that every sentence needs."""
    return Bound(value, side, reference, least)


def both(*tests: Test) -> bool | None:
    """Return whether all tests hold: None if none is contradicted and some are open."""
    outcomes = [test.outcome if isinstance(test, Bound) else test for test in tests]
    return False if False in outcomes else None if None in outcomes else True


def either(*tests: Test) -> bool | None:
    """Return whether any test holds: None if none does and some are open."""
    outcomes = [both(test) for test in tests]
    return True if True in outcomes else None if None in outcomes else False


def differ_by_ratio(first: Interval, second: Interval, ratio: float) -> bool:
    """Return whether the larger of two means is at least ``ratio`` times the smaller one."""
    return max(first.mean, second.mean) >= ratio * min(first.mean, second.mean)


def above_zero(value: Interval) -> bool:
    """Return whether an interval, where there is one, is above zero."""
    return value.low is None or value.low > 0


class Words(Protocol):
    """A mean in words: :func:`in_words` with its interval, or :func:`in_brief` alone."""

    def __call__(self, value: Interval, *, percent: bool = False) -> str:
        """Return the mean in words."""


class Statement:
    """A sentence and what must hold for it.

    The sentence may be a function of how means are written; it then ends without a full stop, and ``beside`` follows
    it in parentheses.

    Attributes:
        text: The sentence with intervals and what stands beside it.
        short: The sentence with rounded means alone; the same as ``text`` where that is no function.
        tests: What must hold, all of it; without tests it always holds.
        condition: Completes "holds if" where other statements of a claim do not hold.
        link: Fragment of the page that shows the evidence of a finding.
        strength: Findings are sorted by it; by default that of the first bound for evidence of a difference, or 0.
    """

    def __init__(
        self,
        text: str | Callable[[Words], str],
        *tests: Test,
        beside: str = "",
        condition: str = "",
        link: str = "",
        strength: float | None = None,
    ) -> None:
        self.text = text if isinstance(text, str) else f"{text(in_words)}{f' ({beside})' if beside else ''}."
        self.short = text if isinstance(text, str) else f"{text(in_brief)}."
        self.tests, self.condition, self.link = tests, condition, link
        clear = (test.strength for test in tests if isinstance(test, Bound) and test.side in _CLEAR)
        self.strength = next(clear, 0.0) if strength is None else strength

    @property
    def outcome(self) -> bool | None:
        """True if all tests hold, False if one does not, None if some are open."""
        return both(*self.tests)


def choose(*statements: Statement) -> Statement:
    """Return the first statement that holds, of which the last must hold always."""
    return next(statement for statement in statements if statement.outcome)


@dataclass(frozen=True)
class Number:
    """A number that statements rest on.

    Attributes:
        title: What it is.
        value: Its mean with its 95 % interval.
        control: The number to compare it with; None if there is none.
        control_title: What the control is.
    """

    title: str
    value: Interval
    control: float | None = None
    control_title: str = ""


@dataclass(frozen=True)
class Judged:
    """What a rule yields.

    Attributes:
        numbers: The numbers, most important first.
        statements: The statements.
        notes: What else a reader has to know about these numbers.
    """

    numbers: Sequence[Number] = ()
    statements: Sequence[Statement] = ()
    notes: Sequence[str] = ()


class Source(Protocol):
    """Runs or numbers by name."""

    def find(self, name: str, weights: Weights | None = None, /) -> object | None:
        """Return what has that name, on the model itself or on a control model; None if it is missing."""


S = TypeVar("S", bound=Source)

Item = Statement | Number | str
"""What a rule yields: a statement, a number or a note."""


@dataclass(frozen=True)
class Rule(Generic[S]):
    """How statements follow from runs or numbers.

    Attributes:
        judge: Yields statements, numbers and notes.
        needs: Names of the runs or numbers that it reads.
        control: Weights of the control model whose runs of these names it reads too.
        also: Names of further runs that it reads where they exist.
    """

    judge: Callable[[S], Iterable[Item]]
    needs: tuple[str, ...] = ()
    control: Weights | None = None
    also: tuple[str, ...] = ()

    def missing(self, source: S) -> str | None:
        """Return the first name in ``needs`` that the source does not have; None if it has all."""
        models = (None,) if self.control is None else (None, self.control)
        return next((name for name in self.needs for weights in models if source.find(name, weights) is None), None)

    def judged(self, source: S) -> Judged:
        """Return everything that follows from a source that has what is needed."""
        items = list(self.judge(source))
        return Judged(
            [item for item in items if isinstance(item, Number)],
            [item for item in items if isinstance(item, Statement)],
            [item for item in items if isinstance(item, str)],
        )

    def held(self, source: S) -> list[Statement]:
        """Return the statements that hold; none if the source does not have what is needed."""
        if self.missing(source) is not None:
            return []
        return [statement for statement in self.judged(source).statements if statement.outcome]
