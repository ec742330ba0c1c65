"""What a measuring command was given: from the command line, else from its config file, else by default."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer

from wherewhat.cli.config_file import read_config_file
from wherewhat.errors import ConfigError
from wherewhat.measure.options import build_config, parse_assignments
from wherewhat.pipeline.request import ModelRequest, Request


@dataclass(frozen=True)
class Arguments:
    """Values of the options that all measuring commands share; the same names serve in config files."""

    model: str = "smollm2"
    text: tuple[str, ...] | None = None
    prompts: str | None = None
    items: str | None = None
    documents: int | None = None
    tokens: int = 512
    out: str = "runs"
    weights: str = "trained"
    control: bool = True
    device: str = "auto"
    dtype: str = "float32"
    seed: int = 0
    beyond: bool = False
    chunk: int | None = None
    offload: bool = False
    device_map: str | None = None
    revision: str | None = None
    attn_implementation: str | None = None
    offline: bool = False
    trust_remote_code: bool = False

    def request(self, measurement: str, options: dict[str, Any]) -> Request:
        """The request they describe."""
        names = {f.name for f in dataclasses.fields(ModelRequest)}
        model = ModelRequest(**{name: value for name, value in vars(self).items() if name in names})
        return Request(
            measurement=measurement,
            model=model,
            text=self.text,
            prompts=self.prompts,
            items=self.items,
            documents=self.documents,
            tokens=self.tokens,
            beyond=self.beyond,
            chunk=self.chunk,
            offload=self.offload,
            options=options,
        )


def collect(context: typer.Context) -> tuple[Arguments, dict[str, Any]]:
    """Arguments and measurement options of a command.

    Raises:
        ConfigError: If the config file is wrong, or an assignment is.
    """
    given = dict(context.params)
    path: Path | None = given.pop("config")
    options: dict[str, Any] = dict(parse_assignments(given.pop("set_") or ()))
    values = {name: given[name] for name in given if _typed(context, name)}
    if path is not None:
        names = [f.name for f in dataclasses.fields(Arguments)]
        from_file = read_config_file(path, known=[*names, "set"])
        assigned = from_file.pop("set", {})
        if not isinstance(assigned, dict):
            raise ConfigError(f"--config {path}: 'set' must be a table of names and values")
        options = {**assigned, **options}
        values = {**from_file, **values}
    if isinstance(values.get("text"), str):
        values["text"] = [values["text"]]
    if "out" in values:
        values["out"] = str(values["out"])
    return cast(Arguments, build_config(Arguments, values)), options


def _typed(context: typer.Context, name: str) -> bool:
    """Whether the user typed the option, rather than leaving it to its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
