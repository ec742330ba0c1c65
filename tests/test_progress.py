"""Identity: the time that is left; and what is shown of a work on a terminal and in a log."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import threading
import time

import pytest
from rich.console import Console

from wherewhat import progress
from wherewhat.progress import Silent, TerminalProgress, Work, step


class Clock:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def passed(expected, taken, *, step=0.5):
    """Do steps that take other times than expected; return the time left and the share done, at regular times."""
    clock = Clock()
    work, seen = Work(Silent(), clock), []
    for number in work.track(range(len(taken)), str, expected):
        end = clock.now + taken[number]
        while clock.now < end:
            seen.append((clock.now, work.left(), work.share))
            clock.now += step
    return clock.now, seen, work


def test_with_a_true_estimate_the_time_left_is_what_is_left():
    total, seen, work = passed([10.0] * 6, [10.0] * 6)
    assert all(abs(now + left - total) < 1.0 for now, left, _ in seen)  # it falls more slowly in the end of a step
    assert work.left() == 0
    assert work.share == 1


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_wrong_estimate_is_corrected_without_a_jump(factor):
    times = [4.0, 12.0, 7.0, 3.0, 20.0, 5.0, 9.0, 10.0]
    total, seen, _ = passed(times, [factor * time for time in times])
    half = [(now, left) for now, left, _ in seen if now > total / 2]
    assert all(abs(now + left - total) < 0.3 * (total - now) + 1.5 for now, left in half)
    for (_, before, done), (_, left, then) in itertools.pairwise(seen):
        assert abs(before - left) < 2
        assert then >= done - 0.01


def test_steps_of_unknown_length_do_not_count():
    clock = Clock()
    work = Work(Silent(), clock)
    work.begin("loading")
    clock.now = 30.0
    assert work.words == "30 s so far"
    work.after = 40.0
    work.begin("reading", following=110.0)
    assert work.left() == 150
    for _ in work.track([1, 2], "measuring", [50.0, 60.0]):
        assert (work.left(), work.until(20.0), work.total) == (150.0, 70.0, 150.0)
        break
    assert work.words == "about 2 min left"


def test_a_log_has_lines_while_work_is_watched_and_never_long_silence(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH", 0.001)
    monkeypatch.setattr(progress, "_SILENCE", 0.0)
    file = io.StringIO()
    shown = TerminalProgress(Console(file=file, width=20))
    work = Work(shown)
    shown.say("before")
    with shown.watch(work):
        work.say("a line that is longer than the width of the console")
        work.begin("measuring axes", 40.0)
        while "still" not in file.getvalue():
            pass
    assert not any("_repeat" in thread.name for thread in threading.enumerate())
    shown.say("after")
    first, *others = file.getvalue().splitlines()
    assert first == "a line that is longer than the width of the console"
    assert set(others) == {"still measuring axes: about 40 s left"}


def test_a_log_has_lines_about_items_and_steps_that_last(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH", 0.01)
    monkeypatch.setattr(progress, "_SILENCE", 0.0)
    file = io.StringIO()
    shown = TerminalProgress(Console(file=file, width=60))
    for item in shown.track(["a", "b"], lambda name: f"scores of {name}"):
        while f"still scores of {item}" not in file.getvalue():
            time.sleep(0.01)
    with step(shown, "loading"):
        while "still loading" not in file.getvalue():
            time.sleep(0.01)
    written = file.getvalue()
    shown.say("a line of unwatched work")
    assert file.getvalue() == written
    assert list(shown.track([], "nothing")) == []


def test_a_terminal_has_one_bar(monkeypatch):
    monkeypatch.setattr(progress, "_REFRESH", 0.001)
    file = io.StringIO()
    shown = TerminalProgress(Console(file=file, force_terminal=True, width=100))
    work = Work(shown)
    with shown.watch(work):
        for _ in work.track([1, 2], "measuring axes", [30.0, 10.0]):
            while "about 40 s left" not in file.getvalue():
                pass
        work.say("1 of 2 ended")
    assert "measuring axes" in file.getvalue()
    assert "1 of 2 ended" in file.getvalue()
    assert "still" not in file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_long_label_leaves_room_for_the_time(width, monkeypatch):
    monkeypatch.setattr("wherewhat.progress._REFRESH", 0.01)
    stream = io.StringIO()
    shown = TerminalProgress(Console(file=stream, force_terminal=True, width=width, color_system=None))
    work = Work(shown)
    work.begin(f"measuring {'axes and heads of a model ' * 4}", 30, 60)
    with shown.watch(work):
        time.sleep(0.3)
    assert re.search(r"measuring a.* 0:00:00 about \d\d s left", stream.getvalue())


def test_a_log_has_lines_while_the_output_of_libraries_is_discarded(capsys):
    shown = TerminalProgress()
    with shown.watch(Work(shown)), contextlib.redirect_stderr(io.StringIO()):
        shown.say("loading")
    assert capsys.readouterr().err == "loading\n"
