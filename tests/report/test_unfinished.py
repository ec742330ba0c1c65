"""End-to-end: pages of a report while it is measured, and when it is killed."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from helpers.command_line import command_process
from helpers.report import TOKENS, drawn, opening, until
from wherewhat.errors import MeasureError
from wherewhat.report import report as reporting
from wherewhat.report.page import waiting_page
from wherewhat.report.report import make_report
from wherewhat.runs.request import ModelRequest

TIMES = ("created", "finished", "seconds")


def stored(html, name="data"):
    """Data of a page, which must be whole."""
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)[1])


def without_times(html):
    """Everything that a page shows, without the times at which runs were made."""
    data = stored(html)
    for model in data["models"]:
        for run in model["runs"]:
            for name in TIMES:
                del run["provenance"][name]
    return data, stored(html, "figures")


@pytest.fixture(scope="module")
def pages(hostile_model, made, tmp_path_factory):
    """All pages of a report, one after each measurement, and the folder of its runs."""
    out, written = tmp_path_factory.mktemp("pages") / "runs", []
    with pytest.MonkeyPatch.context() as patch:
        write = reporting.write_page
        patch.setattr(reporting, "_PAGES_SHARE", math.inf)
        patch.setattr(
            reporting, "write_page", lambda path, page, **more: written.append(page) or write(path, page, **more)
        )
        request = ModelRequest(model=hostile_model, device="cpu")
        report = make_report(request, out=out, files=[str(made.text)], tokens=TOKENS, write=True)
    assert (out / f"{report.name}.html").read_text("utf-8") == written[-1]
    return out, written


def test_a_page_waits_and_others_follow_each_measurement(pages):
    _, (waiting, *unfinished, _) = pages
    assert "tiny" in waiting
    assert "<b onclick" not in waiting
    assert len(unfinished) == 10
    for number, page in enumerate(unfinished, 1):
        data = stored(page)
        state, (model,) = data["unfinished"], data["models"]
        assert (state["done"], state["count"], len(state["coming"])) == (number, 11, 11 - number)
        assert len(model["runs"]) == number
        assert [run["seconds"] for run in state["coming"]] == sorted(run["seconds"] for run in state["coming"])
    names = [run["name"] for run in stored(unfinished[0])["unfinished"]["coming"]]
    assert names[0] == "heads"
    weights = [run["weights"] for run in stored(unfinished[0])["unfinished"]["coming"]]
    assert weights == sorted(weights, key=["trained", "random", "shuffled"].index)


def test_the_last_page_is_that_of_a_report_without_others(pages, hostile_model, made):
    """Brute force: the same bytes as of a report that collects all runs at once."""
    out, (*_, last) = pages
    request = ModelRequest(model=hostile_model, device="cpu")
    again = make_report(request, out=out, files=[str(made.text)], tokens=TOKENS)
    assert again.html() == last
    assert "unfinished" not in again.data
    assert without_times(last) == without_times(made.path.read_text("utf-8"))


def test_pages_cost_a_small_part_of_the_time(hostile_model, made, tmp_path, monkeypatch):
    """Pages after the first one wait for twenty times what a page took."""
    written = []
    monkeypatch.setattr(reporting, "write_page", lambda path, page, **more: written.append(page))
    ticks = iter(range(10**6))
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: float(next(ticks)))
    request = ModelRequest(model=hostile_model, device="cpu")
    make_report(request, out=tmp_path, files=[str(made.text)], tokens=TOKENS, write=True)
    assert 2 < len(written) < 12


def test_quick_is_small_and_explicit_options_win(hostile_model, made, tmp_path, monkeypatch):
    sizes = []

    def measured(model, inputs, pages, *, tokens, quick, **options):
        sizes.append((len(inputs.documents), tokens, quick))
        raise MeasureError("this is enough")

    monkeypatch.setattr(reporting, "_measured", measured)
    few = {"documents": 1}, {"tokens": 64}, {"texts": ["a text that is alone"]}
    for options in ({}, {"quick": True}, *({"quick": True, **more} for more in few)):
        with pytest.raises(MeasureError):
            make_report(ModelRequest(model=hostile_model), out=tmp_path, **options)
    assert sizes == [(4, 512, False), (2, 128, True), (1, 128, True), (2, 64, True), (1, 128, True)]


@pytest.mark.slow
def test_a_quick_report_in_a_pipe(hostile_model, made, tmp_path, cli):
    words = ["report", hostile_model, "--text", made.text, "--quick", "--device", "cpu", "--tokens", TOKENS]
    done = cli(*words, "--documents", 1, "--out", tmp_path / "runs")
    assert done.code == 0, done.err
    path = Path(done.out.splitlines()[-1])
    assert done.err.startswith(f"the page: {path};")
    (model,) = stored(path.read_text("utf-8"))["models"]
    assert {run["config"]["weights"] for run in model["runs"]} == {"trained", "random"}
    assert (model["model"]["documents"], model["model"]["tokens"]) == (1, TOKENS)
    assert "--quick" in stored(path.read_text("utf-8"))["command"]
    assert re.search(r"^1 of 10: axes \(trained\) ended after \d+ s; about", done.err, re.M), done.err


def test_an_error_leaves_no_page(hostile_model, made, tmp_path, cli):
    done = cli("report", hostile_model, "--text", made.text, "--tokens", 99, "--out", tmp_path / "new" / "runs")
    assert done.code == 2
    assert not (tmp_path / "new").exists()


def test_an_error_leaves_the_page_of_another_process(hostile_model, tmp_path, monkeypatch):
    def measured(*arguments, **options):
        (path,) = tmp_path.glob("*.html")
        path.write_text("a page of the same report")
        raise MeasureError("this is enough")

    monkeypatch.setattr(reporting, "_measured", measured)
    with pytest.raises(MeasureError):
        make_report(ModelRequest(model=hostile_model), out=tmp_path, write=True)
    assert [path.read_text() for path in tmp_path.glob("*.html")] == ["a page of the same report"]


def test_marks_in_the_name_of_a_model_are_kept():
    page = waiting_page(["{{STYLE}} <b>"])
    assert "<h1>Where and what in {{STYLE}} &lt;b&gt;</h1>" in page
    assert "<style>{{" not in page


# Killed


MOMENTS = range(1, 61, 3)
"""Numbers of files that a report writes under a temporary name and is about to give their own."""


def report_words(made, hostile_model, folder):
    given = ("--text", made.text, "--tokens", TOKENS, "--out", folder / "runs", "--device", "cpu")
    return ["report", hostile_model, *given]


@pytest.fixture
def words(made, hostile_model, tmp_path):
    return report_words(made, hostile_model, tmp_path)


def process_with_signals(words, processes, folder, numbers, which):
    """The command, which gets a signal before it gives files with some numbers their names."""
    given = {"out": folder / "out", "err": folder / "err", "signal_at": (numbers, which), "before": "renaming"}
    return command_process(processes, words, **given)


def is_stopped(process):
    """Whether all threads are stopped."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


