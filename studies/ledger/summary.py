"""The tables of costs in ``docs/scaling.md``, from the results in this folder.

    python studies/ledger/summary.py            # prints the tables
    python studies/ledger/summary.py --write    # puts them into the page

The results are written by ``python benchmarks/ledger.py --json studies/ledger/NAME.json``, one file for each model and
length. A test compares tables and page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "scaling.md"
MODELS = {"SmolLM2-135M-Instruct": (512, 2048), "8B": (512,)}
"""Lengths in the table of times, by model; those of models without a file are left out."""

MACHINES = {"CPU, aarch64": "2 ARM cores", "CPU, x86_64": "x86", "NVIDIA H200": "one H200"}
"""Machines in words."""

OWN_TEXTS = ("prompts",)
"""Measurements that generate their texts, whose cost does not depend on the length of documents."""

SEVERAL = {"together": "*axes, distance, planes, heads and attention together*", "report": "*a whole report*"}
"""Rows of several measurements in words."""

Ledger = dict[str, Any]


def results(folder: Path = FOLDER) -> list[Ledger]:
    """Return the stored results, small models first."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda one: (one["parameters"], one["tokens"]))


def machine(one: Ledger) -> str:
    """Return the machine of a result in words."""
    words = MACHINES.get(one["device"], one["device"])
    return f"{words}, {one['threads']} thread{'s' * (one['threads'] > 1)}" if one["threads"] else words


def passes(found: list[Ledger]) -> Iterator[str]:
    """Yield, for each result, a table of costs in forward passes."""
    for one in found:
        rows = one["measurements"]
        plain = median(row["plain_seconds"] / row["documents"] for row in rows.values())
        head = f"{one['model']}, {one['dtype']}, {machine(one)}, {one['documents']} × {one['tokens']:,} tokens"
        known = [row["plain_mib"] for row in rows.values() if row["plain_mib"] is not None]
        peak = f", and {size(median(known))} beside the weights" if known else ""
        yield f"**{head}.** A plain pass over one document takes {seconds(plain)}{peak}."
        yield ""
        yield "| measurement | cost in passes | passes run | ratio | peak memory | beyond the pass | documents timed |"
        yield "|---|---|---|---|---|---|---|"
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["passes"]):
            value = f"**{row['passes']:.0f}**" if row["passes"] > 60 else number(row["passes"])
            yield (
                f"| {name} | {value} | {number(row['floor'])} | {row['ratio']:.2f} | {size(row['peak_mib'])} | "
                f"{size(row['memory_mib'])} | {row['timed']} |"
            )
        for name, row in one.get("several", {}).items():
            ran = "" if row["floor"] is None else number(row["floor"])
            yield (
                f"| {SEVERAL[name]} | {number(row['passes'])} | {ran} | | {size(row['peak_mib'])} | "
                f"{size(row['memory_mib'])} | {row['timed']} |"
            )
        yield ""
        if one["skipped"]:
            yield "Not measured: " + "; ".join(f"{name} ({why})" for name, why in one["skipped"].items()) + "."
            yield ""


def times(found: list[Ledger]) -> Iterator[str]:
    """Yield the table of time and memory for one document, by model, length and measurement."""
    by_model: dict[str, list[Ledger]] = {}
    for one in found:
        by_model.setdefault(one["model"], []).append(one)
    columns = [(model, n) for model, lengths in MODELS.items() if model in by_model for n in lengths]
    names = list(dict.fromkeys(name for one in found for name in one["measurements"]))
    yield "| measurement | " + " | ".join(f"{model}, {n:,}" for model, n in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in names:
        yield f"| {name} | " + " | ".join(cell(by_model[model], name, n) for model, n in columns) + " |"


def cell(known: list[Ledger], name: str, n: int) -> str:
    """Return time and memory of one document of n tokens: measured, or computed from the longest shorter ones."""
    of_name = [one for one in known if name in one["measurements"] and one["tokens"] <= n]
    if not of_name:
        return ""
    one = of_name[-1]
    row = one["measurements"][name]
    taken = row["seconds"] / row["documents"]
    if one["tokens"] == n:
        return cost(taken, row["peak_mib"])
    if name in OWN_TEXTS:
        return ""
    taken *= operations(one, n) / operations(one, one["tokens"])
    memory = None if row["peak_mib"] is None else row["peak_mib"] * n / one["tokens"]
    return f"*{cost(taken, memory)}*"


def cost(taken: float, memory: float | None) -> str:
    """Return time, and memory where it is known."""
    return seconds(taken) if memory is None else f"{seconds(taken)}, {size(memory)}"


def operations(one: Ledger, n: int) -> float:
    """Return the operations of a forward pass over n tokens, causal attention included."""
    return float(2 * one["parameters"] * n + 2 * n**2 * one["hidden"] * one["layers"])


def hour(found: list[Ledger]) -> Iterator[str]:
    """Yield the table of documents that one hour of a GPU measures, or how to measure them."""
    found = [one for one in found if one["threads"] is None]
    if not found:
        yield "◆ `python benchmarks/ledger.py --shape 8B --documents 8 --json studies/ledger/8B.json`."
        return
    names = list(dict.fromkeys(name for one in found for name in one["measurements"]))
    yield "| measurement | " + " | ".join(f"{one['model']}, {one['tokens']:,} tokens" for one in found) + " |"
    yield "|---" * (len(found) + 1) + "|"
    for name in names:
        rows = [one["measurements"].get(name) for one in found]
        cells = ["" if row is None else f"{3600 * row['documents'] / row['seconds']:,.0f}" for row in rows]
        yield f"| {name} | " + " | ".join(cells) + " |"


def number(value: float) -> str:
    """Return a number of passes with as many digits as matter."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def seconds(value: float) -> str:
    """Return a time in words."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"


def size(mib: float | None) -> str:
    """Return memory in words; 0 for less than none, where a plain pass with its logits needs more."""
    if mib is None:
        return ""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{max(0.0, mib):.0f} MiB"


SECTIONS = {"passes": passes, "times": times, "hour": hour}


def filled(page: str, found: list[Ledger]) -> str:
    """Return the page with its tables replaced by those of the results."""
    for name, lines in SECTIONS.items():
        first, end = f"<!-- ledger: {name} -->\n", f"<!-- end of ledger: {name} -->"
        before, rest = page.split(first)
        page = before + first + "\n".join(["", *lines(found)]).rstrip() + "\n\n" + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(filled(PAGE.read_text("utf-8"), results()), encoding="utf-8")
    else:
        for section in SECTIONS.values():
            sys.stdout.write("\n".join([*section(results()), "", ""]))
