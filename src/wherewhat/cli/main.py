"""The command line: its commands, those of measurements among them, and their errors."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from typer.core import TyperCommand

from wherewhat.boundary import shown
from wherewhat.cli import options
from wherewhat.cli.claims import claims
from wherewhat.cli.compare import compare
from wherewhat.cli.head import head
from wherewhat.cli.help import HelpCommand, HelpGroup
from wherewhat.cli.options import Given, collect, with_fields
from wherewhat.cli.plan import plan
from wherewhat.cli.report import export, report
from wherewhat.cli.sweep import sweep
from wherewhat.cli.tables import by_kind, by_layer, compared, headline, print_line, proof_table, telling
from wherewhat.errors import ConfigError, PluginWarning, WherewhatError, printable
from wherewhat.files import explain
from wherewhat.imports import isolated, plugins
from wherewhat.measures.measurement import (
    BUILT_IN,
    ChoicesMeasurement,
    Measurement,
    QuestionMeasurement,
    find_measurement,
    measurements,
)
from wherewhat.progress import TerminalProgress
from wherewhat.report.views import GROUPS, view_of
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
        **fields: Any,
    ) -> None:
        del out, control, again, set_, config, fields
        _execute(measurement, collect(context, measurement.name))

    command.__doc__ = f"{measurement.summary}\n\n{_examples(measurement)}"
    return command


def _examples(measurement: Measurement) -> str:
    """Return commands for ``--help``: the embedded model, the user's, and a control or option."""
    asked = f"--items {_ITEMS} " if isinstance(measurement, ChoicesMeasurement) else ""
    lines = [f"$ wherewhat {measurement.name} {asked}", f"$ wherewhat {measurement.name} ./my-model {asked}"]
    if not isinstance(measurement, ChoicesMeasurement | QuestionMeasurement):
        lines[1] += "--text book.txt --tokens 1024"
    for field in dataclasses.fields(measurement.config)[:1]:
        lines.append(f"$ wherewhat {measurement.name} {asked}--documents 2 --set {field.name}={_set_value(field)}")
    return "\n".join(map(str.rstrip, lines))


_ITEMS = "arc_easy"


def _set_value(field: dataclasses.Field[Any]) -> str:
    """Return the default of an option as ``--set`` reads it."""
    value = field.default
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _sections(measurement: Measurement) -> str:
    """Return options, metrics and limits, which follow the options of the command in ``--help``."""
    options = [
        f"* {field.name}={_set_value(field)}: {field.metadata.get('help', '')}"
        for field in dataclasses.fields(measurement.config)
    ]
    metrics = [f"* {metric.title}: {metric.reading}" for metric in measurement.metrics]
    sections = {"Options for --set KEY=VALUE": options, "Metrics": metrics, "Limits": [measurement.limits]}
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections.items() if lines)


def _execute(measurement: Measurement, settings: Given) -> None:
    """Measure the model and its control models, and show their numbers side by side."""
    from wherewhat.runs.identity import KnownRuns, reused_line, unnoticed
    from wherewhat.runs.results import StoredRun

    controls = measurement.controls if settings.control and settings.request.model.weights == "trained" else ()
    controlled = None if settings.again else KnownRuns(settings.out).find_all(settings.request, controls)
    for directory in controlled.runs.values() if controlled is not None else ():
        if unnoticed(directory.config):
            TerminalProgress().say(reused_line(directory.path, directory.config))
    if controlled is None:
        from wherewhat.runs.execution import run_with_controls  # imports torch, which a finished run does not need

        (controlled,) = run_with_controls(
            [settings.request], controls, out=settings.out, progress=TerminalProgress(), again=settings.again
        )
    runs = {weights: StoredRun(directory) for weights, directory in controlled.runs.items()}
    summaries = [(weights, run.summaries) for weights, run in runs.items()]
    first = next(iter(runs.values()))
    console = Console()
    estimates = {summary.metric.name: summary.overall for summary in summaries[0][1]}
    if (compare := view_of(measurement).compare) is not None:
        console.print(*compared(compare(estimates, first.config), summaries[0][1], width=console.width), sep="\n")
        shown = {metric.name for metric in measurement.metrics}
        summaries = [(weights, [x for x in listed if x.metric.name in shown]) for weights, listed in summaries]
    elif any(summary.layers for summary in summaries[0][1]):
        console.print(by_layer(summaries[0][1], summaries[0][0], width=console.width))
        if first.kinds:
            console.print(by_kind(summaries, first.kinds, width=console.width))
    console.print(headline(measurement, summaries, left_out=controlled.left_out, width=console.width))
    if measurement.name == "heads":
        console.print(telling(first))
    for directory in controlled.runs.values():
        print_line(console, directory.path)


