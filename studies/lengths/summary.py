"""Tables and picture of the comparison of length methods, from the results in this folder.

    python studies/lengths/summary.py

Prints the tables of ``docs/lengths.md`` and writes ``docs/pictures/lengths.svg``. The results, one JSON file per model,
are written by ``benchmarks/lengths.py --json``.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.lengths import METHODS
from wherewhat.measures.statistics import Interval, interval

FOLDER = Path(__file__).resolve().parent
PICTURE = FOLDER.parents[1] / "docs" / "pictures" / "lengths.svg"
REFERENCE = ("near-far-plan", "near-far")
"""Methods with which all others are compared document by document: the first of them that was measured."""
ORDER = (*METHODS, "near-far-plan")
CONTROLS = {"*within the trained length*": "pieces", "*not stated*": "chance"}
"""Suffixes of the controls of retrieval by title."""
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette."""


@dataclass(frozen=True)
class Cells:
    """Documents of one model at one multiple of its trained length."""

    documents: Mapping[str, Mapping[str, Any]]

    @property
    def methods(self) -> list[str]:
        """Methods that were measured on every document."""
        first, *others = (document["methods"] for document in self.documents.values())
        return [name for name in first if all(name in other for other in others)]

    def control(self, metric: str) -> Interval | None:
        """Return the mean of a control over documents."""
        return _mean(document["controls"].get(metric) for document in self.documents.values())

    def mean(self, method: str, metric: str, *, minus: str | None = None) -> Interval | None:
        """Return the mean of a metric over documents, or of its difference from another method."""
        values = []
        for document in self.documents.values():
            own, other = (document["methods"].get(name, {}).get(metric) for name in (method, minus))
            difference = None if own is None or other is None else own - other
            values.append(own if minus is None else difference)
        return _mean(values)


def main() -> None:
    """Print the tables and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the picture")
    parser.add_argument("results", type=Path, nargs="*", help="results; by default the JSON files of this folder")
    options = parser.parse_args()
    results = [json.loads(path.read_text("utf-8")) for path in options.results or sorted(FOLDER.glob("*.json"))]
    if not results:
        sys.exit(f"there are no results in {FOLDER}: make some with benchmarks/lengths.py --json")
    for result in results:
        sys.stdout.write("\n".join(tables(result)) + "\n\n")
    options.picture.write_text(picture(results), encoding="utf-8")


def lengths(result: Mapping[str, Any]) -> dict[str, Cells]:
    """Return the measured cells by multiple of the trained length, from short to long."""
    found = {multiple: {x: y for x, y in each.items() if y["methods"]} for multiple, each in result["lengths"].items()}
    return {multiple: Cells(found[multiple]) for multiple in sorted(found, key=float) if found[multiple]}


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a model's section: rise and retrieval, copies and questions, paired differences, time."""
    by_length = lengths(result)
    counts = ", ".join(f"{len(cells.documents)} at {multiple} ×" for multiple, cells in by_length.items())
    yield f"## {result['model']}"
    yield ""
    yield f"Trained length {result['trained']:,} tokens, {result['dtype']}; documents: {counts}; nats, ± 95 %."
    methods = [name for name in ORDER if any(name in cells.methods for cells in by_length.values())]

    def table(columns: Sequence[tuple[str, str]], *, minus: str | None = None, controls: bool = False) -> Iterator[str]:
        titles = [f"{title}, {multiple} ×" for multiple in by_length for title, _ in columns]
        yield ""
        yield "| " + " | ".join(["method", *titles]) + " |"
        yield "|---" * (len(titles) + 1) + "|"
        for name in methods:
            if name != minus:
                cells = [x.mean(name, metric, minus=minus) for x in by_length.values() for _, metric in columns]
                yield "| " + " | ".join([name, *map(shown, cells)]) + " |"
        for title, suffix in CONTROLS.items() if controls else ():
            cells = [x.control(f"{metric}_{suffix}") for x in by_length.values() for _, metric in columns]
            if any(x is not None for x in cells):
                yield "| " + " | ".join([title, *map(shown, cells)]) + " |"

    yield from table([("rise", "loss_rise"), ("found", "found_beyond")])
    usual = "; ".join(f"{shown(cells.control('found_pieces'))} at {x} ×" for x, cells in by_length.items())
    yield ""
    yield f"Found within the trained length by the unmodified model: {usual}."
    yield from table([("second copy", "second_copy")], controls=True)
    yield from table([("pass key", "passkey"), ("codes", "keys"), ("answered", "answered")], controls=True)
    reference = next((name for name in REFERENCE if name in methods), None)
    if reference is not None:
        yield ""
        yield (
            f"Differences from {reference} on the same documents. It is better where that of the rise or the second "
            "copy is positive, or that of found negative."
        )
        columns = [("rise", "loss_rise"), ("found", "found_beyond"), ("second copy", "second_copy")]
        yield from table(columns, minus=reference)
    yield from table([("rise inside", "rise_inside"), ("seconds", "seconds")])


