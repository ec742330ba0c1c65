"""Tables of the study of encodings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from wherewhat.cli.tables import Table
from wherewhat.lab.encoding_study.summary import (
    ADDITIVITY,
    EVENTS,
    PANELS,
    TOLERANCE,
    RunSummary,
    over_seeds,
    relations,
)

_SPREAD = "Mean over seeds, then minimum and maximum, or the number of seeds with a value."


def timing_table(runs: Sequence[RunSummary], *, for_good: bool = False) -> Table:
    """Return the step at which half of each change was first reached, or permanently reached, by encoding."""
    titles = {panel.name: panel.title.partition(" (")[0] for panel in PANELS}
    steps = {event: [(run.lasting if for_good else run.half)[event] for run in runs] for event in EVENTS}
    rows = {titles[event]: over_seeds(runs, values) for event, values in steps.items()}
    reached = "permanently reached" if for_good else "first reached"
    return _by_encoding(
        f"step at which half of the change from step 0 to the end was {reached}",
        f"{_SPREAD} Interpolated linearly in log(1 + step); none where the end of a curve is within a quarter of its "
        "range from the start.",
        rows,
        "{:,.0f}",
    )


def ending_table(runs: Sequence[RunSummary]) -> Table:
    """Return results after training by encoding: loss, additivity and robustness."""
    names = {
        "loss": "loss, nats/byte",
        "r": "r",
        "r_behaviour": "r of behaviour",
        "additive_cost": "cost of additive logits",
        "positional": "pure positional heads",
        "symbolic": "pure symbolic heads",
        "rise_words": "increase, words transposed",
        "rise_adjacent_words": "increase, adjacent words",
        "rise_position_jitter": "increase, positions jittered",
        "rise_length": "increase, longer texts",
        "rise_length_best": "the same, best method",
    }
    table = _by_encoding(
        "results at the end of training",
        f"{_SPREAD} Increases of the loss are in nats per byte: on unperturbed targets, with 10 % perturbed; and "
        "beyond twice the context compared to the second half of the context.",
        {title: over_seeds(runs, [run.end(name) for run in runs]) for name, title in names.items()},
        "{:.3f}",
    )
    methods = {run.encoding: run.best_method for run in runs}
    table.add_row("best method", *(method or "-" for method in methods.values()))
    return table


def relation_table(runs: Sequence[RunSummary]) -> Table:
    """Return rank correlations of additivity and robustness over encodings."""
    found = relations(runs)
    count = max((relation.n for relation in found.values()), default=0)
    table = Table(
        title=f"rank correlation over at most {count} encodings",
        title_justify="left",
        caption="Spearman's ρ of means over seeds, 95 % bootstrap interval over encodings, and exact permutation p. "
        "With this few encodings only a nearly perfect order is significant.",
        caption_justify="left",
    )
    table.add_column("")
    for title in ADDITIVITY.values():
        table.add_column(title, justify="right")
    for tolerance, title in TOLERANCE.items():
        cells = []
        for additivity in ADDITIVITY:
            one = found[additivity, tolerance]
            cells.append(
                "too few"
                if math.isnan(one.rho)
                else f"{one.rho:+.2f} ({one.low:+.2f} to {one.high:+.2f}), p = {one.p:.2f}, n = {one.n}"
            )
        table.add_row(title, *cells)
    return table


def _by_encoding(title: str, caption: str, rows: Mapping[str, Mapping[str, list[float]]], form: str) -> Table:
    """Return a table with a column for each encoding, from every run's values by row and encoding."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    for encoding in next(iter(rows.values())):
        table.add_column(encoding, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(_cell(of_seeds, form) for of_seeds in values.values()))
    return table


def _cell(values: list[float], form: str) -> str:
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "none"
    mean = form.format(sum(known) / len(known))
    if len(known) < len(values):
        return f"{mean}\n{len(known)} of {len(values)}"
    return mean if len(known) < 2 else f"{mean}\n{form.format(min(known))}\n{form.format(max(known))}"
