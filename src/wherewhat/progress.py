"""Progress of long work, on a terminal, in a log, in a notebook, or nowhere; time spans and numbers in words."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from wherewhat.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

T = TypeVar("T")

Label = str | Callable[[T], str]
"""What is done with all items, or with an item."""


@runtime_checkable
class Progress(Protocol):
    """Receiver of progress messages."""

    @property
    def shown(self) -> bool:
        """Whether messages are displayed."""

    def say(self, line: str) -> None:
        """Show one line; ignore an empty one."""

    def track(self, items: Sequence[T], label: Label[T], expected: Sequence[float] | None = None) -> Iterator[T]:
        """Iterate over ``items`` and show how many are done; ``expected`` are the seconds that each will take."""

    def watch(self, work: Work) -> AbstractContextManager[None]:
        """Show a work and the time that it still takes, until the context ends."""


class Silent:
    """Progress that shows nothing."""

    shown = False

    def say(self, line: str) -> None:
        """Ignore the line."""

    def track(self, items: Sequence[T], label: Label[T], expected: Sequence[float] | None = None) -> Iterator[T]:
        """Iterate over ``items``."""
        return iter(items)

    def watch(self, work: Work) -> AbstractContextManager[None]:
        """Show nothing."""
        return nullcontext()


_PRIOR = 0.1
"""Weight of the estimate against the time taken so far, as a share of the estimated time of all steps."""
_SPREAD = 0.1
"""Time over which the time left is corrected, as a share of it."""
_TAIL = 0.25
"""Last part of a step's expected time, in which the time left falls more slowly, so that it does not end too early."""


