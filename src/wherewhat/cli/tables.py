"""Tables and lines on the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.markup import escape
from rich.text import Text

from wherewhat.errors import printable, printable_lines
from wherewhat.measures.statistics import in_words
from wherewhat.progress import counted
from wherewhat.report.views import view_of
from wherewhat.rules.roles import ROLES, find_roles, portraits, telling_heads

if TYPE_CHECKING:
    from wherewhat.captures.layer_proofs import ProofTable
    from wherewhat.measures.measurement import Measurement
    from wherewhat.rules.length_methods import ComparisonTable
    from wherewhat.runs.results import MetricSummary, StoredRun


LONGEST_LINE = 100
"""Columns of prose in a wider terminal."""


class Table(table.Table):
    """A table whose narrow columns wrap instead of truncating numbers, below its title and above its caption.

    Control characters of names are shown by their code; a cell or a caption may have several lines.
    """

    def add_column(self, *args: Any, **options: Any) -> None:
        """Add a column as rich's table, with ``overflow="fold"`` by default."""
        super().add_column(*map(_printable, args), **{"overflow": "fold", **options})

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row as rich's table."""
        super().add_row(*map(_printable, cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, caption, self.title, self.caption = self.title, self.caption, None, None
        # Not by rich, which wraps both at the width of the table, however narrow.
        if title:
            yield Constrain(Text.from_markup(str(_printable(title)), style="table.title"), LONGEST_LINE)
        yield from super().__rich_console__(console, options)
        if caption:
            yield Constrain(Text.from_markup(str(_printable(caption)), style="table.caption"), LONGEST_LINE)
        self.title, self.caption = title, caption


def print_line(console: Console, line: object, *, wrap: bool = False, style: str | None = None) -> None:
    """Print a line without markup, with control characters shown by their code.

    Only with ``wrap`` it is wrapped at words: paths are not, so that they can be copied or read by a script.
    """
    console.print(printable(str(line)), soft_wrap=not wrap, markup=False, highlight=False, style=style)


def _printable(value: Any) -> Any:
    return printable_lines(value) if isinstance(value, str) else value


_NARROW = 80
"""Columns of a terminal in which numbers are not wrapped."""
_WIDE = 110
"""Columns of a terminal in which control metrics have a column of their own."""
COUNT_NOTE = (
    "In brackets after a count: its range over single documents. Sinks of several documents must exceed uniform "
    "attention beyond their interval, so that fewer may be counted together."
)
_COUNT = re.compile(r"(?P<count>\S+) of (?P<total>\d+)(?:; (?P<single>.+) in single documents)?")


def control_note(weights: Collection[str]) -> str:
    """Return what the intervals of control models of these weights are over; nothing without such a model."""
    named = [name for name in ("random", "shuffled") if name in weights]
    if not named:
        return ""
    kinds = {"random": "one untrained model", "shuffled": "one draw"}
    first, *others = named
    words = ", ".join([f"{first} is {kinds[first]}", *(f"{name} {kinds[name]}" for name in others)])
    return f"Intervals of control models are over documents: {words}."


def brief_count(words: str) -> tuple[str, str]:
    """Return "14 of 270; 12 to 17 in single documents" as "14 (12 to 17)" and "270"; other words without a total."""
    count = _COUNT.fullmatch(words)
    if count is None:
        return words, ""
    single = f" ({count['single']})" if count["single"] else ""
    return f"{count['count']}{single}", count["total"]


def headline(
    measurement: Measurement,
    runs: Sequence[tuple[str, Sequence[MetricSummary]]],
    *,
    left_out: Mapping[str, str],
    width: int,
) -> Table:
    """Return every metric of the model, its control models, and the control metric, below it on a narrow terminal.

    Runs are weights with summaries; ``left_out`` says by weights why a control model is missing.
    """
    table = Table(title=measurement.summary, caption=measurement.limits, box=None, pad_edge=False)
    if len(runs) > 1:
        table.caption = f"{control_note([weights for weights, _ in runs[1:]])}\n{table.caption}".lstrip()
    for weights, reason in left_out.items():
        table.caption = f"No {weights} control: {escape(reason)}\n{table.caption}"
    table.add_column(view_of(measurement).over)
    for weights, _ in runs:
        table.add_column(weights, no_wrap=width >= _NARROW)
    beside = width >= _WIDE and any(summary.control is not None for summary in runs[0][1])
    if beside:
        table.add_column("control")
    by_name = [{summary.metric.name: summary for summary in summaries} for _, summaries in runs]
    counted_heads = False
    for summary in runs[0][1]:
        metric = summary.metric
        # A number that is undefined for a model, such as a correlation over equal values, is left blank.
        cells = [brief_count(named[metric.name].words() if metric.name in named else "") for named in by_name]
        title = f"{metric.title} ({metric.unit})" if metric.unit else metric.title
        total = cells[0][1]
        counted_heads |= bool(total)
        row = [f"{title}, of {total}" if total else title, *(words for words, _ in cells)]
        if summary.control is None:
            table.add_row(*row)
        elif beside:
            table.add_row(*row, f"{_number(summary.control)}  {metric.control_title}")
        else:
            table.add_row(*row)
            table.add_row(f"  {metric.control_title}", _number(summary.control), style="dim")
    if counted_heads:
        table.caption = f"{COUNT_NOTE} {table.caption}"
    return table


def by_layer(summaries: Sequence[MetricSummary], weights: str, *, width: int) -> Table:
    """Return one line per layer, mean over heads ± 95 % over documents, of as many metrics as fit the terminal."""
    by_head = [summary for summary in summaries if summary.layers]
    shown = by_head[: max(1, (width - 9) // 19)]
    table = Table(title=f"by layer ({weights}): mean over heads ± 95 % over documents")
    if len(shown) < len(by_head):
        left = len(by_head) - len(shown)
        table.caption = f"{left} more metric{'s' * (left > 1)} in scores.parquet, or in a wider terminal"
    table.add_column("layer", justify="right")
    for summary in shown:
        table.add_column(summary.metric.title, justify="right")
    for layer in sorted({i for summary in shown for i in summary.layers}):
        table.add_row(str(layer), *(in_words(s.layers[layer]) if layer in s.layers else "" for s in shown))
    return table


def by_kind(
    runs: Sequence[tuple[str, Sequence[MetricSummary]]], kinds: Mapping[str, Sequence[int]], *, width: int
) -> Table:
    """Return one row per kind of layer with a line per run, of as many metrics as fit the terminal."""
    metrics = [summary.metric for summary in runs[0][1] if summary.kinds]
    shown = metrics[: max(1, (width - 33) // 18)]
    table = Table(title="by kind of layer: mean over heads ± 95 % over documents")
    table.add_column("layers", max_width=18)
    table.add_column("weights")
    for metric in shown:
        table.add_column(metric.title, justify="right")
    by_name = [{summary.metric.name: summary for summary in summaries} for _, summaries in runs]
    for kind, layers in kinds.items():
        columns = [[named.get(metric.name) for named in by_name] for metric in shown]
        cells = (
            "\n".join(summary.words(kind) if summary and kind in summary.kinds else "" for summary in column)
            for column in columns
        )
        table.add_row(f"{counted(len(layers), 'layer')}: {kind}", "\n".join(weights for weights, _ in runs), *cells)
        table.add_section()
    return table


def telling(run: StoredRun) -> Table:
    """Return the heads that show their roles most clearly, with a sentence about each."""
    roles, sentences = find_roles(run), portraits(run)
    table = Table(title="telling heads: the clearest of each role", show_header=False)
    table.add_column("head")
    table.add_column("portrait")
    for role in telling_heads(roles):
        table.add_row(role.name, escape(sentences[role.layer, role.head]))
    if not table.row_count:
        table.add_row("none", "no head has a role other than uniform or mixed")
    names = Counter(role.role for listed in roles.values() for role in listed)
    listed = ", ".join(f"{names[name]} {name}" for name in ROLES if names[name])
    table.caption = f"Heads by role, of {len(roles)}; a head may have several: {listed or 'none'}."
    return table


def compared(comparison: ComparisonTable, summaries: Sequence[MetricSummary], *, width: int) -> list[Table]:
    """Return what a run compares, in as many columns as fit the terminal, and a table of verdicts."""
    overall = {summary.metric.name: summary.overall for summary in summaries}
    table = Table(title="side by side: mean ± 95 % over documents")
    table.add_column(comparison.what)
    longest = max(len(row.name) for row in comparison.rows)
    shown = list(comparison.rows[0].metrics)[: max(1, (width - 4 - longest) // 18)]
    for title in shown:
        table.add_column(title, justify="right")
    for row in comparison.rows:
        cells = [row.metrics[title] for title in shown]
        table.add_row(row.name, *(in_words(overall[x]) if x in overall else "" for x in cells))
    verdicts = Table(title="in words", caption=" ".join(comparison.notes))
    verdicts.add_column(comparison.what)
    verdicts.add_column("verdict")
    for row in comparison.rows:
        verdicts.add_row(row.name, escape(row.verdict))
    return [table, verdicts]


def proof_table(proof: ProofTable) -> Table:
    """Return the numbers of a proof as a table."""
    table = Table(title=escape(proof.title))
    for name in proof.columns:
        table.add_column(name, justify="right" if "err" in name else "left")
    for row in proof.rows:
        table.add_row(*map(escape, row))
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
