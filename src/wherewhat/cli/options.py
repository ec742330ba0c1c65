"""The options every command shares, written down once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