@pytest.fixture(scope="module")
def moments(made, hostile_model, processes, tmp_path_factory):
    """Copies of the folder of a report at twenty moments, at which all of its threads are stopped.

    A process that is killed at that moment leaves the same files.
    """
    if not Path("/proc/self/task").exists():
        pytest.skip("needs the threads of a process in /proc")
    folder = tmp_path_factory.mktemp("killed")
    words = report_words(made, hostile_model, folder)
    process = process_with_signals(words, processes, folder, MOMENTS, signal.SIGSTOP)
    for number in MOMENTS:
        while not is_stopped(process):
            assert process.is_alive(), f"ended before moment {number}"
            time.sleep(0.01)
        shutil.copytree(folder / "runs", folder / str(number) / "runs")
        os.kill(process.pid, signal.SIGCONT if number != MOMENTS[-1] else signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return folder


def page_in(folder):
    (page,) = (folder / "runs").glob("report-*.html")
    return page


def assert_whole(page):
    html = page.read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    if 'http-equiv="refresh"' not in html:
        stored(html)
        stored(html, "figures")


def assert_resumed(words, cli, made):
    done = cli(*words)
    assert done.code == 0, done.err
    page = Path(done.out.splitlines()[-1]).read_text("utf-8")
    assert without_times(page) == without_times(made.path.read_text("utf-8"))


def test_killed_while_a_page_is_written(made, words, cli, processes, tmp_path):
    process = process_with_signals(words, processes, tmp_path, [10], signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_whole(page_in(tmp_path))
    assert_resumed(words, cli, made)


@pytest.mark.slow
@pytest.mark.parametrize("number", MOMENTS)
def test_killed_at_twenty_moments(made, words, cli, moments, tmp_path, number):
    shutil.copytree(moments / str(number) / "runs", tmp_path / "runs")
    assert_whole(page_in(tmp_path))
    if number % 2:  # every second moment
        assert_resumed(words, cli, made)


@pytest.mark.slow
def test_pages_of_twenty_moments_open_without_an_error(moments, browser):
    for number in MOMENTS:
        page = page_in(moments / str(number))
        if 'http-equiv="refresh"' not in page.read_text("utf-8"):
            with opening(browser, page):
                pass


@pytest.mark.slow
def test_each_page_opens_without_an_error(pages, browser, tmp_path):
    """The bar says how far the report is; sections to come say so; the last page has neither."""
    _, (_, *unfinished, last) = pages
    path = tmp_path / "page.html"
    for number, html in enumerate(unfinished, 1):
        path.write_text(html, "utf-8")
        with opening(browser, path) as page:
            assert f"{number} of 11 measurements" in page.locator("#unfinished").inner_text()
            to_come = " ".join(page.locator(".to-come").all_inner_texts())
            assert ("perturb at about" in to_come) == (number < 7)
            assert "axes of the shuffled control at about" in to_come
            drawn(page, "map", "range", "curve")
            page.locator("#head").select_option("3")
            until(page, "location.hash.includes('head=L0H3') || location.hash.includes('head=L1H3')")
            name = page.locator("#h-panel").inner_text()
            with page.expect_navigation():
                page.locator("#unfinished button").click()
            page.wait_for_selector("html[data-ready=true]", state="attached")
            assert page.locator("#h-panel").inner_text() == name
    path.write_text(last, "utf-8")
    with opening(browser, path) as page:
        assert page.locator("#unfinished").is_hidden()
        assert page.locator(".to-come").count() == 0
