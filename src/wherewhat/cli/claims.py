"""``wherewhat claims``: claims of papers judged on models."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wherewhat.boundary import user_path
from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.tables import LONGEST_LINE, print_line
from wherewhat.errors import ConfigError, printable
from wherewhat.files import slug
from wherewhat.progress import TerminalProgress, counted
from wherewhat.runs.request import ModelRequest

_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="smollm2 (embedded, the default), a Hugging Face id, a folder, a .gguf file, or the .json file of an "
        "earlier result; several are shown side by side on the page.",
    ),
]
_Claims = Annotated[
    list[int] | None,
    typer.Option("--claim", metavar="N", help="Judge only this claim, and print all about it; repeat for several."),
]
Details = Annotated[bool, typer.Option("--details", help="Print numbers, parts and stability of every claim.")]
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
_Controls = Annotated[
    int, typer.Option(help="Random control models of claim 5, with consecutive seeds; three show how much it varies.")
]
_File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=options.file_to_write("--file"),
        help="The result's file (default: claims-MODEL.json in --out); the page has the same name with .html.",
    ),
]


@with_fields(ModelRequest, leave_out=("model",))
def claims(
    models: _Models = None,
    claim: _Claims = None,
    details: Details = False,
    text: options.Text = None,
    documents: _Documents = None,
    tokens: _Tokens = None,
    prompts: _Prompts = 24,
    controls: _Controls = 1,
    file: _File = None,
    out: options.Out = options.DEFAULT_OUT,
    again: options.Again = False,
    **fields: Any,
) -> None:
    """Judge the claims of papers about position and content in attention on models.

    $ wherewhat claims ./my-model
    $ wherewhat claims ./my-model --claim 1 --claim 7
    $ wherewhat claims runs/claims-a.json runs/claims-b.json    # earlier results side by side

    Each claim has numbers with intervals and controls, a verdict by a stated rule (holds, holds if …, does not hold,
    cannot be told), how often the verdict changes if documents are resampled, and what would change it. Prints one
    line per claim, and writes a JSON file, which `wherewhat report` with the same folder shows as a section, and a
    page with a card for each claim. Runs are shared with other commands, and an interrupted command is resumed.
    """
    from wherewhat.report.claims_page import write_claims_page
    from wherewhat.report.judgement import Judgement, judge_claims

    models = models or ["smollm2"]
    if file is not None and len(models) > 1:
        raise ConfigError(f"--file is {file}, for {len(models)} models: leave it out, or give a single model")
    if file is not None and file.suffix == ".html":
        raise ConfigError(f"--file is {file}, but holds JSON: name it .json, the page is written beside it")
    console, results, paths, folders = Console(), [], [], [out]
    for model in models:
        if model.endswith(".json"):
            stored = user_path(model, name="MODEL")
            results.append(Judgement.load(stored).only(tuple(claim or ())).data)
            folders.append(stored.parent)
            continue
        request = ModelRequest(model=model, **fields)
        judgement = judge_claims(
            request,
            claims=tuple(claim or ()),
            files=tuple(text) if text else None,
            documents=documents,
            tokens=tokens,
            prompts=prompts,
            controls=controls,
            out=out,
            again=again,
            progress=TerminalProgress(),
        )
        weights = "" if request.weights == "trained" else f"-{request.weights}"
        paths.append(judgement.save(file or out / f"claims-{judgement.data['model']}{weights}.json"))
        results.append(judgement.data)
    for data in results:
        on = f" on {counted(len(data['documents']), 'document')}" if "documents" in data else ""
        print_claims(console, data["claims"], title=f"{data['model']} ({data['weights']}): claims judged{on}")
        if claim or details:
            print_details(console, data["claims"])
    for path in paths:
        print_line(console, path)
    # The names in files are any text; as parts of a path they must not leave the folder.
    names = "-".join(slug(data["model"], fallback="model") for data in results)[:_LONGEST_NAME]
    page = paths[0].with_suffix(".html") if len(models) == len(paths) == 1 else out / f"claims-{names}.html"
    print_line(console, write_claims_page(results, page, runs=folders))


_LONGEST_NAME = 100
"""Most characters of the names of models in the name of a page."""


def print_claims(console: Console, claims: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Print stored claims, one line each: number, title, verdict, and the two numbers that decide it."""
    for line in claim_lines(claims, title=title, width=console.width):
        print_line(console, line)


