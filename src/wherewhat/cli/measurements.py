"""One subcommand per measurement, all made from the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import typer
from rich.console import Console

from wherewhat.cli import options
from wherewhat.cli.options import Arguments, collect
from wherewhat.cli.terminal import TerminalProgress
from wherewhat.measures.measurement import Measurement

_DEFAULT_OUT = Path("runs")


def command_for(measurement: Measurement) -> Callable[..., None]:
    """The function behind ``wherewhat NAME``."""

    def command(
        context: typer.Context,
        model: options.Model = "smollm2",
        text: options.Text = None,
        prompts: options.Prompts = None,
        items: options.Items = None,
        documents: options.Documents = None,
        tokens: options.Tokens = 512,
        out: options.Out = _DEFAULT_OUT,
        weights: options.Weights = "trained",
        control: options.Control = True,
        device: options.Device = "auto",
        dtype: options.Dtype = "float32",
        seed: options.Seed = 0,
        set_: options.Set = None,
        config: options.ConfigFile = None,
        beyond: options.Beyond = False,
        chunk: options.Chunk = None,
        offload: options.Offload = False,
        device_map: options.DeviceMap = None,
        revision: options.Revision = None,
        attn_implementation: options.AttnImplementation = None,
        offline: options.Offline = False,
        trust_remote_code: options.TrustRemoteCode = False,
    ) -> None:
        del model, text, prompts, documents, tokens, out, weights, control, device, dtype, seed, set_, config, beyond
        del items, chunk, offload, device_map, revision, attn_implementation, offline, trust_remote_code
        execute(measurement, *collect(context))

    command.__doc__ = help_text(measurement)
    return command


def help_text(measurement: Measurement) -> str:
    """Summary, metrics, options and limits, for ``--help``."""
    lines = [measurement.summary, ""]
    lines += [f"* {metric.title}: {metric.reading}" for metric in measurement.metrics]
    lines += ["", "Options for --set:", ""]
    for item in dataclasses.fields(measurement.config):
        lines.append(f"* {item.name}={item.default}: {item.metadata.get('help', '')}")
    return "\n".join([*lines, "", measurement.limits])


def execute(measurement: Measurement, arguments: Arguments, settings: dict[str, Any]) -> None:
    """Measure the model, and its random twin unless told not to, and show the numbers side by side."""
    from wherewhat.cli.tables import by_kind, by_layer, compared, headline
    from wherewhat.options import build_config
    from wherewhat.runs.execution import run_with_controls
    from wherewhat.runs.results import stored_kinds, summarise

    request = arguments.request(measurement.name, settings)
    controls = measurement.controls if arguments.control and arguments.weights == "trained" else ()
    progress = TerminalProgress(Console(stderr=True))
    made = run_with_controls(request, controls, out=Path(arguments.out), progress=progress)
    directories = list(made.runs.values())
    summaries = [(weights, summarise(measurement, directory)) for weights, directory in made.runs.items()]
    console = Console()
    config = build_config(measurement.config, cast("dict[str, Any]", directories[0].config["options"]))
    estimates = {summary.metric.name: summary.overall for summary in summaries[0][1]}
    if comparison := measurement.compare(estimates, config):
        console.print(*compared(comparison, summaries[0][1], width=console.width), sep="\n")
        shown = {metric.name for metric in measurement.metrics}
        summaries = [(weights, [x for x in found if x.metric.name in shown]) for weights, found in summaries]
    elif any(summary.layers for summary in summaries[0][1]):
        console.print(by_layer(summaries[0][1], summaries[0][0], width=console.width))
        if kinds := stored_kinds(directories[0]):
            console.print(by_kind(summaries, kinds, width=console.width))
    console.print(headline(measurement, summaries, left_out=made.left_out))
    for directory in directories:
        # soft_wrap keeps the path whole, to be copied or read by a script
        console.print(str(directory.path), soft_wrap=True, markup=False, highlight=False)
