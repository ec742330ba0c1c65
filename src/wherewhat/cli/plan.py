"""``wherewhat plan``: which heads need the whole text, and what leaving the others short costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wherewhat.cli import options
from wherewhat.cli.options import with_fields
from wherewhat.cli.tables import Table, print_line
from wherewhat.errors import ConfigError
from wherewhat.plans.request import PlanRequest
from wherewhat.progress import TerminalProgress, counted
from wherewhat.runs.request import ModelRequest, given_options

_File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        parser=options.file_to_write("--file"),
        help="The plan's file (default: plan-MODEL.json in --out).",
    ),
]
_Saved = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Use this plan; nothing is measured."),
]
_Exports = Annotated[
    list[str] | None,
    typer.Option(
        "--export",
        metavar="KIND=FILE",
        help="Also write the plan for transformers, vllm, tensorrt-llm or swaa (a file), duoattention or kvpress "
        "(a folder); repeat for several.",
    ),
]
_TriAttention = Annotated[
    Path | None,
    typer.Option(
        "--triattention",
        metavar="FILE",
        parser=options.file_to_write("--triattention"),
        help="Also write statistics of queries to this file, for TriAttention.",
    ),
]


@with_fields(PlanRequest, ModelRequest)
def plan(
    text: options.Text = None,
    file: _File = None,
    saved: _Saved = None,
    export: _Exports = None,
    triattention: _TriAttention = None,
    out: options.Out = options.DEFAULT_OUT,
    again: options.Again = False,
    **fields: Any,
) -> None:
    """Choose the heads that need their full key-value cache, and measure what limiting the others costs.

    $ wherewhat plan ./my-model --budget 0.25
    $ wherewhat plan ./my-model --min-found 0.95 --max-rise 0.05
    $ wherewhat plan ./my-model --tokens 8192 --documents 8 --device cuda
    $ wherewhat plan ./my-model --unit layer --sinks 0 --export vllm=overrides.json
    $ wherewhat plan ./my-model --plan plan.json --export tensorrt-llm=trtllm.yaml

    Chosen groups of heads see the whole text, the others a window of last keys and a few first ones. Heads are scored
    on some documents; the rise of the loss and the retrieval of planted sequences are measured on others. Writes the
    plan as a JSON file, for `wherewhat.planned`, and a picture of costs against the share kept.
    """
    from wherewhat.plans.exports import export_paths, export_plan
    from wherewhat.plans.memory import describe_use
    from wherewhat.plans.planner import make_plan
    from wherewhat.report.figures import pareto_figure, save_figure

    model = ModelRequest(**{field.name: fields.pop(field.name) for field in dataclasses.fields(ModelRequest)})
    exports = export_paths(export or (), others={"--plan": saved, "--file": file})
    named: dict[str, Any] = {str(kind): path for kind, path in exports.items()}
    console, progress = Console(), TerminalProgress()
    if saved is not None:
        _check_saved(PlanRequest(**fields), text, triattention)
        use = {name: fields[name] for name in ("context", "memory")}
        cache_plan = export_plan(saved, named, model=model, progress=progress, **use)
        path = None if file is None else cache_plan.save(file)
    else:
        cache_plan = make_plan(
            model,
            files=tuple(text) if text else None,
            out=out,
            triattention=triattention,
            exports=named,
            again=again,
            progress=progress,
            **fields,
        )
        path = cache_plan.save(file or out / f"plan-{cache_plan.model}.json")
    measured = saved is None and bool(cache_plan.provenance["curve"])
    if measured:
        console.print(_table(cache_plan))
    if fields["curves"]:
        console.print(_areas(cache_plan))
    if "sentence" in cache_plan.provenance:
        print_line(console, cache_plan.provenance["sentence"], wrap=True)
    print_line(console, describe_use(cache_plan.provenance["cache"], cache_plan.unit), wrap=True)
    for row in cache_plan.provenance["exports"]:
        print_line(console, f"{row['export']}: {row['check']}.", wrap=True)
        print_line(console, exports[row["export"]])
    if triattention is not None:
        print_line(console, triattention)
    if path is not None:
        print_line(console, path)
    if measured and path is not None:
        print_line(console, save_figure(pareto_figure(cache_plan), path.with_suffix(".html")))


def _check_saved(request: PlanRequest, text: Any, triattention: Any) -> None:
    """Refuse options about making a plan beside a plan that is made."""
    given = given_options(request, leave_out=("context", "memory"))
    given += ["--text"] * bool(text) + ["--triattention"] * (triattention is not None)
    if given:
        raise ConfigError(f"{given[0]} has no effect on the plan that --plan names: leave one of them out")


def _table(plan: Any) -> Table:
    """Return rise and retrieval of a :class:`~wherewhat.Plan` by selector and share."""
    from wherewhat.plans.sentences import with_interval

    documents = counted(len(plan.provenance["evaluated_on"]), "document")
    table = Table(title=f"{plan.model}: mean ± 95 % over {documents} not used for choosing")
    titles = ("rise of the loss, nats", "gain from planted sequences, nats", "part of the gain without limits")
    for title in ("selector", f"{plan.unit}s in full", *titles):
        table.add_column(title)

    for row in sorted(plan.provenance["curve"], key=lambda row: (row["share"], row["selector"])):
        part = "" if row["part"] is None else with_interval(row["part"], percent=True)
        numbers = with_interval(row["rise"]), with_interval(row["found"]), part
        table.add_row(row["selector"], f"{row['share']:.0%}", *numbers)
    return table


def _areas(plan: Any) -> Table:
    """Return the areas under the curves of a :class:`~wherewhat.Plan` by selector."""
    from wherewhat.plans.sentences import with_interval

    areas = plan.provenance["areas"]
    table = Table(title="areas under the curves: means over all shares")
    names = {"rise": "rise of the loss, nats", "part": "part of the gain"}
    if areas["reference"]:
        names |= {f"more_{name}": f"{title}, minus {areas['reference']}" for name, title in names.items()}
    for title in ("selector", *names.values()):
        table.add_column(title)
    for row in areas["rows"]:
        shown = (
            "" if row[name] is None else with_interval(row[name], percent=not name.endswith("rise")) for name in names
        )
        table.add_row(row["selector"], *shown)
    return table
