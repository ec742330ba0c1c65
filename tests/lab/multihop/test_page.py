"""End-to-end: the page of tiny runs of both tasks, through the command and in a browser; identity: its numbers are
those of the records, and theorems bound the discrepancy."""

from __future__ import annotations

import json
import math

import pytest

from helpers.command_line import assert_one_line
from wherewhat.measures.statistics import interval
from wherewhat_lab.multihop.figures import frequency_ids, measure_figures
from wherewhat_lab.multihop.page import SECTIONS, page_data
from wherewhat_lab.multihop.study import Setup, train_and_record

TINY = {"layers": 2, "heads": 2, "width": 16, "steps": 4, "record_every": 2, "batch": 4, "sequences": 800, "threads": 1}
PRINTED = 6e-4
"""Of numbers with three decimals: half of the last one."""
GIVEN = ("--extra", "0,3", "--count", 12, "--device", "cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two seeds of number, and of one of letter."""
    out = tmp_path_factory.mktemp("runs")
    seeds = (("number", 0), ("number", 1), ("letter", 0))
    return [train_and_record(Setup.of(task, TINY).seeded(seed), out=out, scored=4, tested=8) for task, seed in seeds]


@pytest.fixture(scope="module")
def found(runs):
    measured = [measure_figures(run, (0, 3, 100), count=12) for run in runs]
    return {"number": measured[:2], "letter": measured[2:]}


@pytest.fixture(scope="module")
def sections(found):
    return {section["title"]: section for section in page_data(found)["sections"]}


def columns(section, table):
    shown = section["tables"][table]
    return dict(zip(shown["header"], zip(*shown["rows"], strict=True), strict=True))


def test_every_section_has_charts_and_tables_of_both_tasks(sections):
    assert list(sections) == [title for title, _, _ in SECTIONS]
    for title, section in sections.items():
        assert section["tables"], title
        assert all(len(row) == len(table["header"]) for table in section["tables"] for row in table["rows"])
        if not title.startswith(("Information flow", "Geometry", "Discrepancy")):
            assert {chart["title"].split()[0] for chart in section["charts"]} == {"number", "letter"}


def numbers(cells):
    """Cells as numbers and their reach; None for a cell without a number."""
    return [None if cell == "–" else [float(part) for part in cell.split(" ± ")] for cell in cells]


def test_numbers_are_those_of_the_records_beside_the_paper(sections, found):
    section = sections["Final scores by layer"]
    ends = [one.records["s_pos"][-1].double().mean(-1) for one in found["number"]]
    wanted = [interval([float(end[layer]) for end in ends]) for layer in range(2)]
    shown = columns(section, 0)
    assert numbers(shown["s_pos"]) == [pytest.approx([one.mean, one.reach], abs=PRINTED) for one in wanted]
    assert shown["paper's s_pos"] == ("0.39", "1")
    _, filled, ours, paper = section["charts"][0]["traces"][:4]
    assert ours["y"] == pytest.approx([one.mean for one in wanted], rel=1e-3)
    assert filled["fill"] == "tonexty"
    assert max(filled["y"]) <= 1
    assert paper["y"] == [0.39, 1.0]
    # One seed has no interval.
    assert all("±" not in cell for cell in columns(section, 1)["s_pos"])
    assert "tonexty" not in json.dumps(section["charts"][1])

    (run,) = found["letter"]
    shown = columns(sections["Frequency use and mean frequency ID of all layers"], 1)
    ids = frequency_ids(run.run)[-1].double().mean(-1).tolist()
    assert numbers(shown["softmax weights"]) == [pytest.approx([x], rel=5e-3) for x in ids]  # three digits
    assert shown["paper, softmax weights"] == ("18", "32")
    assert shown["paper, linear weights"] == ("", "")

    shown = columns(sections["Accuracy by extra tokens"], 1)
    assert shown["extra tokens"] == ("0", "3", "100")
    last = [one.overall for one in run.extra["last"].values()]
    assert numbers(shown["last checkpoint"]) == [pytest.approx([x], abs=PRINTED) for x in last]
    assert shown["paper"] == ("1", "–", "1")  # the paper has no value for 3
    assert [shown["last - paper"][1], len(shown["1 hop"])] == ["–", 3]

    shown = columns(sections["Accuracy by position of the answer"], 1)
    shares = (run.places[100]["hits"] / run.places[100]["counts"]).tolist()
    wanted = [None if math.isnan(share) else pytest.approx([share], abs=PRINTED) for share in shares]
    assert numbers(shown["100 extra tokens"]) == wanted


def test_theorems_bound_the_discrepancy(sections):
    for chart in sections["Discrepancy by length"]["charts"]:
        worst, bound, best = (trace["y"] for trace in chart["traces"][:3])
        known = [(low, high) for low, high in zip(worst, bound, strict=True) if high is not None]
        assert len(known) > 20
        assert all(low <= high * (1 + 1e-3) for low, high in known)
        assert all(low <= high for low, high in zip(worst, best, strict=True))


def test_the_command(runs, cli, tmp_path):
    file = tmp_path / "pages" / "multihop.html"
    shown = cli("multihop", "report", *(run.path for run in runs), "--file", file, *GIVEN)
    assert shown.code == 0, shown.err
    assert shown.out.replace("\n", "") == str(file)
    page = file.read_text("utf-8")
    assert "{{" not in page.partition("<script")[0]
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
    assert "number: 0, 1; letter: 0" in data["about"]
    assert [run["name"] for run in data["runs"]] == [run.path.name for run in runs]
    assert_one_line(cli("multihop", "report", tmp_path / "nowhere"), "nowhere")
    path = runs[0].path
    assert_one_line(cli("multihop", "report", path, path, *GIVEN), "several runs of the number task have seed 0")
    assert_one_line(cli("multihop", "report", path, "--count", 0), "--count is 0")
    assert_one_line(cli("multihop", "report", path, "--file", tmp_path), "--file")


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(browser, runs, cli, tmp_path, width):
    file = tmp_path / "page.html"
    cli("multihop", "report", *(run.path for run in runs), "--file", file, *GIVEN)
    context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
    page = context.new_page()
    page.set_default_timeout(20_000)
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached")
    assert page.locator("#sections section").count() == len(SECTIONS)
    assert page.locator(".chart").count() == page.locator(".chart:has(.main-svg)").count() > 20
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    context.close()
    assert said == []
