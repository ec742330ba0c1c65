"""``wherewhat report`` and ``wherewhat export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from wherewhat.boundary import user_path
from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.tables import COUNT_NOTE, Table, brief_count, control_note, print_line
from wherewhat.progress import TerminalProgress
from wherewhat.runs.request import ModelRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherewhat.models.source import Weights
    from wherewhat.report.data import Value
    from wherewhat.report.page import Profiled


_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="smollm2 (embedded, the default), a Hugging Face id, a folder, or a .gguf file; several are compared.",
    ),
]
_Weights = Annotated[
    list[str] | None,
    typer.Option(help="trained (default), random or shuffled; repeat to compare several."),
]
_Documents = Annotated[int | None, typer.Option(help="Documents of the decomposition (default: the first 4).")]
_Tokens = Annotated[
    int | None, typer.Option(help="Tokens of each document (default: 512); the slower measurements use 256 at most.")
]
_Quick = Annotated[
    bool, typer.Option("--quick", help="2 documents of 128 tokens, and no control model but the random one.")
]
_Training = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR", help="A recorded or multi-hop training to show, or a folder, besides those in --out."),
]


@with_fields(ModelRequest, leave_out=("model", "weights"))
def report(
    models: _Models = None,
    weights: _Weights = None,
    text: options.Text = None,
    documents: _Documents = None,
    tokens: _Tokens = None,
    quick: _Quick = False,
    training: _Training = None,
    out: options.Out = options.DEFAULT_OUT,
    again: options.Again = False,
    **fields: Any,
) -> None:
    """Measure a model and write a report: one HTML file that opens offline.

    $ wherewhat report                       # the embedded model
    $ wherewhat report ./my-model --quick    # in about a minute
    $ wherewhat report ./my-model smollm2    # two models side by side

    The three-axis decomposition with its controls, the loss with exactly additive logits, positional and symbolic
    heads, frequencies, planes, controlled distance, and short perturbation and length curves are measured on a few
    documents. The page is written after the first measurement and completed as others finish; its path is shown first.
    Each measurement has its own run directory, and an interrupted report is resumed by the same command.
    Several models, or a model and its control models, are compared in one file.
    """
    from wherewhat.report.report import make_report

    page = make_report(
        [
            ModelRequest(model=model, weights=cast("Weights", name), **fields)
            for model in models or ["smollm2"]
            for name in weights or ["trained"]
        ],
        out=out,
        files=tuple(text) if text else None,
        documents=documents,
        tokens=tokens,
        quick=quick,
        training=tuple(user_path(folder, name="--training") for folder in training or ()),
        again=again,
        progress=TerminalProgress(),
        write=True,
    )
    console = Console()
    for profile in page.models:
        for finding in profile.findings:
            line = f"* {finding}" if len(page.models) == 1 else f"* {profile.name}: {finding}"
            print_line(console, line, wrap=True)
    console.print(_numbers_table(page.models))
    for profile in page.models:
        for number in profile.numbers:
            if number.price:
                line = number.price if len(page.models) == 1 else f"{profile.name}: {number.price}"
                print_line(console, line, wrap=True)
    for profile in page.models:
        for line in profile.left_out:
            print_line(console, f"left out of {profile.name}: {line}", wrap=True)
    print_line(console, out / f"{page.name}.html")


def _numbers_table(models: Sequence[Profiled]) -> Table:
    """Return the headline numbers, one row each: a single model beside its control models, or several models.

    Of several models, the random control has a row of its own below each number.
    """
    from wherewhat.report.data import CONTROLS

    shown = [value.name for model in models for number in model.numbers for value in number.controls]
    controls = {
        weights: control for weights, control in CONTROLS.items() if any(name.startswith(control) for name in shown)
    }
    table = Table(
        title="mean over heads and documents ± 95 % over documents",
        caption=f"{COUNT_NOTE} {control_note(controls)}".rstrip(),
        box=None,
        pad_edge=False,
    )
    alone = len(models) == 1
    table.add_column("")
    for title in ["value", *controls] if alone else [escape(model.name) for model in models]:
        table.add_column(title)
    for title in dict.fromkeys(number.title for model in models for number in model.numbers):
        numbers = [next((number for number in model.numbers if number.title == title), None) for model in models]
        names = list(dict.fromkeys(value.name for number in numbers if number for value in number.values))
        words = [value.words for number in numbers if number for value in number.values]
        totals = {total for _, total in map(brief_count, words) if total}
        several = len(names) > 1
        if several:
            table.add_row(f"{title}, of {totals.pop()}" if len(totals) == 1 else title, style="bold")
        for name in names:
            label = f"  {name}" if several else title
            own = [_words(number.values if number else (), name) for number in numbers]
            beside = {
                weights: [
                    _words(number.controls if number else (), f"{control}, {name}" if several else control)
                    for number in numbers
                ]
                for weights, control in controls.items()
            }
            if alone:
                table.add_row(label, *own, *(words for (words,) in beside.values()))
            else:
                table.add_row(label, *own)
                if "random" in beside:
                    table.add_row("    random control", *beside["random"], style="dim")
        for floor in numbers[0].controls if alone and numbers[0] else ():
            if not floor.name.startswith(tuple(CONTROLS.values())):
                table.add_row(f"  {floor.name}", floor.words, style="dim")
    return table


def _words(values: Sequence[Value], name: str) -> str:
    """Return the value of a name in words, or nothing."""
    return brief_count(next((value.words for value in values if value.name == name), ""))[0]


def export(
    run: Annotated[str, typer.Argument(help="A finished run directory.")],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            parser=options.file_to_write("FILE"),
            help="File to write: .png, .svg, .pdf or .html; or .csv or .parquet.",
        ),
    ],
    figure: Annotated[
        str | None,
        typer.Option(
            help="Name of the figure, such as map or curve (default: that of the measurement); or roles, for a table."
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Metric of a map or range.")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of a figure of one head.")] = None,
    head: Annotated[int | None, typer.Option(help="Head of a figure of one head.")] = None,
    document: Annotated[int | None, typer.Option(help="Document of a curve, counted from 0.")] = None,
    all_keys: Annotated[
        bool | None, typer.Option("--all-keys", help="Scores of a plane or place over all keys, the sink included.")
    ] = None,
) -> None:
    """Write a finished run as a figure or as a table of all its scores.

    $ wherewhat export runs/RUN map.html --metric r
    $ wherewhat export runs/RUN curve.svg --figure distance --layer 19 --head 1
    $ wherewhat export runs/RUN scores.csv
    $ wherewhat export runs/HEADS_RUN roles.csv --figure roles
    """
    from wherewhat.report.result import Result

    chosen = {"metric": metric, "layer": layer, "head": head, "document": document, "all_keys": all_keys}
    arguments = {name: value for name, value in chosen.items() if value is not None}
    print_line(Console(), Result.load(run).export(file, figure, **arguments))
