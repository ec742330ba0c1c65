"""End-to-end: roles, search, patterns of all heads and two heads side by side, in a real browser, offline."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

from helpers.report import PANEL, TOKENS, drawn, opening, unpacked, until
from wherewhat.report.page import Report

pytestmark = pytest.mark.browser

HEADS = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
PORTRAIT = "Induction and sink: <b>34\u00a0%</b> of its attention on the token after an earlier occurrence."
ROLES = [["sink"]] * 4 + [["induction", "sink"], ["mixed"], ["symbolic"], ["previous token", "positional"]]
VALUES = {
    "s_pos_no_sink": [0.3] * 5 + [0.4, 0.1, 0.9],
    "s_sym_no_sink": [0.8] * 5 + [0.6, 0.9, 0.1],
    "sink_mass": [0.9, 0.8, 0.7, 0.6, 0.55, 0.1, 0.05, 0.02],
    "induction": [0.01] * 4 + [0.34, 0.01, 0.02, 0.03],
    "previous_token": [0.1] * 7 + [0.8],
}
SHOWN = (
    "[...document.querySelectorAll('#table-of-heads tbody tr:not([hidden])')].map((row) => row.cells[0].textContent)"
)


def portrait(number):
    return PORTRAIT if number == 4 else f"{ROLES[number][0].capitalize()}: sentence {number}."


@pytest.fixture(scope="module")
def data(made, told):
    """The data of a page whose heads have roles that an untrained model has not."""
    model = copy.deepcopy(told[0])
    trained = [{"roles": roles, "portrait": portrait(number)} for number, roles in enumerate(ROLES)]
    random = [{"roles": ["uniform"], "portrait": f"Uniform: sentence {number}."} for number in range(8)]
    grids = {"trained": trained, "random": random}
    model["roles"]["heads"] = {weights: [heads[:4], heads[4:]] for weights, heads in grids.items()}
    for metric in model["metrics"]:
        if metric["id"] in VALUES:
            metric["values"]["trained"] = [VALUES[metric["id"]][:4], VALUES[metric["id"]][4:]]
    return {**made.report.data, "models": [model]}


@pytest.fixture(scope="module")
def path(data, tmp_path_factory):
    return Report("roles", data).write(tmp_path_factory.mktemp("roles") / "roles.html")


@pytest.fixture
def opened(browser, path):
    with opening(browser, path) as page:
        yield page


def choose(page, name):
    page.select_option("#layer", name[1])
    page.select_option("#head", name[3])


def pixels(page, canvas):
    """The colours of a canvas, ``(rows, columns, 4)``."""
    # Of a copy: Chromium warns where one canvas is read twice.
    read = """(id) => {
        const shown = document.getElementById(id);
        const copy = document.createElement("canvas");
        [copy.width, copy.height] = [shown.width, shown.height];
        const pen = copy.getContext("2d");
        pen.drawImage(shown, 0, 0);
        return [copy.height, copy.width, [...pen.getImageData(0, 0, copy.width, copy.height).data]];
    }"""
    height, width, values = page.evaluate(read, canvas)
    return np.array(values).reshape(height, width, 4)


def pattern_of(data, layer, head):
    """Attention pattern of a head on the first document."""
    logits = unpacked(data["models"][0]["records"][layer][head]["documents"][0]["map"])
    pattern = np.zeros((TOKENS, TOKENS))
    pattern[np.tril_indices(TOKENS)] = np.exp(logits)
    return pattern / pattern.sum(1, keepdims=True)


def test_a_stranger_finds_ten_answers_within_three_clicks(browser, path):
    """Each question is asked of a page that was just opened; clicks, typed searches and chosen options are counted."""
    question = "#overview summary", "#questions a:text-is('{}')"

    def asked(text):
        return [("click", question[0]), ("click", question[1].format(text))]

    def table(page):
        return page.evaluate(SHOWN)

    pressed = "#chips [aria-pressed=true]"
    answers = [
        (asked("Which heads do induction?"), lambda page: table(page) == ["L1H0"]),
        (asked("Which heads attend to the previous token?"), lambda page: table(page) == ["L1H3"]),
        (asked("Which heads depend on position alone?"), lambda page: table(page) == ["L1H3"]),
        (asked("Which heads depend on content alone?"), lambda page: table(page) == ["L1H2"]),
        # What does L1H0 do?
        ([("search", "L1H0")], lambda page: page.text_content("#portrait") == PORTRAIT),
        (
            asked("Which heads can I drop?"),
            lambda page: table(page) == HEADS[:5] and page.text_content(pressed).startswith("sink"),
        ),
        (
            asked("Is r high because of training?"),
            lambda page: page.evaluate("document.getElementById('range').layout?.annotations.length") == 3,
        ),
        (
            asked("Where in the model are the attention sinks?"),
            lambda page: page.evaluate("document.getElementById('map').data?.[0].z.flat()") == VALUES["sink_mass"],
        ),
        (asked("How do two heads differ?"), lambda page: page.locator("#matrix-beside").is_visible()),
        (
            asked("Does word order matter to the model?"),
            lambda page: page.locator("#perturb-all svg.main-svg").count() > 0,
        ),
        (asked("How can I make this page myself?"), lambda page: page.text_content("#command").startswith("wherewhat")),
    ]
    for actions, is_answered in answers:
        assert len(actions) <= 3
        with opening(browser, path) as page:
            for kind, target in actions:
                if kind == "search":
                    page.fill("#search", target)
                    page.press("#search", "Enter")
                else:
                    page.click(target)
            for _ in range(100):
                if is_answered(page):
                    break
                page.wait_for_timeout(100)
            assert is_answered(page), actions


def test_heads_to_drop_are_those_whose_removal_costs_least(browser, data, tmp_path):
    """A metric that a run of another measurement adds is listed among the first ten and answers the question."""
    model = copy.deepcopy(data["models"][0])
    costs = [0.5, -0.1, 0.2, 0.3, 0.0, 0.7, 0.6, 0.4]
    added = {
        **model["metrics"][0],
        "id": "removal_loss",
        "measurement": "removal",
        "title": "loss without it",
        "group": "removal: effects",
    }
    model["metrics"].append({**added, "values": {"trained": [costs[:4], costs[4:]]}, "categories": []})
    path = Report("removal", {**data, "models": [model]}).write(tmp_path / "removal.html")
    with opening(browser, path) as page:
        assert "loss without it" in page.locator("#metric option").all_text_contents()
        page.click("#overview summary")
        page.click("#questions a:text-is('Which heads can I drop?')")
        until(page, f"{SHOWN}[0] === 'L0H1'")
        assert page.evaluate(SHOWN) == [HEADS[at] for at in np.argsort(costs)]
        assert page.text_content("#h-panel") == "Layer 0, head 1"
        assert "Mean over" not in page.text_content("#reading")  # of a run whose size the page does not know
        page.fill("#search", "removal_loss <= 0")
        assert page.evaluate(SHOWN) == ["L0H1", "L1H0"]
    model["metrics"][-1]["values"] = {"trained": [None, costs[4:]]}
    path = Report("removal", {**data, "models": [model]}).write(tmp_path / "some.html")
    with opening(browser, path) as page:
        assert "costs least, of the 4 heads that were removed" in page.text_content("#questions")


def test_portrait_and_roles_begin_the_panel(opened):
    choose(opened, "L1H0")
    assert opened.text_content("#portrait") == PORTRAIT
    assert opened.locator("#roles a").all_text_contents() == ["induction", "sink"]
    hint = "as document to see the stripe of this induction head."
    assert hint in opened.text_content("#view-note")
    opened.select_option("#document", label="repeated random tokens")
    assert hint not in opened.text_content("#view-note")
    opened.select_option("#document", index=0)
    order = "[...document.querySelectorAll('#h-panel, #portrait, #roles, #label')].map((item) => item.id)"
    assert opened.evaluate(order) == ["h-panel", "portrait", "roles", "label"]
    opened.click("#roles a:text-is('induction')")
    until(opened, f"{SHOWN}.length === 1")
    assert opened.evaluate(SHOWN) == ["L1H0"]
    assert opened.get_attribute("#chips button:has-text('induction')", "aria-pressed") == "true"
    assert opened.locator("main b, main i, main img").count() == 0


def test_search_finds_roles_heads_and_conditions(opened):
    found = {
        "induction": ["L1H0"],
        "sink": HEADS[:5],
        "previous": ["L1H3"],
        "previous token": ["L1H3"],
        "sink induction": ["L1H0"],
        "sink>0.75": ["L0H0", "L0H1"],
        "SINK >= 0.6 L0": HEADS[:4],
        "sink_mass<0.1": ["L1H2", "L1H3"],
        "previous token > 0.5": ["L1H3"],
        "induction>0.1 sink>0.5": ["L1H0"],
        "induction=0.34": ["L1H0"],
        "L1H3": ["L1H3"],
        "l1": HEADS[4:],
        "nothing>1": [],
        "<b>": [],
        "__proto__>0": [],
        "": HEADS,
    }
    for text, heads in found.items():
        opened.fill("#search", text)
        assert opened.evaluate(SHOWN) == heads, text
    # Enter opens the only match, or the first; of none it does nothing.
    for text, heading in {"L1H3": "Layer 1, head 3", "sink": "Layer 0, head 0", "nothing": "Layer 0, head 0"}.items():
        opened.fill("#search", text)
        opened.press("#search", "Enter")
        assert opened.text_content("#h-panel") == heading


def test_the_page_names_the_control_models_that_were_measured(browser, data, tmp_path):
    one = copy.deepcopy(data)
    for metric in one["models"][0]["metrics"]:
        metric["values"].pop("shuffled", None)
    with opening(browser, Report("one", one).write(tmp_path / "one.html")) as page:
        words = page.text_content("#about")
        assert "Its control model is the same architecture with newly initialised weights (random). It is one" in words
        assert "shuffled" not in words
    for metric in one["models"][0]["metrics"]:
        metric["values"].pop("random", None)
    with opening(browser, Report("none", one).write(tmp_path / "none.html")) as page:
        assert "control" not in page.text_content("#about")


def test_an_address_without_an_order_has_the_order_of_the_model(browser, path):
    with opening(browser, path, "heads?search=H1") as page:
        until(page, "location.hash.includes('head=')")
        assert "order" not in page.evaluate("location.hash")
        assert page.evaluate(SHOWN) == ["L0H1", "L1H1"]


def test_heads_are_in_the_address_and_in_the_history(opened, browser, path):
    for fragment in ("L1H2", "l1h2"):
        with opening(browser, path, fragment) as page:
            assert page.text_content("#h-panel") == "Layer 1, head 2"
            assert page.evaluate("document.activeElement.id") == "panel"
    with opening(browser, path, "L9H9") as page:
        assert page.text_content("#h-panel") == "Layer 1, head 3"
    until(opened, "location.hash.includes('head=L1H3')")
    for name in ("L0H1", "L1H2"):
        choose(opened, name)
        until(opened, f"location.hash.includes('head={name}')")
    opened.fill("#search", "sink")  # what is no head changes the present entry
    until(opened, "location.hash.includes('search=sink')")
    opened.go_back()
    opened.wait_for_selector("#h-panel:text-is('Layer 0, head 1')")
    opened.go_back()
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 3')")
    opened.go_forward()
    opened.wait_for_selector("#h-panel:text-is('Layer 0, head 1')")
    opened.evaluate("location.hash = '#L1H1'")
    opened.wait_for_selector("#h-panel:text-is('Layer 1, head 1')")


@pytest.mark.slow
def test_patterns_of_all_heads(opened, data, shots):
    """Pixels equal the square root of the attention; clicks and keys choose heads; the filter makes others faint."""
    opened.locator("#thumbnails").scroll_into_view_if_needed()
    until(opened, "document.getElementById('thumbnails').style.width !== ''")
    cell = opened.evaluate("document.getElementById('thumbnails').width / 2")
    picture = pixels(opened, "thumbnails")
    stops = [(68, 1, 84), (72, 40, 120), (62, 74, 137), (49, 104, 142), (38, 130, 142), (31, 158, 137)]
    stops += [(53, 183, 121), (109, 205, 89), (180, 222, 44), (253, 231, 37)]
    scale = np.array(stops, float)
    step = (cell - 1) / TOKENS
    for layer, head in ((0, 0), (1, 2)):
        pattern = pattern_of(data, layer, head)
        for query, key in ((27, 0), (20, 11), (14, 6)):
            at = int(head * cell + (query + 0.5) * step), int(layer * cell + (key + 0.5) * step)
            expected = [np.interp(np.sqrt(pattern[query, key]) * 9, range(10), scale[:, k]) for k in range(3)]
            # Between pixels of the stored picture colours are interpolated.
            np.testing.assert_allclose(picture[at][:3], expected, atol=25)
        assert picture[int(head * cell + 3 * step), int(layer * cell + 20 * step), 3] == 0  # later keys
    box = opened.locator("#thumbnails").bounding_box()
    opened.mouse.move(box["x"] + cell / 2, box["y"] + cell / 2)
    assert opened.text_content("#thumbnail-note") == f"L0H0. {portrait(0)}"
    opened.mouse.click(box["x"] + 1.5 * cell, box["y"] + 0.5 * cell)
    assert opened.text_content("#h-panel") == "Layer 1, head 0"
    opened.focus("#thumbnails")
    for key, heading in (("ArrowDown", "Layer 1, head 1"), ("ArrowLeft", "Layer 0, head 1")):
        opened.keyboard.press(key)
        assert opened.text_content("#h-panel") == heading
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "panel"
    opened.fill("#search", "L1H0")
    until(opened, "document.getElementById('shown').textContent === '1 of 8 heads'")
    opened.wait_for_timeout(300)
    faint, full = (pixels(opened, "thumbnails")[int(cell) - 4, int(column), 3] for column in (3, cell + 3))
    assert faint < 60
    assert full == 255
    opened.locator("#heads").scroll_into_view_if_needed()
    opened.screenshot(path=shots / "roles.png")


@pytest.mark.slow
def test_two_heads_side_by_side(opened, browser, path, data):
    choose(opened, "L1H2")
    assert opened.locator("#beside").is_hidden()
    opened.focus("#keep")
    opened.keyboard.press("Enter")
    choose(opened, "L0H1")
    assert opened.text_content("#h-beside") == "L1H2"
    assert opened.text_content("#beside-portrait") == portrait(6)
    opened.locator("#matrix").scroll_into_view_if_needed()
    boxes = [opened.locator(place).bounding_box() for place in ("#matrix", "#matrix-beside")]
    assert abs(boxes[0]["y"] - boxes[1]["y"]) < 2
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert abs(boxes[0]["width"] - boxes[1]["width"]) < 2
    step = (boxes[1]["width"] - 88) / TOKENS
    opened.mouse.move(boxes[1]["x"] + 84 + 3.5 * step, boxes[1]["y"] + 4 + 9.5 * step)
    shares = [pattern_of(data, *head)[9, 3] for head in ((0, 1), (1, 2))]
    until(opened, "document.getElementById('cell').textContent.includes('distance 6')")
    assert opened.text_content("#cell").endswith(f"distance 6: {shares[0]:.3f}; L1H2: {shares[1]:.3f}")
    assert opened.locator(".marked-key:visible").count() == 2
    drawn(opened, "curve")
    names = "document.getElementById('curve').data.map((line) => line.name)"
    assert "L1H2" in opened.evaluate(names)
    until(opened, "location.hash.includes('beside=L1H2')")
    with opening(browser, path, opened.url.split("#", 1)[1], width=390) as page:
        assert page.text_content("#h-beside") == "L1H2"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.click("#keep")
    assert opened.locator("#beside").is_hidden()
    opened.locator("#table-of-heads tbody tr", has_text="L1H3").click(modifiers=["Shift"])
    assert (opened.text_content("#h-panel"), opened.text_content("#h-beside")) == ("Layer 0, head 1", "L1H3")


def test_a_token_colours_the_text_in_both_directions(opened, data):
    choose(opened, "L1H2")
    colours = "[...document.querySelectorAll('#text span')].map((span) => span.style.backgroundColor)"
    drawn(opened, *PANEL)  # nothing moves afterwards
    key_terms = opened.evaluate(colours)
    top = "document.getElementById('text').getBoundingClientRect().top"
    opened.locator("#text span").nth(9).scroll_into_view_if_needed()
    before = opened.evaluate(top)
    opened.locator("#text span").nth(9).hover()
    assert opened.evaluate(top) == before  # nothing moves under the pointer
    pattern = pattern_of(data, 1, 2)
    shares = np.array([pattern[9, j] if j <= 9 else pattern[j, 9] for j in range(TOKENS)])
    shown = [re.findall(r"[\d.]+", colour) for colour in opened.evaluate(colours)]
    np.testing.assert_allclose([float(x[3]) if len(x) > 3 else 1.0 for x in shown], np.sqrt(shares), atol=0.006)
    assert [x[:3] for x in shown] == [["86", "160", "233"]] * 10 + [["230", "159", "0"]] * (TOKENS - 10)
    assert f"gives {100 * shares[:10].max():.0f}\u00a0% of its attention to" in opened.text_content("#cell")
    opened.mouse.move(0, 0)
    until(opened, "document.getElementById('text-note').textContent.startsWith('Key term')")
    assert opened.evaluate(colours) == key_terms
    # A click keeps the token, also for other heads; Escape frees it.
    opened.locator("#text span").nth(9).click()
    opened.mouse.move(0, 0)
    assert "Blue: attention of the marked token" in opened.text_content("#text-note")
    choose(opened, "L0H1")
    assert "Blue: attention of the marked token" in opened.text_content("#text-note")
    opened.focus("#text")
    opened.keyboard.press("Escape")
    assert "Key term" in opened.text_content("#text-note")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        opened.keyboard.press(key)
    at = "[...document.getElementById('text').children].findIndex((x) => x.classList.contains('query'))"
    assert opened.evaluate(at) == 1


def test_the_panel_follows_the_weights(opened, data):
    choose(opened, "L1H0")
    drawn(opened, "curve", "place")
    opened.select_option("#weights", "random")
    assert opened.text_content("#portrait") == "Uniform: sentence 4."
    assert opened.locator("#roles a").all_text_contents() == ["uniform"]
    (model,) = data["models"]
    scores = model["swaps"]["controls"]["random"]
    assert f"Positional {scores['s_pos'][1][0]:.3f}" in opened.text_content("#label")
    assert "one random control" in opened.text_content("#panel-weights")
    opened.locator("#place").scroll_into_view_if_needed()
    until(opened, f"document.getElementById('place').data[1].x[0] === {scores['s_pos'][1][0]}")
    mean = unpacked(model["control_curves"]["random"][1][0]["mean"])
    until(opened, "document.getElementById('curve').data.length === 3")
    line = opened.evaluate("document.getElementById('curve').data[2].y")
    np.testing.assert_allclose(line, mean, rtol=1e-12, atol=1e-12)
    opened.select_option("#weights", "shuffled")
    assert opened.text_content("#portrait") == "Its roles were not measured with shuffled weights."
    opened.select_option("#weights", "trained")
    assert opened.text_content("#portrait") == PORTRAIT
    assert opened.text_content("#panel-weights") == ""


def test_contents_stay_visible_and_terms_are_folded(opened):
    assert opened.locator("#term-logit").is_hidden()
    opened.click("#panel a.term[href='#term-logit']")
    opened.wait_for_selector("#term-logit", state="visible")
    top = "document.getElementById('term-logit').getBoundingClientRect().top"
    bar = opened.locator("main > nav").bounding_box()
    assert bar["y"] == 0
    assert opened.evaluate(top) >= bar["height"] - 2
    opened.click("#contents a[href='#heads']")
    until(opened, "Math.abs(document.getElementById('heads').getBoundingClientRect().top) < 60")


def test_the_first_picture_opens_heads(opened, data):
    """A mark for every head of the model and, in grey, of the control; a click opens the head at that place."""
    assert opened.text_content("#hero-note").endswith("grey: the heads of one random control.")
    picture = pixels(opened, "hero")
    metrics = {metric["id"]: metric["values"] for metric in data["models"][0]["metrics"]}
    for weights in ("random", "trained"):
        x, y = (metrics[name][weights][1][1] for name in ("s_pos_no_sink", "s_sym_no_sink"))
        at = 22 + 172 * x, 6 + 172 * (1 - y)  # of 200 pixels, with the axes' titles at two sides
        red, _, blue, alpha = picture[int(at[1]), int(at[0])]
        assert alpha > 100
        assert (red == blue) == (weights == "random")
    box = opened.locator("#hero").bounding_box()
    opened.mouse.click(box["x"] + at[0] * box["width"] / 200, box["y"] + at[1] * box["width"] / 200)
    assert opened.text_content("#h-panel") == "Layer 1, head 1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_a_third(browser, path, scheme, shots):
    """Sections are folded, and links unfold them; 23,900 pixels were the height before."""
    with opening(browser, path, width=390) as page:
        page.emulate_media(color_scheme=scheme)
        page.reload()
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.wait_for_timeout(500)
        assert page.evaluate("document.documentElement.scrollHeight") <= 23_900 / 3
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.screenshot(path=shots / f"phone-{scheme}.png")
        assert page.locator("#numbers").is_hidden()
        page.click("#contents a[href='#model-numbers']")
        page.wait_for_selector("#numbers", state="visible")
        page.locator("#curves .fold > summary").click()
        drawn(page, "distance")
        page.click("#chips button:has-text('induction')")
        assert page.evaluate(SHOWN) == ["L1H0"]
        page.press("#search", "Enter")
        assert page.text_content("#portrait") == PORTRAIT