_Layers = Annotated[bool, typer.Option("--layers", help="Show one line per layer, with all errors.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table, with every layer.")]


@with_fields(ModelRequest)
def check(layers: _Layers = False, as_json: _Json = False, **fields: Any) -> None:
    """Check that captured queries and keys reproduce the model's attention, and show the errors.

    $ wherewhat check ./my-model
    $ wherewhat check ./my-model --layers    # one line per layer

    Rotating the queries and keys before RoPE must give those after it; the softmax of the recomputed logits must equal
    the model's eager attention weights; the attention output must equal the model's; capturing must not change the
    model's output. A model that fails a check is not measured.
    """
    if not as_json:
        _show(*_proved(fields), each=layers)
        return
    try:
        with redirect_stdout(sys.stderr):  # code of a model may print
            name, proof = _proved(fields)
    except WherewhatError as error:
        _print_json({"proved": False, "reason": " ".join(str(error).split())})
        raise
    _print_json(proof.as_dict() | {"name": name})


def _proved(fields: dict[str, Any]) -> tuple[str, Proof]:
    """Return the short name of a model and its proof."""
    from wherewhat.captures.proof import prove
    from wherewhat.runs.subject import load_model

    loaded = load_model(ModelRequest(**fields), say=TerminalProgress().say)
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


_MANY = "Many runs"
_LOADING = ("report", "check", "head", "plan", "claims", "sweep")
"""Commands besides measurements that load models."""
_COMMANDS = "wherewhat.commands"
_LONGEST_LINE = 2000
"""Characters of an error, which may quote a value of any length."""

# Typer may use its own copy of click, so the base class of its errors is not imported but looked up.
_CLICK_ERROR = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

_HELP = """Measure how language models separate position (*where*) from content (*what*) in attention.

$ wherewhat report              # the embedded model: one HTML page
$ wherewhat report ./my-model   # a Hugging Face id, a folder or a .gguf file
$ wherewhat check ./my-model    # is its attention read correctly?
$ wherewhat heads --help        # examples, options and metrics of a command

Each measurement takes a model (default: the embedded SmolLM2) and a text (default: embedded English prose), checks
that the captured queries and keys reproduce the model's attention, and stores its scores in a run directory. Finished
runs are not computed again; interrupted runs are resumed.
"""


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the application, with one command per measurement; nothing of it imports torch before it is called.

    Args:
        arguments: Words of the command line. If the first is a command of this package, the application has no other
            command, which is faster.
    """
    app = typer.Typer(
        name="wherewhat",
        cls=HelpGroup,
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = arguments[0] if arguments else None
    known = {wanted: find_measurement(wanted)} if wanted in BUILT_IN else measurements()
    commands: dict[str, tuple[str, Callable[..., Any] | Measurement]] = {
        "report": ("Start here", report),
        "check": ("Start here", check),
        "head": ("Start here", head),
        "plan": ("Start here", plan),
        "claims": ("Start here", claims),
        # Panels of the help are in the order of their first commands.
        **{
            measurement.name: (view_of(measurement).group, measurement)
            for measurement in sorted(known.values(), key=_panel)
        },
        "compare": (_MANY, compare),
        "export": (_MANY, export),
        "sweep": (_MANY, sweep),
    }
    only = wanted if wanted in commands else None
    for name in commands if only is None else (only,):
        panel, command = commands[name]
        if isinstance(command, Measurement):
            epilog = _sections(command)
            declare = app.command(
                name, cls=HelpCommand, short_help=command.summary, epilog=epilog, rich_help_panel=panel
            )
            declare(command_for(command))
        else:
            app.command(name, cls=HelpCommand, rich_help_panel=panel)(command)
    if only is not None:
        return app
    for name, contributed in plugins(_COMMANDS).items():
        with isolated(_COMMANDS, name):
            if name in commands:
                raise ConfigError(f"there is already a command '{name}'")
            typer.main.get_group(contributed)  # raises here, and not when the whole application is built
            for info in contributed.registered_commands:
                info.cls = HelpCommand if info.cls in (None, TyperCommand) else info.cls
            app.add_typer(contributed, name=name, cls=HelpGroup, rich_help_panel="Laboratory")
    return app


def _panel(measurement: Measurement) -> int:
    """Return the place of a measurement's panel in the help."""
    group = view_of(measurement).group
    return (*GROUPS, group).index(group)


