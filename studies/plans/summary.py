"""The tables of ready plans in ``docs/plan.md``, from the results in this folder.

    python studies/plans/summary.py            # prints the tables
    python studies/plans/summary.py --write    # puts them into the page

The results are written by ``python studies/plans/make.py MODEL``, one file for each model. A test compares tables and
page.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wherewhat.measures.statistics import in_words, interval
from wherewhat.measures.variants import LEAST_GAIN
from wherewhat.plans.costs import outcome_areas, outcome_curve
from wherewhat.plans.selectors import CANDIDATES
from wherewhat.plans.sentences import with_interval

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "plan.md"
TITLES = {
    "smollm2": "SmolLM2-135M",
    "tinyllama-1.1b": "TinyLlama-1.1B",
    "gemma-3-270m": "Gemma-3-270M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
}
"""Models by file name, in the order of the tables."""

AREAS: dict[str, tuple[str, Callable[..., str]]] = {
    "cost": ("rise plus lost retrieval, nats", min),
    "rise": ("rise, nats", min),
    "part": ("part found", max),
}
"""Areas in words, and which selector is the best."""

Outcome = Mapping[str, float]


def results(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return the stored results by file name, in the order of the titles."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    order = [*TITLES, *sorted(found.keys() - TITLES.keys())]
    return {name: found[name] for name in order if name in found}


def documents(plan: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcomes of a plan by document."""
    return list(plan["outcomes"].values())


