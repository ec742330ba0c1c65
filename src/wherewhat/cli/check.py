"""``wherewhat check``: the proof of a model as a table."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from wherewhat.cli.options import with_fields
from wherewhat.progress import TerminalProgress
from wherewhat.runs.request import ModelRequest

_Layers = Annotated[bool, typer.Option("--layers", help="Show one line per layer, with all errors.")]


@with_fields(ModelRequest)
def check(layers: _Layers = False, **given: Any) -> None:
    """Check that captured queries and keys reproduce the model's attention, and show the errors.

    Rotating the queries and keys before RoPE must give those after it; the softmax of the recomputed logits must equal
    the model's eager attention weights; the attention output must equal the model's; capturing must not change the
    model's output. A model that fails a check is not measured.
    """
    from wherewhat.captures.proof import prove
    from wherewhat.cli.tables import proof_remarks, proof_table
    from wherewhat.runs.execution import load_model

    loaded = load_model(ModelRequest(**given), say=TerminalProgress().say)
    proof = prove(loaded.model)
    console = Console()
    console.print(proof_table(proof, each=layers))
    for line in proof_remarks(proof):
        console.print(line, markup=False, highlight=False)
    line = f"{loaded.name}: proved. Capturing changes the model's output by {proof.output_change:g}."
    console.print(line, markup=False)
