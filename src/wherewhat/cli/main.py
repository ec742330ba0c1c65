"""Entry point: builds the application and turns every expected error into one line and exit code 2."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, cast

import typer

from wherewhat.errors import WherewhatError

# Typer may bring its own copy of click, so the base of its errors is asked for and not imported.
_CLICK_ERROR = cast(type[typer.BadParameter], typer.BadParameter.__mro__[2])

_HELP = """How a language model separates *where* from *what* in its attention.

Each measurement takes a model (the embedded SmolLM2 by default) and a text (embedded English prose by default),
proves that it reads the model's attention faithfully, measures, and stores the numbers in a run directory. A
finished run is never computed twice; an interrupted one goes on where it stopped.
"""


def build(first: str = "") -> typer.Typer:
    """The application, with one command per measurement.

    Args:
        first: The command that will be called. The state of a sweep is told without waiting for torch and the others.
    """
    from wherewhat.cli.sweep import sweep

    app = typer.Typer(
        name="wherewhat",
        help=_HELP,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.command("sweep")(sweep)
    if first != "sweep":
        _add_others(app)
    return app


def _add_others(app: typer.Typer) -> None:
    from wherewhat.cli.check import check
    from wherewhat.cli.compare import compare
    from wherewhat.cli.measurements import command_for
    from wherewhat.cli.report import export, report
    from wherewhat.measures.registry import measurements

    app.command("report")(report)
    app.command("check")(check)
    app.command("compare")(compare)
    app.command("export")(export)
    for measurement in measurements().values():
        app.command(measurement.name, short_help=measurement.summary)(command_for(measurement))
    _add_plugins(app)


def _add_plugins(app: typer.Typer) -> None:
    """Add the applications of the entry points ``wherewhat.commands``, such as ``multihop`` and ``encodings``."""
    from wherewhat.imports import plugins

    for name, contributed in plugins("wherewhat.commands").items():
        app.add_typer(contributed, name=name)


def _show_version(wanted: bool) -> None:
    if wanted:
        from wherewhat.runs.provenance import package_version

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
            stream.reconfigure(errors="replace")  # a terminal that cannot show ± still shows the numbers
    sys.exit(run_cli(sys.argv[1:]))


def run_cli(arguments: list[str]) -> int:
    """Run one command and return its exit code: 0, 2 for anything wrong with the input, 130 if interrupted."""
    try:
        command = typer.main.get_command(build(*arguments[:1]))
        # Not through the command's own main, which keeps interrupts and closed pipes to itself.
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
        _say("interrupted; the same command goes on with what is missing")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (head, less): nothing to say, and nobody to say it to.
        _give_up_output()
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich's way to say the same
            return 0
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _give_up_output()
        return _say(f"the output could not be written: {error.strerror}")
    except MemoryError:
        return _say("out of memory: ask for fewer tokens, or a smaller model")
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):
            return _say("out of memory: ask for fewer tokens, a smaller dtype, or --device-map auto")
        raise
    return result if isinstance(result, int) else 0


def _give_up_output() -> None:
    """Send what is still to be written nowhere, so that Python's own last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_value(error: Any, arguments: list[str]) -> str:
    """The message of a wrong option with the value that was typed, which typer leaves out."""
    message: str = error.format_message()
    for name in getattr(getattr(error, "param", None), "opts", ()):
        for index, argument in enumerate(arguments[:-1]):
            if argument == name and arguments[index + 1] not in message:
                return f"{message} (got {arguments[index + 1]!r})"
    return message


def _say(line: str) -> int:
    sys.stderr.write(f"wherewhat: {' '.join(line.split())}\n")
    return 2
