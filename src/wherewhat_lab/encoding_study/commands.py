"""``wherewhat encodings``: run and report a study of encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wherewhat.boundary import user_path
from wherewhat.cli.options import folder_to_write
from wherewhat.cli.tables import print_line
from wherewhat.progress import TerminalProgress

app = typer.Typer(
    name="encodings",
    help="Train a small language model with every position encoding and record the three-axis fit during training.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_DEFAULT_OUT = Path("runs/encodings")


@app.command()
def run(
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A TOML file such as recipes/encodings.toml, whose values are the defaults."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to train on, plain or .gz, instead of the recipe's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: Annotated[
        Path, typer.Option(metavar="DIR", parser=folder_to_write("--out", writable=False), help="Folder for the study.")
    ] = _DEFAULT_OUT,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ENCODING[:SEED]", help="Only this model; can be repeated.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the trained models.")] = False,
) -> None:
    """Train and measure all models of a recipe that are not finished.

    An interrupted model is resumed. Without a text the models are trained on the embedded prose, which is small and
    suited to a quick test.
    """
    from wherewhat_lab.encoding_study.recipe import EncodingRecipe, read_recipe
    from wherewhat_lab.encoding_study.study import run_study

    run_study(
        EncodingRecipe() if recipe is None else read_recipe(recipe),
        out=out,
        text=text,
        device=device,
        only=tuple(only or ()),
        keep=keep,
        progress=TerminalProgress(),
        finished=typer.echo,
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that 'run' filled.")] = _DEFAULT_OUT,
) -> None:
    """Show the results of a study, and write an HTML page and two Parquet files into its folder."""
    from wherewhat_lab.encoding_study.page import ending_table, relation_table, timing_table, write_page, write_parquet
    from wherewhat_lab.encoding_study.study import open_runs
    from wherewhat_lab.encoding_study.summary import summarise_run

    runs = open_runs(user_path(folder, name="DIR"))
    summaries = [summarise_run(run) for run in runs]
    written = [*write_parquet(folder, runs), write_page(folder, runs, summaries)]
    console = Console()
    console.print(timing_table(summaries))
    console.print(timing_table(summaries, for_good=True))
    console.print(ending_table(summaries))
    console.print(relation_table(summaries))
    for path in written:
        print_line(console, path)
