"""The help of commands: usage, examples, arguments and options in two columns, then metrics and limits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

_WIDEST = 100
"""Columns of the help in a wider terminal: longer lines are hard to read."""

_TERM_WIDTH = 24
"""Most columns of names; a longer name has a line to itself."""

_VALUES = {"<int>": "N", "<float>": "NUMBER", "<str>": "TEXT", "<list[str]>": "TEXT...", "<list[int]>": "N..."}
"""Names of values by typer's name of their type."""

_EXAMPLE = "$ "
_ITEM = "* "


class HelpCommand(TyperCommand):
    """A command whose examples stand before its options, and its epilog, in sections, after them.

    Paragraphs of the help whose lines begin with ``$`` are examples. A paragraph of the epilog is a section: a title,
    and lines that are items, ``* name: explanation``, or text.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(_rendered(_parts(self, ctx)))


class HelpGroup(TyperGroup):
    """A group of commands with the same help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(_rendered(_parts(self, ctx)))


def _rendered(parts: Iterable[RenderableType]) -> str:
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _parts(command: Any, ctx: Any) -> Iterable[RenderableType]:
    yield Text(command.get_usage(ctx))
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    examples = [paragraph for paragraph in paragraphs if paragraph.lstrip().startswith(_EXAMPLE)]
    summary, *description = [_plain(paragraph) for paragraph in paragraphs if paragraph not in examples]
    yield Text(f"\n{summary}")
    if examples:
        lines = [line.strip() for paragraph in examples for line in paragraph.splitlines()]
        yield from _section("Examples", [Padding(Text(line), (0, 0, 0, 2)) for line in lines])
    for paragraph in description:
        yield Text(f"\n{paragraph}")
    shown = [parameter for parameter in command.get_params(ctx) if not getattr(parameter, "hidden", False)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        rows = [_parameter(parameter, ctx) for parameter in shown if parameter.param_type_name == kind]
        yield from _listed(title, rows)
    for title, rows in _commands(command, ctx).items():
        yield from _listed(title, rows)
    for section in filter(None, inspect.cleandoc(command.epilog or "").split("\n\n")):
        title, *lines = section.splitlines()
        items = [line.removeprefix(_ITEM).partition(": ") for line in lines if line.startswith(_ITEM)]
        text = [Padding(Text(_plain(line)), (0, 0, 0, 2)) for line in lines if not line.startswith(_ITEM)]
        yield from _listed(title, [(name, _plain(explanation)) for name, _, explanation in items])
        yield from _section(title, text) if text else ()


def _commands(group: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return names and summaries of the commands of a group by panel."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for name in group.list_commands(ctx) if isinstance(group, TyperGroup) else ():
        command = group.get_command(ctx, name)
        if command is not None and not command.hidden:
            panel = getattr(command, "rich_help_panel", None)
            title = panel if isinstance(panel, str) else "Commands"
            summary = inspect.cleandoc(command.short_help or command.help or "").split("\n\n")[0]
            panels.setdefault(title, []).append((name, _plain(summary)))
    return panels


def _parameter(parameter: Any, ctx: Any) -> tuple[str, str]:
    """Return an option with the name of its value, or an argument, and its help with the default."""
    argument = parameter.param_type_name == "argument"
    flag = getattr(parameter, "is_flag", False)
    if argument:
        name = f"{parameter.metavar or parameter.name}{'...' if parameter.nargs != 1 else ''}"
    else:
        opposite = f" / {', '.join(parameter.secondary_opts)}" if parameter.secondary_opts else ""
        name = f"{', '.join(sorted(parameter.opts, key=len))}{opposite}"
        name += "" if flag else f" {_value_name(parameter, ctx)}"
    default = parameter.default
    text = str(parameter.help or "")
    if not flag and default is not None and default != () and default != [] and not callable(default):
        text += f" [default: {default}]"
    elif flag and parameter.secondary_opts:
        text += f" [default: {(parameter.opts if default else parameter.secondary_opts)[0]}]"
    return name, text


def _value_name(parameter: Any, ctx: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    shown = parameter.display_type(ctx) if hasattr(parameter, "display_type") else parameter.make_metavar()
    return _VALUES.get(shown, str(shown))


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> Iterable[RenderableType]:
    """Return a section of names with explanations beside them, or below where a name is long."""
    lines: list[RenderableType] = []
    width = min(_TERM_WIDTH, max((len(name) for name, _ in rows), default=0))
    for name, text in rows:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=width)
        grid.add_column()
        if len(name) > width:
            lines.append(Padding(Text(name, style="bold"), (0, 0, 0, 2)))
            grid.add_row("", text)
        else:
            grid.add_row(Text(name, style="bold"), text)
        lines.append(Padding(grid, (0, 0, 0, 2)))
    return _section(title, lines) if lines else []


def _section(title: str, lines: Iterable[RenderableType]) -> Iterable[RenderableType]:
    return [Text(f"\n{title}", style="bold underline"), *lines]


def _plain(text: str) -> str:
    """Return Markdown without its marks, as one line."""
    return re.sub(r"\*(\w[^*]*)\*", r"\1", " ".join(text.split())).replace("`", "")
