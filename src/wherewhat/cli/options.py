"""Options shared by all commands, merged from command line, config file and defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wherewhat.errors import ConfigError
from wherewhat.options import build_config, parse_assignments, read_config_file
from wherewhat.runs.request import ModelRequest, Request

Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="smollm2 (embedded), a Hugging Face id, a folder (model or LoRA adapter), or a .gguf file.",
    ),
]
Weights = Annotated[
    str,
    typer.Option(help="trained, random (freshly initialised twin) or shuffled (query and key entries permuted)."),
]
Seed = Annotated[int, typer.Option(help="Seed of the twins, and of prompts.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
DeviceMap = Annotated[
    str | None,
    typer.Option("--device-map", help="auto spreads a model larger than one GPU (needs accelerate)."),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")]
Offline = Annotated[bool, typer.Option("--offline", help="Never open a connection.")]
AttnImplementation = Annotated[
    str | None,
    typer.Option("--attn-implementation", help="sdpa, eager or another of transformers' (default: the model's own)."),
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let a model's own Python code run.")]

Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="FILE", help="A text file, a folder, a .jsonl file, or - ; repeat for several."),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="Prompts made for the model instead of texts: binding, numbers, letters, random."
    ),
]
Items = Annotated[
    str | None,
    typer.Option(
        metavar="TASK", help="Questions with alternatives: a task such as arc_easy or boolq/rc_5shot, or a .jsonl file."
    ),
]
Documents = Annotated[
    int | None, typer.Option(help="How many documents or items to use (embedded text and prompts: 4, tasks: 100).")
]
Tokens = Annotated[int, typer.Option(help="Tokens of each document.")]
Beyond = Annotated[bool, typer.Option("--beyond", help="Go beyond the positions the model was made for.")]
Chunk = Annotated[
    int | None,
    typer.Option(help="Run longer documents in chunks of so many tokens through the key-value cache, such as 512."),
]
Offload = Annotated[
    bool, typer.Option("--offload", help="With --chunk: keep queries and outputs in main memory meanwhile.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder that holds the run directories.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the measurement; repeat for more."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The same options from a TOML or JSON file.")
]
Control = Annotated[
    bool, typer.Option(help="Also measure the model's twins (freshly initialised, …), to compare with.")
]


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
    """Arguments and measurement options of a command."""
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
