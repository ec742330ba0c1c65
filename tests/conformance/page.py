"""Prove every causal language model type of the installed transformers and write ``docs/models.md``.

Run with ``make models``. ``test_proof.py`` keeps the page true.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from conformance.tiny_models import NotBuildable, build, causal_lm_types, variants
from wherewhat.capturing import Proof, prove
from wherewhat.errors import CaptureError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

PROVED, NOT_APPLICABLE, NOT_YET = "proved", "not applicable", "not yet"

# Types without softmax attention over the tokens of a text: there is nothing to prove.
NO_ATTENTION = {
    "falcon_mamba": "state-space model, no attention",
    "mamba": "state-space model, no attention",
    "mamba2": "state-space model, no attention",
    "rwkv": "linear recurrence, no softmax attention",
    "xlstm": "recurrent, no attention",
}
# Types with softmax attention that cannot be read yet, and why.
UNREADABLE = {
    "deepseek_v4": "some layers attend to compressed blocks besides tokens: such keys have no position",
    "prophetnet": "predicts with several n-gram streams at once; logits carry a learned relative position term",
    "reformer": "attends within hash buckets: its logits are not a queries × keys matrix",
    "xlnet": "two-stream attention written with einsum; logits carry a relative position term",
}


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    name: str
    status: str
    route: str = ""
    position: str = ""
    features: str = ""
    reason: str = ""
    error: float = 0.0

    def cells(self) -> tuple[str, ...]:
        return self.name, self.status, self.route, self.position, self.features or self.reason


def examine(name: str) -> Row:
    """Build one type or variant and run the proof."""
    if name in NO_ATTENTION:
        return Row(name, NOT_APPLICABLE, reason=NO_ATTENTION[name])
    try:
        tiny = build(name)
    except NotBuildable as problem:
        return Row(name, NOT_APPLICABLE, reason=problem.reason)
    try:
        proof = prove(tiny.model, input_ids=tiny.inputs()["input_ids"])
    except CaptureError as problem:
        return Row(name, NOT_YET, reason=UNREADABLE.get(name, str(problem)))
    worst = max(max(x.rotation_error, x.weights_error, x.output_error) for x in proof.layers)
    return Row(name, PROVED, proof.plan.route, position(proof), features(proof), error=worst)


def position(proof: Proof) -> str:
    """How the layers know positions, in a few words."""
    kinds = []
    for layer in proof.layers:
        rotation = layer.plan.rotation
        if rotation is not None:
            share = "" if 2 * rotation.planes == layer.head_dim else f" {2 * rotation.planes}/{layer.head_dim}"
            all_turn = rotation.turning == rotation.planes
            still = "" if all_turn else f" ({rotation.turning} of {rotation.planes} planes turn)"
            kinds.append(f"RoPE {rotation.pairing}{share}{still}")
        elif layer.plan.note:
            kinds.append("RoPE, then a norm")
        else:
            kinds.append("bias" if "bias" in layer.features else "not in attention")
    return ", ".join(dict.fromkeys(kinds))


def features(proof: Proof) -> str:
    """What else the layers have, in a few words."""
    found = []
    for layer in proof.layers:
        found += ["GQA"] if layer.kv_heads < layer.heads else []
        found += [feature for feature in layer.features if feature != "bias"]
    if proof.unmeasured:
        measured = len({layer.plan.name for layer in proof.layers})
        kinds = dict.fromkeys(layer.reason for layer in proof.unmeasured)
        found.append(
            f"attention in {measured} of {measured + len(proof.unmeasured)} layers; others: {', '.join(kinds)}"
        )
    return ", ".join(dict.fromkeys(found))


def render(rows: Iterable[Row], *, version: str) -> str:
    """The page as Markdown."""
    rows = list(rows)
    types = [row for row in rows if ":" not in row.name]
    softmax = [row for row in types if row.status != NOT_APPLICABLE]
    proved = [row for row in softmax if row.status == PROVED]
    lines = [
        "# Supported models",
        "",
        "<!-- Written by `make models`; do not edit. -->",
        "",
        f"Every causal language model type of transformers {version}, each built as a tiny random model and put",
        "through the proof: rotating the pre-rotation queries and keys gives the post-rotation ones, softmax of the",
        "captured logits equals the model's own eager attention weights, the attention output equals the model's in",
        "its normal implementation, and capturing does not change the model's output by a single bit.",
        "",
        f"**{len(proved)} of {len(softmax)}** types with softmax attention are proved"
        f" ({100 * len(proved) / len(softmax):.0f} %); {len(types) - len(softmax)} types have none.",
        "",
        "*Route* says how attention is seen: `interface` through transformers' attention interface, `trace` by",
        "following the model's own tensor operations (this also covers models that bring their own code). *Position*",
        "says how the attention layers know positions: which dimensions RoPE pairs and how many it turns, an additive",
        "bias (ALiBi and relatives), or nothing in the attention itself (learned or sinusoidal embeddings, or none).",
        "Planes of frequency 0 (p-RoPE) do not turn, and are counted. Hybrid models are measured in their attention",
        "layers; the remarks say how many those are, and what the others have instead.",
        "",
    ]
    for title, part in (("Types", types), ("Variants", [row for row in rows if ":" in row.name])):
        lines += [
            f"## {title}",
            "",
            "| type | result | route | position | remarks |",
            "|---|---|---|---|---|",
        ]
        lines += [
            "| " + " | ".join(f"`{row.name}`" if i == 0 else cell for i, cell in enumerate(row.cells())) + " |"
            for row in part
        ]
        lines.append("")
    return "\n".join(lines)


def examine_all() -> list[Row]:
    """Every type and variant."""
    return [examine(name) for name in [*causal_lm_types(), *variants()]]


def main() -> None:
    """Write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    PAGE.write_text(render(examine_all(), version=transformers.__version__), "utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
