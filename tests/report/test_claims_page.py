"""Pages of judged claims: pictures by arithmetic, hostile texts as text, and the page in a browser."""

from __future__ import annotations

import json

import pytest

from helpers.pages import ROOT
from helpers.report import HOSTILE, LINK, opening, until
from wherewhat import Judgement
from wherewhat.report.claims_page import _bound, claims_data, claims_page, write_claims_page

STUDIES = ROOT / "studies" / "claims"
RUN = "axes-tiny-trained-000000000000"


def hostile(name=LINK, *, verdict="holds if", share=0.25):
    """A result all of whose texts try to break out of the page."""
    bound = {"mean": 0.8, "low": 0.7, "high": 0.9, "n": 4, "side": "at least", "threshold": 0.75, "outcome": None}
    number = {"title": HOSTILE, "mean": 0.5, "low": 0.4, "high": 0.6, "n": 4, "control": 0.1, "control_title": HOSTILE}
    claim = {
        "number": 1,
        "title": "<b>title</b>",
        "statement": HOSTILE,
        "source": LINK,
        "verdict": verdict,
        "condition": HOSTILE,
        "stability": {"over": "4 documents", "verdict": HOSTILE, "changed": share, "resamples": 500, "verdicts": {}},
        "numbers": [number],
        "parts": [{"statement": HOSTILE, "outcome": None, "bounds": [bound]}],
        "notes": [HOSTILE],
        "change": HOSTILE,
        "runs": ["javascript:alert(3)", RUN],
    }
    return {"wherewhat_claims": 1, "model": name, "weights": "trained", "claims": [claim], "command": HOSTILE}


def test_a_picture_has_the_interval_and_the_threshold_in_order():
    bound = {"mean": 0.8, "low": 0.7, "high": 0.9, "n": 4, "side": "at least", "threshold": 0.5, "outcome": True}
    drawn = _bound(bound)
    assert (drawn["threshold"], drawn["high"]) == (8.0, 92.0)
    assert drawn["low"] == pytest.approx(50.0)  # the middle of 0.5 and 0.9
    assert drawn["mean"] == pytest.approx(71.0)
    assert drawn["right"] is True
    assert _bound({**bound, "side": "at most"})["right"] is False
    assert _bound({**bound, "side": "apart from"})["right"] is None
    alone = _bound({**bound, "low": None, "high": None, "threshold": 0.8})
    assert {alone[name] for name in ("low", "high", "mean", "threshold")} == {8.0}


def test_texts_are_in_the_data_only(tmp_path):
    (tmp_path / RUN).mkdir()
    path = write_claims_page([hostile()], tmp_path / "page.html", runs=[tmp_path])
    page = path.read_text("utf-8")
    for text in ("<script>alert", "<img", "<b>title", '<a href="https'):
        assert text not in page
    runs = claims_data(hostile())["claims"][0]["runs"]
    assert [run["address"] for run in runs] == [None, None]
    assert f'"{RUN}/"' in page


def test_results_of_earlier_versions_are_shown():
    page = claims_page([Judgement.load(STUDIES / "multihop.json").data])
    assert "Learning makes heads pure" in page


def test_all_stored_results_side_by_side():
    page = claims_page([Judgement.load(path).data for path in sorted(STUDIES.glob("*.json"))])
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [card["number"] for card in data["cards"]] == list(range(1, 26))
    assert len(data["models"]) == len(list(STUDIES.glob("*.json")))


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_a_browser(browser, shots, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    (tmp_path / RUN).mkdir()
    names = ("smollm2", "tinyllama-1.1b", "stories15m", "multihop")
    stored = [Judgement.load(STUDIES / f"{name}.json").data for name in names]
    path = write_claims_page([hostile(), *stored], tmp_path / "page.html", runs=[tmp_path])
    with opening(browser, path) as page:
        assert page.locator("#verdicts tbody tr").count() == 25
        assert LINK in page.text_content("h1")
        assert "cannot be told" in page.text_content("#verdicts")
        card = page.locator("#claim-1")
        assert "<script>alert(1)</script>" in card.text_content()
        assert card.locator("b, script, img").count() == 0
        links = card.locator(".model a").evaluate_all("(links) => links.map((one) => one.getAttribute('href'))")
        assert links == [f"{RUN}/"]
        picture = card.locator("svg[role=img]").first
        assert picture.get_attribute("aria-label") == "0.80 ± 0.10; needed: at least 0.75: open"
        assert picture.locator("line.threshold").count() == picture.locator("line.interval").count() == 1
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            until(page, f"document.documentElement.scrollWidth <= {width}")
            for _ in ("light", "dark"):
                found = axe.run(page, options={"resultTypes": ["violations"]}).response
                assert len(found["passes"]) > 20
                assert [(one["id"], node["html"]) for one in found["violations"] for node in one["nodes"]] == []
                page.screenshot(path=shots / f"claims-{width}.png")
                page.click("#theme")
