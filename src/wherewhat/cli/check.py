"""``wherewhat check``: the proof, on a user's model, as a table."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from wherewhat.cli.options import with_fields
from wherewhat.cli.terminal import TerminalProgress
from wherewhat.runs.request import ModelRequest

_Layers = Annotated[bool, typer.Option("--layers", help="A line for every layer, with all of its errors.")]


@with_fields(ModelRequest)
def check(layers: _Layers = False, **given: Any) -> None:
    """Prove that what is captured is what the model computes, and show the numbers.

    Rotating the pre-rotation tensors must give the post-rotation ones; softmax of our logits must equal the model's
    own eager attention weights; the attention output must equal the model's; capturing must not change the model's
    output. If one does not hold, the model is refused.
    """
    from wherewhat.captures.proof import prove
    from wherewhat.cli.tables import proof_remarks, proof_table
    from wherewhat.runs.execution import load_model

    loaded = load_model(ModelRequest(**given), say=TerminalProgress(Console(stderr=True)).say)
    proof = prove(loaded.model)
    console = Console()
    console.print(proof_table(proof, each=layers))
    for line in proof_remarks(proof):
        console.print(line, markup=False, highlight=False)
    console.print(
        f"{loaded.name}: proved. Capturing changes the model's output by {proof.output_change:g}.", markup=False
    )