def _show_version(wanted: bool) -> None:
    if wanted:
        from wherewhat.imports import package_version

        typer.echo(f"wherewhat {package_version('wherewhat') or '(not installed)'}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    pass


_root.__doc__ = _HELP


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for terminals that cannot show ±
    sys.exit(run_cli(sys.argv[1:]))


def run_cli(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0, 2 for wrong input, 130 if interrupted."""
    with _plugin_warnings_as_lines():
        return _run(arguments)


@contextmanager
def _plugin_warnings_as_lines() -> Iterator[None]:
    """Show each warning about an entry point as one dim line inside the context, and other warnings as before."""
    with warnings.catch_warnings():
        show_other: Any = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, PluginWarning):
                print_line(Console(stderr=True), f"wherewhat: {message}", style="dim")
            else:
                show_other(printable(str(message)), category, *where, **more)

        warnings.simplefilter("always", PluginWarning)
        warnings.showwarning = show
        yield


def _run(arguments: list[str]) -> int:
    try:
        command = typer.main.get_command(build(arguments))
        _say_start(arguments)
        # Not through the command's own main, which handles interrupts and closed pipes itself.
        with command.make_context("wherewhat", list(arguments)) as context:
            result = command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except WherewhatError as error:
        return _say(str(error))
    except _CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(f"{error.format_message()}\n")
            return 0
        return _say(_with_value(error, arguments))
    except (KeyboardInterrupt, typer.Abort):
        _say("interrupted; the same command resumes the work")
        return 130
    except BrokenPipeError:
        # The reader of the output has ended (head, less).
        _give_up_output()
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # raised by rich for the same reason
            return 0
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _give_up_output()
            return _say(f"the output could not be written: {error.strerror}")
        where = "" if error.filename is None else f"{shown(os.fsdecode(error.filename))}: "
        return _say(f"{where}{explain(error)}")
    except MemoryError:
        return _say("out of memory: ask for fewer tokens, or a smaller model")
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
            return _say("out of memory: ask for fewer tokens, a smaller dtype, or --device-map auto")
        raise
    return result if isinstance(result, int) else 0


def _say_start(arguments: Sequence[str]) -> None:
    """Show one line on a terminal before a command imports torch and loads a model, which take seconds."""
    if arguments and arguments[0] in (*BUILT_IN, *_LOADING) and not {"-h", "--help"} & {*arguments}:
        TerminalProgress().say(f"wherewhat {arguments[0]}: starting")


def _give_up_output() -> None:
    """Redirect further output to nowhere, so that Python's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_value(error: Any, arguments: list[str]) -> str:
    """Return the message of a wrong option with its value, which typer leaves out."""
    message: str = error.format_message()
    for name in getattr(getattr(error, "param", None), "opts", ()):
        for index, argument in enumerate(arguments[:-1]):
            if argument == name and arguments[index + 1] not in message:
                return f"{message} (got {arguments[index + 1]!r})"
    return message


def _say(line: str) -> int:
    words = printable(" ".join(line.split()))
    if len(words) > _LONGEST_LINE:
        words = f"{words[: _LONGEST_LINE // 2]} … {words[-_LONGEST_LINE // 2 :]}"
    sys.stderr.write(f"wherewhat: {words}\n")
    return 2