def shown(value: Interval | None) -> str:
    """Return a mean with its interval."""
    if value is None:
        return ""
    digits = 3 if abs(value.mean) < 9.9995 else 1
    mean = f"{round(value.mean, digits) + 0.0:.{digits}f}"  # adding zero makes -0 positive
    return mean if value.reach is None else f"{mean} ± {value.reach:.{digits}f}"


def _mean(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return interval(known) if known else None


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 440, 70, 30, 46, 54
"""Size of a panel and its margins, in pixels."""
LINEAR = 0.02
"""Rise up to which the horizontal axis is nearly linear; it is logarithmic above."""
TICKS = (-0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


def picture(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the SVG: one panel per model, rise to the right, found upwards, one point per method and length."""
    panels = "\n".join(_panel(result, index * HEIGHT) for index, result in enumerate(results))
    size = f'viewBox="0 0 {WIDTH} {HEIGHT * len(results)}" width="{WIDTH}" height="{HEIGHT * len(results)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{panels}\n</svg>\n'
    )


def _panel(result: Mapping[str, Any], top: int) -> str:
    by_length = lengths(result)
    points: dict[str, list[tuple[int, Interval, Interval]]] = {}
    for index, cells in enumerate(by_length.values()):
        for method in cells.methods:
            pair = cells.mean(method, "loss_rise"), cells.mean(method, "found_beyond")
            if pair[0] is not None and pair[1] is not None:
                points.setdefault(method, []).append((index, pair[0], pair[1]))
    every = [(rise, found) for each in points.values() for _, rise, found in each]
    usual = [known for cells in by_length.values() if (known := cells.control("found_pieces")) is not None]
    # Means decide the range; intervals are cut off where they are much wider.
    left, right = min(rise.mean for rise, _ in every) - 0.01, max(rise.mean for rise, _ in every) * 1.3 + 0.02
    heights = [found.mean for _, found in every] + [known.mean for known in usual] + [0.0]
    margin = 0.15 * (max(heights) - min(heights))
    low, high = min(heights) - margin, max(heights) + margin

    def across(value: float) -> float:
        start, stop, at = (math.asinh(x / LINEAR) for x in (left, right, min(max(value, left), right)))
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - start) / (stop - start)

    def upwards(value: float) -> float:
        share = (min(max(value, low), high) - low) / max(1e-9, high - low)
        return top + TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)

    lines = [_axes(result, top, across, upwards, (left, right), (low, high))]
    for at in (upwards(known.mean) for known in usual[-1:]):
        lines.append(_line(LEFT, at, WIDTH - RIGHT, at, "#999", "4 3"))
        lines.append(
            f'<text x="{LEFT + 4}" y="{at - 4:.1f}" font-size="10" fill="#666">within the trained length</text>'
        )
    boxes: list[tuple[float, float, float, float]] = []
    for rise, found in every:
        x, y = across(rise.mean), upwards(found.mean)
        boxes.append((x - 5, y - 5, x + 5, y + 5))
    labels = []
    for method, each in points.items():
        number = ORDER.index(method)
        colour = COLOURS[number % len(COLOURS)]
        places = [(across(rise.mean), upwards(found.mean)) for _, rise, found in each]
        lines += [_line(*a, *b, colour, "2 3") for a, b in itertools.pairwise(places)]
        for (shape, rise, found), (px, py) in zip(each, places, strict=True):
            if rise.low is not None and rise.high is not None and found.low is not None and found.high is not None:
                lines.append(_line(across(rise.low), py, across(rise.high), py, colour))
                lines.append(_line(px, upwards(found.low), px, upwards(found.high), colour))
            lines.append(_marker(shape, px, py, colour, filled=number < len(COLOURS)))
        labels.append(_label(method, *places[-1], colour, boxes, top))
    return "\n".join([*lines, *labels, _legend(list(by_length), top)])


def _axes(
    result: Mapping[str, Any], top: int, across: Any, upwards: Any, wide: tuple[float, float], tall: tuple[float, float]
) -> str:
    bottom = top + HEIGHT - BOTTOM
    title = html.escape(f"{result['model']}, trained on {result['trained']:,} tokens")
    lines = [
        f'<text x="{LEFT}" y="{top + 24}" font-size="15">{title}</text>',
        _line(LEFT, bottom, WIDTH - RIGHT, bottom, "#444"),
        _line(LEFT, top + TOP, LEFT, bottom, "#444"),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 38}" text-anchor="middle">rise of the loss, nats</text>',
        f'<text transform="translate(18 {top + HEIGHT / 2}) rotate(-90)" text-anchor="middle">found beyond the trained '
        "length, nats</text>",
    ]
    for tick in TICKS:
        if wide[0] <= tick <= wide[1]:
            at = across(tick)
            lines.append(_line(at, top + TOP, at, bottom, "#eee"))
            lines.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    step = next(
        (x for power in (0.01, 0.1, 1.0, 10.0) for x in (power, 2 * power, 5 * power) if (tall[1] - tall[0]) / x <= 6),
        100.0,
    )
    for number in range(math.ceil(tall[0] / step), math.floor(tall[1] / step) + 1):
        at = upwards(number * step)
        lines.append(_line(LEFT, at, WIDTH - RIGHT, at, "#bbb" if number == 0 else "#eee"))
        lines.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    return "\n".join(lines)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"{dashed} fill="none"/>'


def _marker(shape: int, x: float, y: float, colour: str, *, filled: bool) -> str:
    """Return a circle, square, triangle or diamond: one shape for each length."""
    style = f'stroke="{colour}" stroke-width="1.5" fill="{colour if filled else "white"}"'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5), (5, 0), (0, 5), (-5, 0)),
    }
    if shape not in corners:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    listed = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])
    return f'<polygon points="{listed}" {style}/>'


def _label(text: str, x: float, y: float, colour: str, boxes: list[tuple[float, float, float, float]], top: int) -> str:
    """Return a label at the nearest free place around a point, with a line to it if it is not beside it."""
    width = 6.6 * len(text)
    for radius in range(10, 400, 7):
        for step in range(16):
            angle = step * math.pi / 8
            cx, cy = x + (radius + width / 2) * math.cos(angle), y + radius * math.sin(angle)
            box = (cx - width / 2, cy - 8, cx + width / 2, cy + 5)
            inside = box[0] > LEFT and box[2] < WIDTH - 4 and top + TOP < box[1] and box[3] < top + HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in boxes):
                boxes.append(box)
                end = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
                leader = _line(x, y, *end, "#aaa") if radius > 17 else ""
                halo = 'paint-order="stroke" stroke="white" stroke-width="3"'
                place = f'x="{cx:.1f}" y="{cy + 3:.1f}" text-anchor="middle"'
                return f'{leader}<text {place} fill="{colour}" {halo}>{html.escape(text)}</text>'
    return ""


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _legend(multiples: Sequence[str], top: int) -> str:
    lines = []
    for index, multiple in enumerate(multiples):
        x = WIDTH - RIGHT - 70 * (len(multiples) - index)
        lines.append(_marker(index, x, top + 20, "#444", filled=True))
        lines.append(f'<text x="{x + 9}" y="{top + 24}">{multiple} ×</text>')
    return "\n".join(lines)


if __name__ == "__main__":
    main()
