"""``wherewhat check``, and one command per measurement, generated from the registry."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from wherewhat.cli import options
from wherewhat.cli.options import Given, collect, with_fields
from wherewhat.cli.tables import by_kind, by_layer, compared, headline, print_line, proof_table
from wherewhat.errors import WherewhatError
from wherewhat.measures.measurement import Measurement
from wherewhat.progress import TerminalProgress
from wherewhat.report.views import view_of
from wherewhat.runs.request import ModelRequest, Request

if TYPE_CHECKING:
    from wherewhat.captures.proof import Proof


def command_for(measurement: Measurement) -> Callable[..., None]:
    """Return the function of ``wherewhat NAME``."""

    @with_fields(Request, ModelRequest)
    def command(
        context: typer.Context,
        out: options.Out = options.DEFAULT_OUT,
        control: options.Control = True,
        again: options.Again = False,
        set_: options.Set = None,
        config: options.ConfigFile = None,
        **given: Any,
    ) -> None:
        del out, control, again, set_, config, given
        _execute(measurement, collect(context, measurement.name))

    command.__doc__ = _help_text(measurement)
    return command


def _help_text(measurement: Measurement) -> str:
    """Return summary, metrics, options and limits, for ``--help``."""
    lines = [measurement.summary, ""]
    lines += [f"* {metric.title}: {metric.reading}" for metric in measurement.metrics]
    lines += ["", "Options for --set:", ""]
    for item in dataclasses.fields(measurement.config):
        lines.append(f"* {item.name}={item.default}: {item.metadata.get('help', '')}")
    return "\n".join([*lines, "", measurement.limits])


def _execute(measurement: Measurement, given: Given) -> None:
    """Measure the model and its control models, and show their numbers side by side."""
    from wherewhat.runs.identity import reused_line, unnoticed
    from wherewhat.runs.known import KnownRuns
    from wherewhat.runs.results import StoredRun

    controls = measurement.controls if given.control and given.request.model.weights == "trained" else ()
    made = None if given.again else KnownRuns(given.out).find_all(given.request, controls)
    for directory in made.runs.values() if made is not None else ():
        if unnoticed(directory.config):
            TerminalProgress().say(reused_line(directory.path, directory.config))
    if made is None:
        from wherewhat.runs.execution import run_with_controls  # imports torch, which a finished run does not need

        made = run_with_controls(given.request, controls, out=given.out, progress=TerminalProgress(), again=given.again)
    runs = {weights: StoredRun(directory) for weights, directory in made.runs.items()}
    summaries = [(weights, run.summaries) for weights, run in runs.items()]
    first = next(iter(runs.values()))
    console = Console()
    estimates = {summary.metric.name: summary.overall for summary in summaries[0][1]}
    if (compare := view_of(measurement).compare) is not None:
        console.print(*compared(compare(estimates, first.config), summaries[0][1], width=console.width), sep="\n")
        shown = {metric.name for metric in measurement.metrics}
        summaries = [(weights, [x for x in found if x.metric.name in shown]) for weights, found in summaries]
    elif any(summary.layers for summary in summaries[0][1]):
        console.print(by_layer(summaries[0][1], summaries[0][0], width=console.width))
        if first.kinds:
            console.print(by_kind(summaries, first.kinds, width=console.width))
    console.print(headline(measurement, summaries, left_out=made.left_out))
    for directory in made.runs.values():
        print_line(console, directory.path)


_Layers = Annotated[bool, typer.Option("--layers", help="Show one line per layer, with all errors.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table, with every layer.")]


@with_fields(ModelRequest)
def check(layers: _Layers = False, as_json: _Json = False, **given: Any) -> None:
    """Check that captured queries and keys reproduce the model's attention, and show the errors.

    Rotating the queries and keys before RoPE must give those after it; the softmax of the recomputed logits must equal
    the model's eager attention weights; the attention output must equal the model's; capturing must not change the
    model's output. A model that fails a check is not measured.
    """
    if not as_json:
        _show(*_proved(given), each=layers)
        return
    try:
        with redirect_stdout(sys.stderr):  # code of a model may print
            name, proof = _proved(given)
    except WherewhatError as error:
        _print_json({"proved": False, "reason": " ".join(str(error).split())})
        raise
    _print_json(proof.as_dict() | {"name": name})


def _proved(given: dict[str, Any]) -> tuple[str, Proof]:
    """Return the short name of a model and its proof."""
    from wherewhat.captures.proof import prove
    from wherewhat.runs.subject import load_model

    loaded = load_model(ModelRequest(**given), say=TerminalProgress().say)
    return loaded.name, prove(loaded.model)


def _show(name: str, proof: Proof, *, each: bool) -> None:
    console = Console()
    table = proof.table(each=each)
    console.print(proof_table(table))
    for line in table.remarks:
        print_line(console, line, wrap=True)
    print_line(console, f"{name}: proved. Capturing changes the model's output by {proof.output_change:g}.", wrap=True)


def _print_json(values: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(values, indent=2, allow_nan=False)}\n")
