"""``wherewhat report``: everything about one model in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from wherewhat.cli import options
from wherewhat.cli.progress import TerminalProgress

if TYPE_CHECKING:
    from wherewhat.report.headline import Value

_DEFAULT_OUT = Path("runs")
_Documents = Annotated[int | None, typer.Option(help="Documents of the decomposition (default: the first 4).")]
_Tokens = Annotated[int, typer.Option(help="Tokens of each document; the slower measurements use 256 at most.")]


def _line(value: Value) -> str:
    mean, low, high = value.value.mean, value.value.low, value.value.high
    reach = "" if low is None or high is None else f" ± {(high - low) / 2:.3f}"
    return f"{mean:.3f}{reach}  {value.name}"


def report(
    model: options.Model = "smollm2",
    text: options.Text = None,
    documents: _Documents = None,
    tokens: _Tokens = 512,
    out: options.Out = _DEFAULT_OUT,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    offline: options.Offline = False,
) -> None:
    """Measure a model and write one HTML file that shows its where and what, and opens offline.

    Axes with their controls, positional and symbolic heads, planes and controlled distance are measured on a few
    documents. Each measurement is kept in its run directory: interrupted, the same command goes on with what is
    missing.
    """
    from wherewhat.pipeline.request import ModelRequest
    from wherewhat.report import make_report

    made = make_report(
        ModelRequest(model=model, device=device, dtype=dtype, offline=offline),
        out=out,
        text=tuple(text) if text else None,
        documents=documents,
        tokens=tokens,
        progress=TerminalProgress(Console(stderr=True)),
    )
    path = made.write(out / f"{made.name}.html")
    console = Console()
    table = Table(title="mean over heads and documents ± 95 % over documents", title_justify="left")
    for column in ("", "trained", "to compare with"):
        table.add_column(column)
    for number in made.numbers:
        table.add_row(number.title, *("\n".join(map(_line, side)) for side in (number.values, number.controls)))
    console.print(table)
    console.print(str(path), soft_wrap=True, markup=False, highlight=False)
