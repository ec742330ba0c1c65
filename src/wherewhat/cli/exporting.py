"""``wherewhat export``: a finished run as a picture for a paper, or as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from wherewhat.figures import Result

    options = {"metric": metric, "layer": layer, "head": head}
    given = {name: value for name, value in options.items() if value is not None}
    typer.echo(str(Result.load(run).export(file, figure, **given)))
