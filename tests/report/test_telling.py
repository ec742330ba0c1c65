"""Brute force: the heads and tokens that a page begins with; end-to-end: the first screen in a real browser."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.report import TOKENS, excerpt_of_report, opening, scores, unpacked
from wherewhat.measures.swaps import LABELS
from wherewhat.report.excerpt import Excerpt, Passage
from wherewhat.report.page import Report
from wherewhat.report.sections import collect
from wherewhat.report.telling import telling_heads, telling_line
from wherewhat.report.views import Capacity
from wherewhat.runs.collection import Runs
from wherewhat.runs.directory import RunDirectory
from wherewhat.runs.request import ModelRequest, Request
from wherewhat.runs.results import StoredRun

LAYERS = [3, 5]
"""Layers of the scores below, as a model with layers of other kinds has them."""


def excerpt_of(heads, rows=6):
    generator = torch.Generator().manual_seed(0)
    logits = {layer: torch.randn(heads, rows * (rows + 1) // 2, generator=generator) for layer in LAYERS}
    return Excerpt([Passage(["a"] * rows, logits)], {}, {}, Capacity(None, None, 0, rows), 0.0)


def chosen(swaps):
    heads, missing = telling_heads(swaps, excerpt_of(len(swaps["s_pos"][0] or swaps["s_pos"][1])), LAYERS)
    return {head["kind"]: (head["layer"], head["head"]) for head in heads}, missing


def test_the_most_positional_symbolic_and_mixed_head():
    sink, uniform = (1.0, 0.0, "sink"), (1.0, 0.1, "uniform")
    pos, pure, sym, mixed = (0.9, 0.2, "mixed"), (1.0, 0.1, "positional"), (0.1, 0.8, "mixed"), (0.5, 0.6, "mixed")
    heads, missing = chosen(scores(sink, uniform, pos, pure, sym, mixed, pure, (None, None, None)))
    assert heads == {"positional": (0, 3), "symbolic": (1, 0), "mixed": (1, 1)}  # the first of two equal heads
    assert missing == []


@pytest.mark.parametrize(
    ("heads", "kinds", "reasons"),
    [
        ([(1.0, 0.0, "sink"), (1.0, 1.0, "uniform")], {}, ["Every head with scores is an attention sink or"]),
        ([(None, None, None)] * 2, {}, ["Every head with scores is an attention sink or"]),
        (
            [(1.0, 0.0, "positional"), (0.9, 0.1, "positional")],
            {"positional": (0, 0)},
            ["No other head that is neither a sink nor uniform is more symbolic", "No other head that"],
        ),
        (
            [(0.6, 0.6, "mixed")] * 2,
            {"mixed": (0, 0)},
            ["No head that is neither a sink nor uniform is more pos", "No "],
        ),
        (
            [(0.6, 0.5, "mixed"), (0.0, 1.0, "symbolic")],  # no head is shown twice
            {"positional": (0, 0), "symbolic": (1, 0)},
            ["No other head that is neither a sink nor uniform is mixed."],
        ),
    ],
)
def test_fewer_heads_with_a_reason(heads, kinds, reasons):
    found, missing = chosen(scores(*heads))
    assert found == kinds
    assert all(line.startswith(reason) for line, reason in zip(missing, reasons, strict=True))


def test_heads_without_scores():
    assert telling_heads(None, excerpt_of(1), LAYERS) == ([], [])
    swaps = scores((1.0, 0.0, "positional"), (0.0, 1.0, "symbolic"))
    swaps["s_pos"][0] = swaps["s_sym"][0] = swaps["label"][0] = None  # a layer without scores
    assert chosen(swaps)[0] == {"symbolic": (1, 0)}


def test_choice_equals_the_obvious_one():
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        values = (torch.rand(40, 2, generator=generator) * 20).round().div(20).tolist()  # many ties
        names = [LABELS[int(i)] for i in torch.randint(len(LABELS), (40,), generator=generator)]
        listed = [(pos, sym, name) for (pos, sym), name in zip(values, names, strict=True)]
        found, _ = chosen(scores(*listed))
        best: dict[str, tuple[float, tuple[int, int]]] = {}
        for kind in ("positional", "symbolic", "mixed"):
            for number, (pos, sym, name) in enumerate(listed):
                place = divmod(number, 20)
                rank = {"positional": pos - sym, "symbolic": sym - pos, "mixed": -math.hypot(pos - 0.5, sym - 0.5)}[
                    kind
                ]
                if name in ("sink", "uniform") or (name != "mixed" if kind == "mixed" else rank <= 0):
                    continue
                if any(place == at for other, (_, at) in best.items() if other != kind):
                    continue
                if kind not in best or rank > best[kind][0]:
                    best[kind] = (rank, place)
        assert found == {kind: place for kind, (_, place) in best.items()}


@pytest.mark.parametrize("sink", [None, 2.0])
def test_the_telling_query_and_key(sink):
    rows = 40
    logits = 3 * torch.randn(rows * (rows + 1) // 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[5::7] = torch.nan
    pattern, at = [], 0
    for i in range(rows):
        row = [math.exp(x) if math.isfinite(x) else None for x in logits[at : at + i + 1].tolist()]
        at += i + 1
        total = sum(x for x in row if x is not None) + (0 if sink is None else math.exp(sink))
        pattern.append([None if x is None else x / total for x in row])
    best = {}
    for i in range(rows // 2, rows):
        for j in range(max(1, i - 23), i):
            column = [pattern[k][j] for k in range(j, rows) if pattern[k][j] is not None]
            if pattern[i][j] is not None:
                best[i, j] = pattern[i][j] - sum(column) / len(column)
    query, key = max(best, key=best.get)
    assert telling_line(logits, sink) == {"start": max(0, query - 23), "query": query, "key": key}


def test_no_telling_query():
    assert telling_line(torch.zeros(1)) is None
    assert telling_line(torch.zeros(3)) is None  # of two tokens the first is the only earlier key
    assert telling_line(torch.full((21,), torch.nan)) is None


# The page


@pytest.mark.browser
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen(browser, told, width, height, shots):
    model, path = told
    with opening(browser, path, width=width) as page:
        page.set_viewport_size({"width": width, "height": height})
        assert page.text_content("#summary") == model["summary"]["short"]
        assert page.get_attribute("#summary", "title") == model["summary"]["text"]
        assert page.locator("#telling h3").all_text_contents() == [
            "Most positional: L1H3",
            "Most symbolic: L1H2",
            "Most mixed: L1H1",
        ]
        boxes = [item.bounding_box() for item in page.locator("#telling > li").all()]
        assert len({box["y"] for box in boxes}) == 1  # beside each other
        assert boxes[0]["y"] + boxes[0]["height"] <= height
        assert width < 1000 or page.locator("#findings h2:visible, #h-model").first.bounding_box()["y"] < height
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=shots / f"first-screen-{width}.png")


@pytest.mark.browser
def test_pictures_of_the_heads(browser, told):
    model, path = told
    with opening(browser, path) as page:
        pattern = """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [canvas.width, data.filter((x, i) => i % 4 === 3 && x === 255).length];
        }"""
        curve = "(line) => line.getAttribute('points').split(' ').length"
        for head, item in zip(model["telling"]["heads"], page.locator("#telling > li").all(), strict=True):
            record = model["records"][head["layer"]][head["head"]]
            assert item.locator("canvas").evaluate(pattern) == [TOKENS, TOKENS * (TOKENS + 1) // 2]
            assert item.locator("polyline").evaluate(curve) == len(unpacked(record["mean"]))
            scored = [model["swaps"][name][head["layer"]][head["head"]] for name in ("s_pos", "s_sym")]
            assert item.locator(".scores span").all_text_contents() == [
                f"{name} {score:.2f}" for name, score in zip(("positional", "symbolic"), scored, strict=True)
            ]
            line, tokens = head["line"], model["texts"][0]["tokens"]
            spans = item.locator(".attention span")
            assert spans.count() == line["query"] + 1 - line["start"]
            assert spans.last.get_attribute("class") == "query"
            assert tokens[line["query"]].strip() in spans.last.text_content()
            logits = unpacked(record["documents"][0]["map"])
            at = line["query"] * (line["query"] + 1) // 2
            row = torch.tensor(logits[at : at + line["query"] + 1]).softmax(-1)
            shown = spans.evaluate_all("(spans) => spans.map((span) => span.title)")
            assert shown == [f"{100 * float(x):.0f} %" for x in row[line["start"] :]]
            assert f"{100 * float(row[line['key']]):.0f} % of attention" in item.locator(".note").last.text_content()
        assert page.locator("main img, main b, main i, main script").count() == 0


@pytest.mark.browser
def test_a_name_opens_the_head(browser, told):
    _, path = told
    with opening(browser, path) as page:
        assert page.text_content("#h-panel") == "Layer 1, head 3"  # the page opens on the first of them
        page.click("#telling a:text-is('L1H1')")
        page.wait_for_selector("#h-panel:text-is('Layer 1, head 1')")
        assert page.evaluate("document.activeElement.id") == "panel"
        assert 0 <= page.locator("#h-panel").bounding_box()["y"] < 900
        page.focus("#telling a:text-is('L1H2')")
        page.keyboard.press("Enter")
        page.wait_for_selector("#h-panel:text-is('Layer 1, head 2')")
        assert page.text_content("#table-of-heads [aria-selected=true] th") == "L1H2"


@pytest.mark.browser
def test_findings_are_short_and_their_numbers_one_click_away(browser, told, tmp_path):
    model, _ = told
    finding = {"short": "<b>Short</b>.", "text": "Long ± <i>1</i> (4 documents).", "link": "heads?metric=r"}
    data = {"models": [{**model, "findings": [finding]}], "comparison": None, "learning": [], "command": None}
    with opening(browser, Report("findings", data).write(tmp_path / "findings.html")) as page:
        assert page.text_content("#findings-list li") == "<b>Short</b>. show"
        assert page.get_attribute("#findings-list li", "title") == finding["text"]
        assert not page.locator("#findings-in-full").is_visible()
        page.click("#findings summary")
        listed = page.locator("#findings-in-full li").all_inner_texts()
        assert listed == [model["summary"]["text"], finding["text"]]


@pytest.mark.browser
@pytest.mark.parametrize("names", [("heads",), ("axes",), ("axes", "heads"), ("heads", "axes")], ids=" ".join)
def test_pages_of_some_runs(browser, made, names, tmp_path):
    """A page of one or two runs says what they say and leaves out the rest."""
    runs = Runs()
    for name in names:
        (folder,) = (path for path in made.out.glob(f"{name}-*tiny-trained-*"))
        request = Request(name, model=ModelRequest(model="tiny"), files=(str(made.text),), tokens=TOKENS)
        runs.finished.append((request, StoredRun(RunDirectory.load(folder))))
    model = collect(runs, excerpt_of_report(made), name="<b>some")
    assert ("variance" in model["summary"]["short"]) == ("axes" in names)
    assert ("heads, 8 are uniform" in model["summary"]["short"]) == ("heads" in names)
    data = {"models": [model], "comparison": None, "learning": [], "command": None}
    with opening(browser, Report("some", data).write(tmp_path / "some.html")) as page:
        assert page.text_content("#summary") == model["summary"]["short"]
        assert page.text_content("#telling-note") == " ".join(model["telling"]["missing"])
        assert page.locator("#telling > li").count() == 0
        page.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws everything
