"""The gallery's pictures, taken of report pages in Chromium: ``python tools/gallery.py PAGE.html …``.

One page is made by ``wherewhat report smollm2 --training STUDY``, with the trainings of ``wherewhat multihop train
number`` and ``letter`` in STUDY; the other by ``wherewhat encodings report studies/encodings``. Needs playwright and a
Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
CHARTS = {
    "overview": "#overview",
    "head-map": "#map",
    "head": "#panel",
    "positional-symbolic": "#scatter",
    "distance": "div.grid:has(#distance)",
    "frequencies": "div.grid:has(#band-scores)",
    "perturbation": "div.grid:has(#perturb-all)",
    "lengths": "div.grid:has(#length-loss)",
}
METRIC = "symbolic score"
LEGEND_BESIDE_CHART = """() => {
  const chart = document.getElementById("time");
  for (const other of chart.parentElement.children) if (other !== chart) other.hidden = true;
  chart.before(document.getElementById("legend"));
}"""


def main() -> None:
    """Take all pictures of the page that was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", type=Path, nargs="+", help="a report of one model with multi-hop trainings, or of a study"
    )
    parser.add_argument("--layer", default="19", help="layer of the head that is shown")
    parser.add_argument("--head", default="1", help="that head")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the pictures")
    given = parser.parse_args()
    for missing in (path for path in given.pages if not path.is_file()):
        sys.exit(f"there is no page {missing}: make one with wherewhat report")
    given.out.mkdir(parents=True, exist_ok=True)

    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        installed = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = driver.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1000, "height": 900},  # so narrow that the panel of a head is shown whole
            device_scale_factor=1.25,
            color_scheme="light",
            reduced_motion="reduce",
        )
        for path in given.pages:
            page.goto(path.resolve().as_uri())
            page.wait_for_selector("html[data-ready=true]", state="attached")
            page.add_style_tag(content=".downloads { display: none; }")
            if page.locator("#metric").count():
                _take_model(page, given.out, layer=given.layer, head=given.head)
            else:
                page.evaluate(LEGEND_BESIDE_CHART)
                _take(page, "section:has(> #time)", given.out / "encodings.png")
        browser.close()


def _take_model(page: Any, out: Path, *, layer: str, head: str) -> None:
    """All pictures of the report of one model."""
    page.select_option("#metric", label=METRIC)
    page.select_option("#layer", layer)
    page.select_option("#head", head)
    for name, selector in CHARTS.items():
        _take(page, selector, out / f"{name}.png")
    for index, label in enumerate(page.locator("#study option").all_text_contents()):
        page.select_option("#study", index=index)
        _take(page, "#dynamics", out / f"learning-{label.split()[0]}.png")


def _take(page: Any, selector: str, path: Path) -> None:
    """A picture of one part of the page, once its charts are drawn."""
    part = page.locator(selector)
    if not part.is_visible():
        sys.stdout.write(f"{path.stem} is not on this page\n")
        return
    part.scroll_into_view_if_needed()
    page.wait_for_timeout(400)
    part.screenshot(path=path, animations="disabled")
    sys.stdout.write(f"{path}  {path.stat().st_size // 1024} KiB\n")


if __name__ == "__main__":
    main()
