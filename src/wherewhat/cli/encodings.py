"""``wherewhat encodings``: the same small language model under every encoding, from the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="encodings",
    help="Train the same small language model under every encoding and see when where and what come apart.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_DEFAULT_OUT = Path("runs/encodings")


@app.command()
def run(
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file such as recipes/encodings.toml; its values if none."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to train on, plain or .gz, in place of the recipe's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the study.")] = _DEFAULT_OUT,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ENCODING[:SEED]", help="Only this model; repeat for more.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the trained models too.")] = False,
) -> None:
    """Train and measure all models of a recipe that are not finished yet.

    Begun before, a model goes on where it stopped; done before, it is left as it is. Without a text it learns the
    embedded prose, which is small: good for a try.
    """
    from wherewhat.cli.progress import TerminalProgress
    from wherewhat.encodings.recipe import Recipe, read_recipe
    from wherewhat.encodings.study import run_study

    run_study(
        Recipe() if recipe is None else read_recipe(recipe),
        out=out,
        text=text,
        device=device,
        only=tuple(only or ()),
        keep=keep,
        progress=TerminalProgress(Console(stderr=True)),
        finished=typer.echo,
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that 'run' filled.")] = _DEFAULT_OUT,
) -> None:
    """Show what a study found, and write it as one HTML page and two Parquet files into its folder."""
    from wherewhat.cli.encodings_tables import ending_table, relation_table, timing_table
    from wherewhat.encodings.page import write_page
    from wherewhat.encodings.parquet import write_parquet
    from wherewhat.encodings.runs import open_runs
    from wherewhat.encodings.summary import summarise_run

    runs = open_runs(folder)
    summaries = [summarise_run(one) for one in runs]
    written = [*write_parquet(folder, runs), write_page(folder, runs, summaries)]
    console = Console()
    for table in (
        timing_table(summaries),
        timing_table(summaries, for_good=True),
        ending_table(summaries),
        relation_table(summaries),
    ):
        console.print(table)
    for path in written:
        console.print(str(path), soft_wrap=True, markup=False, highlight=False)
