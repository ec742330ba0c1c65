"""``wherewhat claims``: claims of papers judged on a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.tables import Table, print_line
from wherewhat.errors import printable
from wherewhat.progress import TerminalProgress, counted
from wherewhat.runs.request import ModelRequest

_Claims = Annotated[
    list[int] | None, typer.Option("--claim", metavar="N", help="Judge only this claim; repeat for several.")
]
_Documents = Annotated[
    int | None, typer.Option(help="Documents of each measurement (default: the first 4, for words the first 8).")
]
_Tokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of each document of the decomposition (default: 512, or as many as there are); others 256 at most."
    ),
]
_Prompts = Annotated[int, typer.Option(help="Prompts of each kind and size.")]
_File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=options.file_to_write("--file"),
        help="The result's file (default: claims-MODEL.json in --out).",
    ),
]


@with_fields(ModelRequest)
def claims(
    claim: _Claims = None,
    text: options.Text = None,
    documents: _Documents = None,
    tokens: _Tokens = None,
    prompts: _Prompts = 24,
    file: _File = None,
    out: options.Out = options.DEFAULT_OUT,
    again: options.Again = False,
    **fields: Any,
) -> None:
    """Judge the claims of papers about position and content in attention on a model.

    $ wherewhat claims ./my-model
    $ wherewhat claims ./my-model --claim 1 --claim 7

    Each claim has numbers with intervals and controls, a verdict by a stated rule (holds, holds if …, does not hold,
    cannot be told), and what would change it. Claims that do not apply to the model are listed with the reason. Runs
    are shared with other commands, and an interrupted command is resumed. Writes one JSON file, which `wherewhat
    report` with the same folder shows as a section.
    """
    from wherewhat.report.judgement import judge_claims

    request = ModelRequest(**fields)
    judgement = judge_claims(
        request,
        claims=tuple(claim or ()),
        files=tuple(text) if text else None,
        documents=documents,
        tokens=tokens,
        prompts=prompts,
        out=out,
        again=again,
        progress=TerminalProgress(),
    )
    weights = "" if request.weights == "trained" else f"-{request.weights}"
    path = judgement.save(file or out / f"claims-{judgement.data['model']}{weights}.json")
    console = Console()
    judged_on = counted(len(judgement.data["documents"]), "document")
    title = f"{judgement.data['model']} ({judgement.data['weights']}): claims judged on {judged_on}"
    console.print(claims_table(judgement.data["claims"], title=title, over="documents, prompts or heads"))
    print_line(console, path)


def claims_table(claims: Sequence[dict[str, Any]], *, title: str, over: str) -> Table:
    """Return judged claims, as they are stored, with numbers, controls and verdicts; intervals are ``over`` units."""
    from wherewhat.rules.claims.claim import verdict_words

    table = Table(
        title=escape(title),
        caption=f"Intervals are 95 % over {over}. Rules and thresholds: documentation, Claims.",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column("number", justify="right")
    table.add_column("claim")
    for claim in claims:
        table.add_row(f"[bold]{claim['number']}[/bold]", f"[bold]{escape(claim['statement'])}[/bold]")
        table.add_row("", f"[bold]Verdict:[/bold] {escape(verdict_words(claim))}")
        lines = [_number(number) for number in claim["numbers"]]
        if claim["verdict"] != "holds":
            words = {False: "no", None: "open"}
            lines += [f"{words[x['outcome']]}: {x['statement']}" for x in claim["parts"] if not x["outcome"]]
            lines += claim["notes"]
        for line in lines:
            table.add_row("", Padding(Text(printable(line)), (0, 0, 0, 2)))
        if claim["change"]:
            table.add_row("", Text(f"What would change it: {printable(claim['change'])}", style="dim"))
        table.add_row("", "")
    return table


def _number(number: dict[str, Any]) -> str:
    from wherewhat.rules.claims.claim import number_words

    control = "" if number["control"] is None else f"; {number['control']:.3g} {number['control_title']}"
    return f"{number_words(number)} {number['title']}{control}"
