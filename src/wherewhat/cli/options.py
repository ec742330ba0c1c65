"""Command-line options, generated from the fields of requests, and merged with a config file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from wherewhat.boundary import output_file, output_folder, shown, user_path
from wherewhat.errors import ConfigError
from wherewhat.options import build_config, flag_of, nearest, parse_assignments, read_config, type_hints
from wherewhat.runs.request import ModelRequest, Request

DEFAULT_OUT = Path("runs")


def file_to_write(name: str) -> Callable[[str], Path]:
    """Return the parser of an option or argument that names a file to write."""
    return functools.partial(output_file, name=name)


def folder_to_write(name: str, *, writable: bool = True) -> Callable[[str], Path]:
    """Return the parser of an option that names a folder to write to."""
    return functools.partial(output_folder, name=name, writable=writable)


# Finished runs can be read from a read-only folder.
Out = Annotated[
    Path,
    typer.Option(metavar="DIR", parser=folder_to_write("--out", writable=False), help="Folder of run directories."),
]
Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="A text file, a folder, a .jsonl file, or - ; repeat for several."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the measurement; repeat for more."),
]
ConfigFile = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="Read these options from a TOML, YAML or JSON file.")
]
Again = Annotated[bool, typer.Option("--again", help="Measure anew what is finished, and try again what failed.")]
Control = Annotated[bool, typer.Option(help="Also measure control models (random or shuffled weights).")]


def with_fields(*requests: type, leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace ``**fields`` of a command by one option for each field of the requests that has a help text.

    Args:
        requests: Dataclasses such as :class:`ModelRequest`; their field ``model`` becomes an argument.
        leave_out: Fields to leave out.
    """
    added = [parameter for kind in requests for parameter in _parameters(kind) if parameter.name not in leave_out]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


@functools.cache
def _parameters(request: type) -> list[inspect.Parameter]:
    hints = type_hints(request)
    options = []
    for field in dataclasses.fields(request):
        if "help" not in field.metadata:
            continue
        described: dict[str, Any] = {"help": field.metadata["help"], "metavar": field.metadata["metavar"]}
        kind = _terminal_type(hints.get(field.name, str))
        if field.name == "model":
            info = typer.Argument(metavar="MODEL", help=described["help"])
        else:
            info = typer.Option(f"--{flag_of(field)}", **described)
        keyword = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(field.name, keyword, default=field.default, annotation=Annotated[kind, info]))
    return options


def _terminal_type(hint: Any) -> Any:
    """Return the type that typer parses: numbers, flags, lists, and text for everything else."""
    parts = typing.get_args(hint) or (hint,)
    optional = type(None) in parts
    if hint is bool:
        return bool
    if any(typing.get_origin(part) is tuple for part in parts):
        return list[str] | None
    kind = next((number for number in (int, float) if number in parts), str)
    return kind | None if optional else kind


@dataclass(frozen=True)
class Given:
    """The options of a measurement command.

    Attributes:
        request: What to measure.
        out: Folder of run directories.
        control: Whether to measure the control models as well.
        again: Whether to measure anew what is finished.
    """

    request: Request
    out: Path
    control: bool
    again: bool


def collect(context: typer.Context, measurement: str) -> Given:
    """Merge command line, config file and defaults; command-line values take precedence."""
    parameters = dict(context.params)
    config: str | None = parameters.pop("config")
    options: dict[str, Any] = dict(parse_assignments(parameters.pop("set_") or ()))
    values = {name: value for name, value in parameters.items() if _typed(context, name)}
    if config is not None:
        path = user_path(config, name="--config")
        from_file = read_config(path, name="--config")
        assigned = from_file.pop("set", {})
        if not isinstance(assigned, dict):
            raise ConfigError(f"--config {shown(path)}: 'set' must be a table of names and values")
        flags = {field.name: flag_of(field).replace("-", "_") for field in dataclasses.fields(Request)}
        known = {flags.get(name, name): name for name in parameters}
        for name in from_file:
            if name not in known:
                raise ConfigError(
                    f"--config {shown(path)}: there is no option {shown(name)}: {nearest(name, sorted(known))}"
                )
        options = {**assigned, **options}
        values = {**{known[name]: value for name, value in from_file.items()}, **values}
    if isinstance(values.get("files"), str):
        values["files"] = [values["files"]]
    rest = build_config(_Rest, {name: str(values.pop(name)) for name in ("out", "control", "again") if name in values})
    names = {field.name for field in dataclasses.fields(ModelRequest)}
    model = build_config(ModelRequest, {name: value for name, value in values.items() if name in names})
    asked = {name: value for name, value in values.items() if name not in names}
    request = build_config(Request, {"measurement": measurement, **asked})
    out = output_folder(rest.out, name="--out", writable=False)
    return Given(dataclasses.replace(request, model=model, options=options), out, rest.control, rest.again)


@dataclass(frozen=True)
class _Rest:
    out: str = str(DEFAULT_OUT)
    control: bool = True
    again: bool = False


def _typed(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
