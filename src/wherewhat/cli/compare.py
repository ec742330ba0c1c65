"""``wherewhat compare``: group means and trends over all runs of stores."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from wherewhat.cli.options import file_to_write
from wherewhat.cli.tables import Table, print_line
from wherewhat.measures.statistics import Interval, in_words
from wherewhat.progress import counted

if TYPE_CHECKING:
    import polars as pl

    from wherewhat.runs.comparison import RunComparison


_ROWS = 60
"""Rows of a table on the terminal; files hold all of them."""
_Columns = dict[str, Callable[[dict[str, Any]], str]]

Stores = Annotated[list[str], typer.Argument(metavar="DIR…", help="Folders of run directories, or fsspec addresses.")]
By = Annotated[
    str | None,
    typer.Option(
        metavar="FACTS",
        help="Facts to group by, such as model,weights: run, measurement, model, size, checkpoint, step, weights, "
        "encoding, seed, dtype, tokens, documents, text, options.",
    ),
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", help="A metric to compare; repeat for more.")]
Where = Annotated[
    list[str] | None, typer.Option(metavar="FACT=VALUE", help="Only runs with this fact; repeat for more.")
]
Csv = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=file_to_write("--csv"), help="Write the groups to a CSV file."),
]
Parquet = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=file_to_write("--parquet"), help="Write the groups to a Parquet file."),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", parser=file_to_write("--html"), help="Write a page with tables and plots."),
]


def compare(
    stores: Stores,
    by: By = None,
    metric: Metrics = None,
    where: Where = None,
    csv: Csv = None,
    parquet: Parquet = None,
    html: Html = None,
) -> None:
    """Compare all finished runs of one or more stores, by model, size, checkpoint, weights or encoding.

    $ wherewhat compare runs --by model,weights --metric r

    Means are over heads and layers, then documents, then runs; 95 % intervals are over models where a group has
    several, else over runs, else over documents, and n is their number. Grouped by step or size, trends give the
    increase of a metric per factor of ten.
    """
    from wherewhat.options import parse_assignments
    from wherewhat.runs.comparison import compare as compared

    console = Console()
    wanted = parse_assignments(where or (), name="--where")
    facts = None if by is None else [name.strip() for name in by.split(",") if name.strip()]
    comparison = compared(stores, by=facts, metrics=metric, where=wanted)
    console.print(_groups_table(comparison))
    if len(comparison.trends):
        console.print(_trends_table(comparison))
    for name, reason in list(comparison.unreadable.items())[:5]:
        print_line(Console(stderr=True), f"left out {name}: {reason}")
    for path in _save(comparison, csv=csv, parquet=parquet, html=html):
        print_line(console, path)


def _save(comparison: RunComparison, *, csv: Path | None, parquet: Path | None, html: Path | None) -> list[Path]:
    """Write the given files atomically and return their paths."""
    from wherewhat.files import make_folder, write_file

    contents: dict[Path, bytes] = {}
    if csv is not None:
        contents[csv] = comparison.groups.write_csv().encode()
    if parquet is not None:
        buffer = io.BytesIO()
        comparison.groups.write_parquet(buffer)
        contents[parquet] = buffer.getvalue()
    if html is not None:
        from wherewhat.report.page import comparison_page

        contents[html] = comparison_page(comparison).encode()
    for path, content in contents.items():
        make_folder(path.parent)
        write_file(path, content)
    return list(contents)


def _groups_table(comparison: RunComparison) -> Table:
    """Return the metrics of each group with their intervals."""
    from wherewhat.runs.comparison import within_ranges

    columns: _Columns = {"mean": lambda row: _with_interval(row, "mean"), "n": _count}
    title = f"{comparison.runs} runs: mean ± 95 % over the units that n counts"
    table = _table(within_ranges(comparison.groups), title, before="mean", columns=columns)
    if comparison.apart:
        line = f"runs differ in {' and '.join(comparison.apart)} and are not averaged; choose some with --where"
        table.caption = f"{line}\n{table.caption}" if table.caption else line
    return table


def _trends_table(comparison: RunComparison) -> Table:
    """Return the slope of each metric per factor of ten."""
    columns: _Columns = {
        "slope": lambda row: _with_interval(row, "slope"),
        "n": _count,
        "from → to": lambda row: f"{row['first']:.3g} → {row['last']:.3g}",
        "points": lambda row: str(row["points"]),
    }
    title = f"increase per factor of ten of {comparison.trends['along'][0]} ± 95 %"
    return _table(comparison.trends, title, before="along", columns=columns)


def _table(rows: pl.DataFrame, title: str, *, before: str, columns: _Columns) -> Table:
    """Return rows as a table: the facts before a column, then the given columns."""
    table = Table(title=title)
    keys = rows.columns[: rows.columns.index(before)]
    for name in keys:
        table.add_column(name, justify="right" if name in ("step", "size", "seed", "tokens", "documents") else "left")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows.head(_ROWS).iter_rows(named=True):
        table.add_row(*(_fact(row[name], name) for name in keys), *(shown(row) for shown in columns.values()))
    if len(rows) > _ROWS:
        table.caption = f"{len(rows) - _ROWS} more with --csv, --parquet or --html"
    return table


def _count(row: dict[str, Any]) -> str:
    return counted(row["n"], row["over"])


def _fact(value: Any, name: str) -> str:
    """Return a fact for a table, with brackets in names escaped."""
    if value is None:
        return "–"
    if name == "size":
        for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
            if value >= factor:
                return f"{value / factor:.3g}{letter}"
    return f"{value:,}" if name == "step" else escape(str(value))


def _with_interval(row: dict[str, Any], name: str) -> str:
    """Return a mean with its interval."""
    mean, low, high = row[name], row["low"], row["high"]
    return in_words(Interval(mean, low, high, row["n"]))
