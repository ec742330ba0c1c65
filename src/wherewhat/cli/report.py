"""``wherewhat report`` and ``wherewhat export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.terminal import Table, TerminalProgress
from wherewhat.runs.request import ModelRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherewhat.models.source import Weights
    from wherewhat.report.data import Number, Value
    from wherewhat.report.page import Profiled


_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="smollm2 (embedded, the default), a Hugging Face id, a folder, or a .gguf file; several side by side.",
    ),
]
_Weights = Annotated[
    list[str] | None,
    typer.Option(help="trained (default), random or shuffled; repeat to put them side by side."),
]
_Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="A text file, a folder, a .jsonl file, or - ; repeat for several."),
]
_Documents = Annotated[int | None, typer.Option(help="Documents of the decomposition (default: the first 4).")]
_Tokens = Annotated[int, typer.Option(help="Tokens of each document; the slower measurements use 256 at most.")]
_Multihop = Annotated[
    list[Path] | None,
    typer.Option(metavar="DIR", help="A multi-hop training to show, or a folder of them; those in --out are shown."),
]


def _line(value: Value) -> str:
    mean, low, high = value.value.mean, value.value.low, value.value.high
    reach = "" if low is None or high is None else f" ± {(high - low) / 2:.3f}"
    return f"{mean:.3f}{reach}  {value.name}"


@with_fields(ModelRequest, leave_out=("model", "weights"))
def report(
    models: _Models = None,
    weights: _Weights = None,
    text: _Text = None,
    documents: _Documents = None,
    tokens: _Tokens = 512,
    multihop: _Multihop = None,
    out: options.Out = options.DEFAULT_OUT,
    **given: Any,
) -> None:
    """Measure a model and write one HTML file that shows its where and what, and opens offline.

    Axes with their controls, positional and symbolic heads, frequencies, planes, controlled distance, and short
    perturbation and length curves are measured on a few documents. Each measurement is kept in its run directory:
    interrupted, the same command goes on with what is missing. Several models, or a model and its control models, are
    put side by side in one file.
    """
    from wherewhat.report.report import make_report

    made = make_report(
        [
            ModelRequest(model=model, weights=cast("Weights", name), **given)
            for model in models or ["smollm2"]
            for name in weights or ["trained"]
        ],
        out=out,
        text=tuple(text) if text else None,
        documents=documents,
        tokens=tokens,
        multihop=tuple(multihop or ()),
        progress=TerminalProgress(Console(stderr=True)),
    )
    path = made.write(out / f"{made.name}.html")
    console = Console()
    console.print(_alone(made.models[0]) if len(made.models) == 1 else _side_by_side(made.models))
    for one in made.models:
        for line in one.left_out:
            console.print(f"left out of {one.name}: {line}", markup=False, highlight=False)
    console.print(str(path), soft_wrap=True, markup=False, highlight=False)


_TITLE = "mean over heads and documents ± 95 % over documents"


def _alone(model: Profiled) -> Table:
    """The first numbers of a model, beside its controls."""
    table = Table(title=_TITLE, title_justify="left")
    for column in ("", "value", "to compare with"):
        table.add_column(column)
    for number in model.numbers:
        table.add_row(number.title, *("\n".join(map(_line, side)) for side in (number.values, number.controls)))
    return table


def _side_by_side(models: Sequence[Profiled]) -> Table:
    """The first numbers of several models, a column for each."""
    table = Table(title=_TITLE, title_justify="left")
    table.add_column("")
    by_title: list[dict[str, Number]] = []
    for model in models:
        # Markup is for us, not for names that a model brings along.
        table.add_column(escape(model.name))
        by_title.append({number.title: number for number in model.numbers})
    for title in dict.fromkeys(title for numbers in by_title for title in numbers):
        cells = ["\n".join(map(_line, found[title].values)) if title in found else "" for found in by_title]
        table.add_row(title, *cells)
    return table


def export(
    run: Annotated[Path, typer.Argument(help="A finished run directory.")],
    file: Annotated[Path, typer.Argument(help="What to write: .png, .svg, .pdf or .html; or .csv or .parquet.")],
    figure: Annotated[
        str | None, typer.Option(help="map, plane, distance, rates or positions; what suits the run if not given.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric of a map.")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of a distance curve.")] = None,
    head: Annotated[int | None, typer.Option(help="Head of a distance curve.")] = None,
) -> None:
    """Write a finished run as a figure or as a table of all its scores."""
    from wherewhat.report.result import Result

    options = {"metric": metric, "layer": layer, "head": head}
    given = {name: value for name, value in options.items() if value is not None}
    typer.echo(str(Result.load(run).export(file, figure, **given)))