class Work:
    """Steps one after another with their expected times: the present one, and the time that is left.

    The time left is the expected time of the steps that are not done, corrected by the ratio of the time that the
    others took to what was expected of them. The estimate has a weight of its own in that ratio, and a correction is
    spread over a tenth of the time left, which therefore does not jump. It is the progress of what is done in these
    steps.

    Attributes:
        label: What is done at present, such as "loading smollm2"; empty between steps.
        after: Expected seconds of the steps that follow those that are tracked.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self.label, self.after = "", 0.0
        self._progress, self._clock = progress, clock
        self._started = self._since = clock()
        self._expected = self._tracked = self._done = self._taken = 0.0
        self._left: tuple[float, float] | None = None  # what was left when it was last asked, and when

    @property
    def shown(self) -> bool:
        """Whether messages are displayed."""
        return self._progress.shown

    def say(self, line: str) -> None:
        """Show one line; ignore an empty one."""
        self._progress.say(line)

    def watch(self, work: Work) -> AbstractContextManager[None]:
        """Show nothing more: this work is shown."""
        del work
        return nullcontext()

    def begin(self, label: str, expected: float = 0.0, following: float | None = None) -> None:
        """End the present step and begin another.

        Args:
            label: What is done.
            expected: Seconds that it will take; 0 if that is not known.
            following: Seconds of the steps that are tracked next; unchanged by default.
        """
        now = self._clock()
        if self._expected:
            self._done, self._taken = self._done + self._expected, self._taken + now - self._since
        self.label, self._expected, self._since = label, expected, now
        self._tracked = self._tracked if following is None else following

    def track(self, items: Sequence[T], label: Label[T], expected: Sequence[float] | None = None) -> Iterator[T]:
        """Iterate over ``items``, each of which is a step."""
        seconds = list(expected or [0.0] * len(items))
        for number, item in enumerate(items):
            self.begin(label(item) if callable(label) else label, seconds[number], sum(seconds[number + 1 :]))
            yield item
        self.begin("")

    @property
    def elapsed(self) -> float:
        """Seconds since the work began."""
        return self._clock() - self._started

    @property
    def in_step(self) -> float:
        """Seconds since the present step began."""
        return self._clock() - self._since

    @property
    def total(self) -> float:
        """Expected seconds of all steps, those that are done included."""
        return self._done + self._expected + self._tracked + self.after

    @property
    def share(self) -> float:
        """Share of the work that is done, 0 to 1, by expected times."""
        whole = self._pace * self._expected
        part = 1 - _rest(whole, self.in_step) / whole if whole else 0.0
        return (self._done + part * self._expected) / self.total if self.total else 0.0

    def left(self) -> float:
        """Return the seconds until all steps are done; 0 if no time is known."""
        target, now = self.until(self._tracked + self.after), self._clock()
        if self._left is not None and self.total and target:
            before = max(0.0, self._left[0] - (now - self._left[1]))
            target = before + (target - before) * -math.expm1((self._left[1] - now) / (_SPREAD * target + 1))
        self._left = (target, now) if self.total else None
        return target

    def until(self, expected: float) -> float:
        """Return the seconds until the present step is done and so many ``expected`` seconds of others."""
        return _rest(self._pace * self._expected, self.in_step) + self._pace * expected

    @property
    def words(self) -> str:
        """The time that is left in words, the time of the present step where nothing is expected; empty at the end."""
        if not self.total:
            return f"{duration(self.in_step)} so far"
        left = self.left()
        return f"about {duration(left)} left" if left > 0.5 else ""

    @property
    def _pace(self) -> float:
        prior = _PRIOR * self.total
        return (self._taken + prior) / (self._done + prior) if prior else 1.0


def _rest(whole: float, elapsed: float) -> float:
    """Return the time left of a step: what is expected, and in its last part an exponential decay with that slope."""
    tail = _TAIL * whole
    if elapsed <= whole - tail:
        return whole - elapsed
    return tail * math.exp((whole - tail - elapsed) / tail) if tail else 0.0


_REFRESH, _SILENCE = 0.5, 10.0
"""Seconds between updates of a bar, and until a line says that a step still lasts."""
_BAR, _TIMES, _SHORTEST_LABEL = 20, 28, 10
"""Characters of a bar, of the times beside it with their spaces, and of the shortest label."""


class TerminalProgress:
    """Progress on a terminal (standard error by default), in a notebook without bars; in logs of work that lasts."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        # The stream of now: that of others is discarded while libraries load a model.
        self._console = console or Console(file=sys.stderr)
        self._watching, self._last = False, 0.0

    @property
    def shown(self) -> bool:
        """Whether the output is a terminal or a notebook, or the work is watched."""
        return self._console.is_terminal or self._console.is_jupyter or self._watching

    def say(self, line: str) -> None:
        """Show one line, unless it is empty or nobody would see it."""
        if line and self.shown:
            self._last = time.perf_counter()
            # Lines of a log are as long as they are.
            whole = not self._console.is_terminal
            self._console.print(printable(line), style="dim", markup=False, highlight=False, soft_wrap=whole)

    def track(self, items: Sequence[T], label: Label[T], expected: Sequence[float] | None = None) -> Iterator[T]:
        """Iterate over ``items`` with a progress bar and the remaining time."""
        from rich.progress import MofNCompleteColumn, TimeRemainingColumn

        del expected
        if not self._console.is_terminal and not self._watching:  # a log: lines about steps that last
            work = Work(self)
            with self.watch(work):
                yield from work.track(items, label)
            return
        with self._bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("", total=len(items))
            for item in items:
                bar.update(task, description=self._cut(label(item) if callable(label) else label))
                yield item
                bar.advance(task)

    @contextmanager
    def watch(self, work: Work) -> Iterator[None]:
        """Show a work until the context ends: one bar on a terminal; elsewhere lines, the present step after 10 s."""
        ended = threading.Event()
        with self._bar() as bar:
            show = self._lines(work) if bar.disable else self._moving(work, bar)
            thread = threading.Thread(target=_repeat, args=(show, ended), daemon=True)
            self._watching, self._last = True, time.perf_counter()
            thread.start()
            try:
                yield
            finally:
                self._watching = False
                ended.set()
                thread.join()

    def _lines(self, work: Work) -> Callable[[], None]:
        """Return a function that says what is done at present after silence."""

        def show() -> None:
            if work.label and time.perf_counter() - self._last > _SILENCE:
                self.say(": ".join(filter(None, [f"still {work.label}", work.words])))

        return show

    def _moving(self, work: Work, bar: Bar) -> Callable[[], None]:
        """Return a function that moves the bar."""
        task = bar.add_task("", total=1.0, left="")

        def show() -> None:
            bar.update(task, description=self._cut(work.label), completed=work.share, left=work.words)

        return show

    def _cut(self, label: str) -> str:
        """Return a label that leaves enough of the terminal's width to the bar and the times."""
        label, most = printable(label), max(_SHORTEST_LABEL, self._console.width - _BAR - _TIMES)
        return label if len(label) <= most else f"{label[: most - 1]}…"

    def _bar(self, *columns: ProgressColumn) -> Bar:
        """Return a bar with its label and the time since it began, that disappears in the end."""
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        last = columns or (TextColumn("{task.fields[left]}", markup=False),)
        shown = (TextColumn("{task.description}", markup=False), BarColumn(_BAR), TimeElapsedColumn(), *last)
        hidden = not self._console.is_terminal
        return Progress(*shown, console=self._console, transient=True, disable=hidden)


@contextmanager
def step(progress: Progress, label: str) -> Iterator[None]:
    """Show a step whose time is not known until the context ends, such as loading a model."""
    work = Work(progress)
    work.begin(label)
    with progress.watch(work):
        yield


def _repeat(show: Callable[[], None], ended: threading.Event) -> None:
    while not ended.wait(_REFRESH):
        show()


def duration(seconds: float) -> str:
    """Return a time span in words: ``40 s``, ``3 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def counted(count: int, word: str) -> str:
    """Return a number with its noun, such as ``2 layers``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
