"""``wherewhat compare``: everything in stores, side by side."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from wherewhat.cli.terminal import Table

if TYPE_CHECKING:
    import polars as pl

    from wherewhat.runs.comparison import RunComparison


_ROWS = 60
"""Lines of a table on the terminal; files hold all of them."""

Stores = Annotated[list[str], typer.Argument(metavar="DIR…", help="Folders of run directories, or fsspec addresses.")]
By = Annotated[
    str | None,
    typer.Option(
        metavar="FACTS",
        help="What to group by, such as model,weights: of run, measurement, model, size, checkpoint, step, weights, "
        "encoding, seed, dtype, tokens, text.",
    ),
]
Metrics = Annotated[list[str] | None, typer.Option("--metric", help="A metric to compare; repeat for more.")]
Where = Annotated[list[str] | None, typer.Option(metavar="FACT=VALUE", help="Only such runs; repeat for more.")]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the groups to a CSV file.")]
Parquet = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the groups to a Parquet file.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with tables and plots.")]


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

    Means are over heads and layers, then documents, then runs; intervals (95 %) are over models where a group has
    several, else over runs, else over documents, and n says how many. Grouped by step or size, trends say how much a
    metric rises with each tenfold.
    """
    from wherewhat.options import parse_assignments
    from wherewhat.runs.comparison import compare as compared

    console = Console()
    wanted = {name: str(value) for name, value in parse_assignments(where or (), name="--where").items()}
    facts = None if by is None else [name.strip() for name in by.split(",") if name.strip()]
    found = compared(stores, by=facts, metrics=metric, where=wanted)
    console.print(groups_table(found))
    if len(found.trends):
        console.print(trends_table(found))
    for name, reason in list(found.unreadable.items())[:5]:
        Console(stderr=True).print(f"left out {name}: {reason}", soft_wrap=True, markup=False, highlight=False)
    for path in save(found, csv=csv, parquet=parquet, html=html):
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)


def save(found: RunComparison, *, csv: Path | None, parquet: Path | None, html: Path | None) -> list[Path]:
    """Write what was asked for, each file whole or not at all, and return the paths."""
    from wherewhat.files import make_folder, write_file

    contents: dict[Path, bytes] = {}
    if csv is not None:
        contents[csv] = found.groups.write_csv().encode()
    if parquet is not None:
        buffer = io.BytesIO()
        found.groups.write_parquet(buffer)
        contents[parquet] = buffer.getvalue()
    if html is not None:
        from wherewhat.report.comparison import page

        contents[html] = page(found).encode()
    for path, content in contents.items():
        make_folder(path.parent)
        write_file(path, content)
    return list(contents)


def groups_table(found: RunComparison) -> Table:
    """Metrics by group, with their intervals."""
    table = Table(title=f"{found.runs} runs: mean ± 95 % over what n counts", title_justify="left")
    keys = _keys(found.groups, before="mean")
    for name in keys:
        table.add_column(name, justify="right" if name in ("step", "size", "seed", "tokens") else "left")
    for name in ("mean", "n"):
        table.add_column(name, justify="right")
    for row in found.groups.head(_ROWS).iter_rows(named=True):
        many = f"{row['n']} {row['over']}{'s' if row['n'] != 1 else ''}"
        table.add_row(*(cell(row[name], name) for name in keys), with_reach(row["mean"], row["high"]), many)
    return _captioned(table, found.groups)


def trends_table(found: RunComparison) -> Table:
    """Rise of each metric for every tenfold."""
    along = found.trends["along"][0]
    table = Table(title=f"rise with each tenfold of {along} ± 95 %", title_justify="left")
    keys = _keys(found.trends, before="along")
    for name in (*keys, "rise", "n", "from → to", "points"):
        table.add_column(name)
    for row in found.trends.head(_ROWS).iter_rows(named=True):
        many = f"{row['n']} {row['over']}{'s' if row['n'] != 1 else ''}"
        ends = f"{row['first']:.3g} → {row['last']:.3g}"
        reach = with_reach(row["slope"], row["high"])
        table.add_row(*(cell(row[name], name) for name in keys), reach, many, ends, str(row["points"]))
    return _captioned(table, found.trends)


def cell(value: Any, name: str) -> str:
    """A fact in a table; names are text, whatever brackets they hold."""
    if value is None:
        return "–"
    if name == "size":
        for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
            if value >= factor:
                return f"{value / factor:.3g}{letter}"
    return f"{value:,}" if name == "step" else escape(str(value))


def with_reach(mean: float, high: float | None) -> str:
    """Mean ± reach, where there is an interval."""
    return f"{mean:.4g}" if high is None or high != high else f"{mean:.4g} ± {high - mean:.2g}"


def _keys(table: pl.DataFrame, *, before: str) -> list[str]:
    return table.columns[: table.columns.index(before)]


def _captioned(table: Table, rows: pl.DataFrame) -> Table:
    if len(rows) > _ROWS:
        table.caption = f"{len(rows) - _ROWS} more with --csv, --parquet or --html"
        table.caption_justify = "left"
    return table
