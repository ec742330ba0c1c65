"""Entry point: builds the application and prints every expected error in one line, with exit code 2."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import typer
from rich.console import Console

from wherewhat.boundary import shown
from wherewhat.cli.claims import claims
from wherewhat.cli.compare import compare
from wherewhat.cli.measurements import check, command_for
from wherewhat.cli.plan import plan
from wherewhat.cli.report import export, report
from wherewhat.cli.sweep import sweep
from wherewhat.cli.tables import print_line
from wherewhat.errors import ConfigError, PluginWarning, WherewhatError, printable
from wherewhat.files import explain
from wherewhat.imports import isolated, plugins
from wherewhat.measures.measurement import Measurement
from wherewhat.measures.registry import BUILT_IN, find_measurement, measurements
from wherewhat.report.views import GROUPS, view_of

_MANY = "Many runs"
_COMMANDS = "wherewhat.commands"
_LONGEST_LINE = 2000
"""Characters of an error, which may quote a value of any length."""

# Typer may use its own copy of click, so the base class of its errors is not imported but looked up.
_CLICK_ERROR = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

_HELP = """Measure how language models separate position (*where*) from content (*what*) in attention.

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
        help=_HELP,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = arguments[0] if arguments else None
    known = {wanted: find_measurement(wanted)} if wanted in BUILT_IN else measurements()
    commands: dict[str, tuple[str, Callable[..., Any] | Measurement]] = {
        "report": ("Start here", report),
        "check": ("Start here", check),
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
            app.command(name, short_help=command.summary, rich_help_panel=panel)(command_for(command))
        else:
            app.command(name, rich_help_panel=panel)(command)
    if only is not None:
        return app
    for name, contributed in plugins(_COMMANDS).items():
        with isolated(_COMMANDS, name):
            if name in commands:
                raise ConfigError(f"there is already a command '{name}'")
            typer.main.get_group(contributed)  # raises here, and not when the whole application is built
            app.add_typer(contributed, name=name, rich_help_panel="Laboratory")
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