def print_details(console: Console, claims: Sequence[Mapping[str, Any]]) -> None:
    """Print everything about stored claims, one below the other."""
    for claim in claims:
        print_line(console, "")
        for line in detail_lines(claim, width=console.width):
            print_line(console, line)


def claim_lines(claims: Sequence[Mapping[str, Any]], *, title: str, width: int) -> Iterator[str]:
    """Yield the lines of a table of claims below its title; cells of a narrow terminal continue in the next line."""
    from wherewhat.rules.claims.claim import deciding_words
    from wherewhat.rules.claims.registry import title_of

    rows = [("", "claim", "verdict", "number (needed)")]
    for claim in claims:
        verdict = "holds if …" if claim["verdict"] == "holds if" else claim["verdict"]
        rows.append((str(claim["number"]), printable(title_of(claim)), printable(verdict), deciding_words(claim)))
    sizes = [max(len(row[column]) for row in rows) for column in range(4)]
    gap = "  " if sum(sizes) + 6 <= width else " "
    yield from _wrapped(printable(title), width)
    for number, *cells in rows:
        padded = [cell.ljust(size) for cell, size in zip(cells, sizes[1:], strict=True)]
        line = gap.join([number.rjust(sizes[0]), *padded]).rstrip()
        fits = len(line) <= width
        yield from [line] if fits else _wrapped(" ".join([number.rjust(sizes[0]), *cells]), width, after=sizes[0] + 1)
    yield from _wrapped(
        "Number (needed): the mean that decides the verdict and the threshold of its rule, or vs its control. All "
        "numbers, reasons and stability: --details, --claim N, or the page.",
        width,
    )


def detail_lines(claim: Mapping[str, Any], *, width: int) -> Iterator[str]:
    """Yield everything about a stored claim as text."""
    from wherewhat.rules.claims.claim import number_words, stability_words, verdict_words
    from wherewhat.rules.claims.registry import title_of

    outcomes = {True: "yes", False: "no", None: "open"}

    def line(text: str, indent: int = 3) -> list[str]:
        return _wrapped(" " * indent + printable(text), width, after=indent + (2 if indent > 3 else 0))

    yield from _wrapped(f"{claim['number']:>2} {printable(title_of(claim))}", width, after=3)
    yield from line(f"{claim['statement']} ({claim['source']})")
    yield from line(f"Verdict: {verdict_words(claim)}.")
    if claim["verdict"] != "not judged":
        yield from line(f"Stability: {stability_words(claim)}.")
    for part in claim["parts"]:
        yield from line(f"{outcomes[part['outcome']]}: {part['statement']}", 5)
    for number in claim["numbers"]:
        control = "" if number["control"] is None else f"; {number['control']:.3g} {number['control_title']}"
        yield from line(f"{number_words(number)} {number['title']}{control}", 5)
    for note in claim["notes"]:
        yield from line(note)
    if claim["change"]:
        yield from line(f"What would change it: {claim['change']}.")
    if claim["runs"]:
        yield from line(f"Runs: {', '.join(claim['runs'])}")


_NUMBER = re.compile(r"(?<=\d) (?=[±%])|(?<=±) (?=[\d<])|(?<=[≥≤<>]) (?=[-\d])")
"""Spaces inside a number, such as those of ``0.87 ± 0.01`` and ``5 %``."""


def _wrapped(text: str, width: int, *, after: int = 0) -> list[str]:
    """Return lines of whole words and numbers, ``after`` columns indented from the second on."""
    kept = _NUMBER.sub("\xa0", text)
    lines = textwrap.wrap(
        kept,
        max(20, min(width, LONGEST_LINE)),
        subsequent_indent=" " * after,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return [line.replace("\xa0", " ") for line in lines]
