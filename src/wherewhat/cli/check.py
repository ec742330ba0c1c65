"""``wherewhat check``: the proof, on a user's model, as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from wherewhat.cli import options
from wherewhat.cli.terminal import TerminalProgress

_Layers = Annotated[bool, typer.Option("--layers", help="A line for every layer, with all of its errors.")]


def check(
    context: typer.Context,
    model: options.Model = "smollm2",
    weights: options.Weights = "trained",
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    device_map: options.DeviceMap = None,
    revision: options.Revision = None,
    attn_implementation: options.AttnImplementation = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    layers: _Layers = False,
) -> None:
    """Prove that what is captured is what the model computes, and show the numbers.

    Rotating the pre-rotation tensors must give the post-rotation ones; softmax of our logits must equal the model's
    own eager attention weights; the attention output must equal the model's; capturing must not change the model's
    output. If one does not hold, the model is refused.
    """
    del (
        model,
        weights,
        device,
        dtype,
        seed,
        device_map,
        revision,
        attn_implementation,
        offline,
        trust_remote_code,
    )
    from wherewhat.captures.proof import prove
    from wherewhat.cli.tables import proof_remarks, proof_table
    from wherewhat.runs.execution import load_model
    from wherewhat.runs.request import ModelRequest

    request = {name: value for name, value in context.params.items() if name != "layers"}
    loaded = load_model(ModelRequest(**request), say=TerminalProgress(Console(stderr=True)).say)
    proof = prove(loaded.model)
    console = Console()
    console.print(proof_table(proof, each=layers))
    for line in proof_remarks(proof):
        console.print(line, markup=False, highlight=False)
    console.print(
        f"{loaded.name}: proved. Capturing changes the model's output by {proof.output_change:g}.", markup=False
    )