def section(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the section; none without results."""
    if not found:
        return
    yield "## Ready plans"
    yield ""
    one = next(iter(found.values()))
    goal = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in one["goal"].items())
    yield from paragraph(
        "Each plan is a file that `ww.Plan.load` reads and `ww.planned` applies. It belongs to the "
        "[weights](real-models.md) that were measured; others, such as those before quantisation, need "
        "`other_weights=True`. One command makes it:"
    )
    yield "```console"
    yield f"$ wherewhat plan MODEL {goal} --tokens {one['tokens']} --documents {len(documents(one['groups']))}"
    yield "```"
    yield ""
    yield from paragraph("`python studies/plans/make.py MODEL` also makes the plans that it is compared with.")
    for name, one in found.items():
        rows, base = outcome_curve(documents(one["groups"]))
        none = next(row for row in rows if row["selector"] == "none")
        yield from paragraph(
            f"**{TITLES.get(name, name)}**: {one['dtype']}, {one['device']}, {one['tokens']:,} tokens, window "
            f"{one['window']}, {one['choosing']} documents for choosing and {len(documents(one['groups']))} others for "
            f"measuring. Unchanged, the model gains {with_interval(base['found'])} nats from planting; with all groups "
            f"limited the loss rises by {with_interval(none['rise'])}."
        )
    yield from ready(found)
    yield ""
    yield from compared(found)
    layers = {name: one for name, one in found.items() if "layers" in one}
    if layers:
        yield ""
        yield from by_layer(layers)


def paragraph(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph and an empty one."""
    yield from textwrap.wrap(text, 130, break_long_words=False, break_on_hyphens=False)
    yield ""


def ready(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the table of ready plans."""
    goal = next(iter(found.values()))["goal"]
    reached = f"{100 * goal['min_found']:g} % found at a rise of at most {goal['max_rise']:g}"
    yield from paragraph(
        f"A ready plan keeps 4 sinks and the smallest share of groups with at least {reached} on the documents for "
        "choosing. Its rise and part found are those on the other documents, ± 95 % over them. The smallest share on "
        "these is the smallest one measured whose means reach the same. The share of the cache is that of a text of "
        "the trained length. Seconds are those of plans at 25 % of the groups, loading not included."
    )
    yield (
        "| plan | groups in full | selector of `auto` | rise, nats | part found | smallest share, other documents | "
        "share of the cache | seconds, `auto` and `ranks` |"
    )
    yield "|---" * 8 + "|"
    for name, one in found.items():
        plan = one["groups"]
        missed = one["goal_missed"] is not None
        title = TITLES.get(name, name)
        rows = [row for selector in ("auto", "none", "all") for row in rows_of(plan, selector)]  # none and all: 0 and 1
        own = next(row for row in rows if row["share"] == plan["share"])
        cells = [
            title if missed else f"[{title}](plans/{name}.json)",
            "none reaches the goal" if missed else kept(plan, plan["share"]),
            f"`{plan['selector']}`",
            with_interval(own["rise"]),
            found_part(own["part"]),
            smallest(one, goal),
            f"{plan['share_of_cache']:.2f} of {plan['context']:,} tokens",
            times(one.get("seconds")),
        ]
        if missed:
            cells[3:5] = ["", ""]
            cells[6] = ""
        yield "| " + " | ".join(cells) + " |"


def rows_of(plan: Mapping[str, Any], selector: str) -> list[dict[str, Any]]:
    """Return rise and part found of a selector by share."""
    return [row for row in outcome_curve(documents(plan))[0] if row["selector"] == selector]


def kept(plan: Mapping[str, Any], share: float) -> str:
    """Return how many groups a share keeps, in words."""
    count = round(share * plan["units"])
    return f"{count} of {plan['units']}, {100 * count / plan['units']:.0f} %"


def smallest(one: Mapping[str, Any], goal: Mapping[str, float]) -> str:
    """Return the smallest share of the ready plan's selector whose means reach the goal on documents for measuring."""
    ready_plan = one["groups"]
    rows = rows_of(ready_plan, "auto") + rows_of(one["curves"], ready_plan["selector"])
    for row in sorted(rows, key=lambda row: row["share"]):
        part = row["part"]
        if part is not None and part["mean"] >= goal["min_found"] and row["rise"]["mean"] <= goal["max_rise"]:
            return kept(ready_plan, row["share"])
    return "none"


def found_part(part: Mapping[str, float | None] | None) -> str:
    """Return a part found with its interval; nothing if a document has hardly any gain."""
    return "" if part is None else with_interval(part, percent=True)


def times(seconds: Mapping[str, float] | None) -> str:
    """Return the times of two plans and their ratio."""
    if seconds is None:
        return ""
    auto, ranks = seconds["auto"], seconds["ranks"]
    return f"{auto:.1f} and {ranks:.1f} (ratio {auto / ranks:.1f})"


def compared(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the table of ``auto`` beside the selector that is the best with hindsight."""
    yield from paragraph(
        "**`auto` and the best selector with hindsight.** Areas under the curves by groups, on the documents for "
        "measuring: rise plus lost retrieval, by which `auto` chooses at a given share, and its two parts. The best "
        "selector is that of the six with the best area on these documents, for each area alone, so it has an "
        "advantage by chance, and the one with the smallest rise may find little. Differences are paired by document, "
        "± 95 %. The last column says whether `auto` is worse than one of the two by more than the interval."
    )
    yield "| model | area | `auto` | best with hindsight | `auto` minus best | `auto` minus `ranks` | clearly worse |"
    yield "|---" * 7 + "|"
    for name, one in found.items():
        outcomes = documents(one["curves"])
        rows = {row["selector"]: row for row in outcome_areas(outcomes)["rows"]}
        for area, (title, choose) in AREAS.items():
            own = {selector: row[area] for selector, row in rows.items() if row[area] is not None}
            names = [selector for selector in CANDIDATES if selector in own]
            if not names:
                continue
            best = choose(names, key=lambda selector: own[selector]["mean"])
            differences = [minus(outcomes, area, other) for other in (best, "ranks")]
            pairs = zip(("the best", "`ranks`"), differences, strict=True)
            worse = [f"**than {other}**" for other, difference in pairs if is_worse(area, difference)]
            cells = [TITLES.get(name, name), title, with_interval(own["auto"])]
            cells += [
                f"`{best}`, {with_interval(own[best])}",
                *map(difference_in_words, differences),
                ", ".join(worse) or "no",
            ]
            yield "| " + " | ".join(cells) + " |"


def minus(outcomes: Sequence[Outcome], area: str, other: str) -> dict[str, float]:
    """Return an area of ``auto`` minus that of another selector, paired by document."""
    rows = outcome_areas(outcomes, reference=other)["rows"]
    found: dict[str, float] = next(row for row in rows if row["selector"] == "auto")[f"more_{area}"]
    return found


def is_worse(area: str, difference: Mapping[str, float]) -> bool:
    """Return whether all of a difference of areas from another selector is a loss."""
    return difference["high"] < 0 if area == "part" else difference["low"] > 0


def difference_in_words(difference: Mapping[str, float]) -> str:
    """Return a difference with its interval."""
    same = difference["low"] == difference["high"] == 0
    return "0, the same choices" if same else with_interval(difference)


def by_layer(found: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the table of plans by layer."""
    yield from paragraph(
        "**Whole layers**, on the same documents: rise in nats and part found with `auto`, and their differences from "
        "layers at equal intervals and from one random draw, paired by document, ± 95 %. `auto` is better where the "
        "difference of the rise is negative and that of the part positive."
    )
    yield (
        "| model | layers in full | sinks | selector of `auto` | rise | part found | rise minus `interleaved` | part "
        "minus `interleaved` | rise minus `random` | part minus `random` |"
    )
    yield "|---" * 10 + "|"
    for name, one in found.items():
        for plan in one["layers"]:
            own = next(row for row in rows_of(plan, "auto") if row["share"] == plan["share"])
            cells = [TITLES.get(name, name), kept(plan, plan["share"]), str(plan["sinks"]), f"`{plan['selector']}`"]
            cells += [with_interval(own["rise"]), found_part(own["part"])]
            for other in ("interleaved", "random"):
                cells += differences_at(documents(plan), plan["share"], other)
            yield "| " + " | ".join(cells) + " |"


def differences_at(outcomes: Sequence[Outcome], share: float, other: str) -> list[str]:
    """Return rise and part found of ``auto`` minus those of another selector at a share, paired by document."""
    own, others = f"auto_{share!r}", f"{other}_{share!r}"
    rise = interval([one[f"loss_{own}"] - one[f"loss_{others}"] for one in outcomes])
    if min(one["found"] for one in outcomes) <= LEAST_GAIN:
        return [in_words(rise), ""]
    part = interval([(one[f"found_{own}"] - one[f"found_{others}"]) / one["found"] for one in outcomes])
    return [in_words(rise), in_words(part, percent=True)]


FIRST, END = "<!-- ready plans -->\n", "<!-- end of ready plans -->"


def filled(page: str, found: Mapping[str, dict[str, Any]]) -> str:
    """Return the page with its section replaced by that of the results."""
    before, rest = page.split(FIRST)
    lines = [*section(found)]
    return before + FIRST + "".join(f"{line}\n" for line in ["", *lines, ""] if lines) + END + rest.split(END)[1]


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(filled(PAGE.read_text("utf-8"), results()), encoding="utf-8")
    else:
        sys.stdout.write("\n".join([*section(results()), ""]))
