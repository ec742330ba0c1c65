"""``wherewhat check``: the proof of a model as a table."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from wherewhat.cli.options import with_fields
from wherewhat.cli.terminal import print_line
from wherewhat.errors import WherewhatError
from wherewhat.progress import TerminalProgress
from wherewhat.runs.request import ModelRequest

if TYPE_CHECKING:
    from wherewhat.captures.proof import Proof

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
    from wherewhat.runs.execution import load_model

    loaded = load_model(ModelRequest(**given), say=TerminalProgress().say)
    return loaded.name, prove(loaded.model)


def _show(name: str, proof: Proof, *, each: bool) -> None:
    from wherewhat.cli.tables import proof_table

    console = Console()
    table = proof.table(each=each)
    console.print(proof_table(table))
    for line in table.remarks:
        print_line(console, line, wrap=True)
    print_line(console, f"{name}: proved. Capturing changes the model's output by {proof.output_change:g}.", wrap=True)


def _print_json(values: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(values, indent=2, allow_nan=False)}\n")
