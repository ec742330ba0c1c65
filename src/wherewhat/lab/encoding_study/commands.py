"""``wherewhat encodings``: run and report a study of encodings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wherewhat.cli.terminal import Table
from wherewhat.lab.encoding_study.summary import (
    ADDITIVITY,
    EVENTS,
    PANELS,
    TOLERANCE,
    RunSummary,
    end_of,
    half_of,
    lasting_half_of,
    over_seeds,
    relations,
)

_SPREAD = "Mean over seeds, then minimum and maximum, or the number of seeds with a value."


def timing_table(runs: Sequence[RunSummary], *, for_good: bool = False) -> Table:
    """Return the step at which half of each change was first reached, or permanently reached, by encoding."""
    titles = {panel.name: panel.title.partition(" (")[0] for panel in PANELS}
    rows = {titles[event]: over_seeds(runs, (lasting_half_of if for_good else half_of)(event)) for event in EVENTS}
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
        {title: over_seeds(runs, end_of(name)) for name, title in names.items()},
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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the study.")] = _DEFAULT_OUT,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ENCODING[:SEED]", help="Only this model; can be repeated.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the trained models.")] = False,
) -> None:
    """Train and measure all models of a recipe that are not finished.

    An interrupted model is resumed. Without a text the models are trained on the embedded prose, which is small and
    suited to a quick test.
    """
    from wherewhat.cli.terminal import TerminalProgress
    from wherewhat.lab.encoding_study.recipe import EncodingRecipe, read_recipe
    from wherewhat.lab.encoding_study.study import run_study

    run_study(
        EncodingRecipe() if recipe is None else read_recipe(recipe),
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
    """Show the results of a study, and write an HTML page and two Parquet files into its folder."""
    from wherewhat.lab.encoding_study.page import write_page, write_parquet
    from wherewhat.lab.encoding_study.study import open_runs
    from wherewhat.lab.encoding_study.summary import summarise_run

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
