"""Prove every causal language model type of the installed transformers; write ``docs/models.md`` and the catalog.

Run with ``make models``. ``test_proof.py`` keeps both true.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

from conformance.hard import KINDS, NO_NORM, NORMS, WITHOUT, harden, shown
from conformance.tiny_models import NotBuildable, Tiny, build, causal_lm_types, variants
from wherewhat.captures.proof import Proof, prove
from wherewhat.errors import CaptureError
from wherewhat.models.source import SupportedModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CATALOG = Path(__file__).parents[2] / "src" / "wherewhat" / "models" / "data" / "catalog.json"

PROVED, NOT_APPLICABLE, NOT_YET = "proved", "not applicable", "not yet"

# Tokens of the prompt: CPUs without bfloat16 are slow at it, and 9 cross nearly every window.
HARD_DTYPES = {torch.float32: 23, torch.bfloat16: 9}

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
    "prophetnet": "predicts with several n-gram streams; logits include a learned relative position term",
    "reformer": "attends within hash buckets or chunks: its logits are not one queries × keys matrix",
    "xlnet": "two-stream attention; logits include a relative position term that is not a product of query and key",
}


@dataclass(frozen=True)
class Row:
    """One line of the page."""

    name: str
    status: str
    route: str = ""
    position: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    reason: str = ""
    error: float = 0.0
    hard: tuple[str, ...] = ()
    hard_reason: str = ""
    without: frozenset[str] = frozenset()

    def cells(self) -> tuple[str, ...]:
        position, hard, features = map(", ".join, (self.position, self.hard, self.features))
        return self.name, self.status, self.route, position, hard, features or self.reason

    def supported(self) -> SupportedModel:
        """The entry of the catalog."""
        model_type, _, variant = self.name.partition(":")
        return SupportedModel(
            model_type=model_type,
            variant=variant or None,
            verified=self.status == PROVED,
            attention=self.status != NOT_APPLICABLE,
            route=self.route or None,
            position=self.position,
            features=self.features,
            dtypes=self.hard,
            reason=self.reason or None,
        )


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
        return Row(name, NOT_YET, reason=UNREADABLE.get(name.partition(":")[0], str(problem)))
    row = Row(name, PROVED, proof.layout.route, position(proof), features(proof), error=_worst(proof))
    return examine_hard(row, tiny, proof)


def examine_hard(row: Row, tiny: Tiny, proof: Proof) -> Row:
    """Give the model the weights of ``conformance.hard`` and run the proof again, in each of ``HARD_DTYPES``."""
    ids = tiny.inputs()["input_ids"]
    found = harden(tiny.model, proof)
    for dtype, tokens in HARD_DTYPES.items():
        name = str(dtype).removeprefix("torch.")
        tiny.model.to(dtype)
        try:
            again = prove(tiny.model, input_ids=ids[:, :tokens])
            if dtype == torch.float32:
                found |= shown(tiny.model, again, ids)
                row = replace(row, error=max(row.error, _worst(again)))
        except CaptureError as problem:
            row = replace(row, hard_reason=f"{row.hard_reason}{name}: {problem} ")
            continue
        row = replace(row, hard=(*row.hard, name))
    return replace(row, without=frozenset(KINDS) - found)


def _worst(proof: Proof) -> float:
    return max(max(x.rotation_error, x.weights_error, x.output_error) for x in proof.layers)


def position(proof: Proof) -> tuple[str, ...]:
    """How the layers know positions, in a few words."""
    kinds = []
    for layer in proof.layers:
        rotation = layer.layout.rotation
        if rotation is not None:
            share = "" if 2 * rotation.planes == layer.head_dim else f" {2 * rotation.planes}/{layer.head_dim}"
            all_turn = rotation.turning == rotation.planes
            still = "" if all_turn else f" ({rotation.turning} of {rotation.planes} planes turn)"
            kinds.append(f"RoPE {rotation.pairing}{share}{still}")
        elif layer.layout.note:
            kinds.append("RoPE, then a norm")
        else:
            kinds.append("bias" if "bias" in layer.features else "not in attention")
    return tuple(dict.fromkeys(kinds))


def features(proof: Proof) -> tuple[str, ...]:
    """What else the layers have, in a few words."""
    found = []
    for layer in proof.layers:
        found += ["GQA"] if layer.kv_heads < layer.heads else []
        found += [feature for feature in layer.features if feature != "bias"]
    if proof.unmeasured:
        measured = len({layer.layout.name for layer in proof.layers})
        kinds = dict.fromkeys(layer.reason for layer in proof.unmeasured)
        found.append(
            f"attention in {measured} of {measured + len(proof.unmeasured)} layers; others: {', '.join(kinds)}"
        )
    return tuple(dict.fromkeys(found))


def catalog(rows: Iterable[Row], *, version: str) -> str:
    """The file that ``wherewhat.supported_models`` reads: JSON with one line per model."""
    lines = [f"  {json.dumps(asdict(row.supported()), ensure_ascii=False)}" for row in rows]
    return "\n".join([f'{{"transformers": "{version}", "models": [', ",\n".join(lines), "]}", ""])


def render(rows: Iterable[Row], *, version: str) -> str:
    """The page as Markdown."""
    rows = list(rows)
    types = [row for row in rows if ":" not in row.name]
    softmax = [row for row in types if row.status != NOT_APPLICABLE]
    proved = [row for row in softmax if row.status == PROVED]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in HARD_DTYPES]
    lines = [
        "# Supported models",
        "",
        "<!-- Written by `make models`; do not edit. -->",
        "",
        f"Every causal language model type of transformers {version}, built as a tiny random model, is verified by the",
        "[proof](capture.md#the-proof): rotating the pre-rotation queries and keys gives the post-rotation ones,",
        "softmax of the captured logits equals the model's own eager attention weights, the attention output",
        "equals that of the model's normal implementation, and capturing does not change a bit of the model's",
        "output. The proof is repeated with [hard weights](#hard-weights), which have properties of trained",
        "models.",
        "",
        f"**{len(proved)} of {len(softmax)}** types with softmax attention are proved"
        f" ({100 * len(proved) / len(softmax):.0f} %); {len(types) - len(softmax)} types have none.",
        *(f"With hard weights, {_count(proved, dtype)} of them are proved in {dtype}." for dtype in dtypes),
        "",
        "In Python, `wherewhat.supported_models()` returns this list, one entry per type with `model_type`,",
        "`verified`, `route`, `position`, `features`, `dtypes` (hard weights) and `reason`; `variants=True` adds the",
        "variants. A model is verified again when it is loaded, so unlisted types work if they pass.",
        "",
        "The columns:",
        "",
        "- *Route*: how attention is observed, `interface` through transformers' attention interface, `trace` by",
        "  following the model's tensor operations (this also covers models with remote code).",
        "- *Position*: how attention layers encode position. `RoPE half` pairs dimension f with f + d/2, `RoPE",
        "  interleaved` 2f with 2f + 1; `8/24` means that 8 of 24 dimensions of a head are rotated (partial",
        "  rotation); `4 of 16 planes turn` means that the other planes have frequency 0 (p-RoPE). `bias` is an",
        "  additive bias (ALiBi and similar); `not in attention` means learned or sinusoidal embeddings, or none.",
        "  Several entries are kinds of layers of one model.",
        "- *Remarks*: `GQA` is grouped-query attention; hybrid models are measured in their attention layers, and",
        "  the remarks give their number and the kinds of the others; for types that are not proved, the reason.",
        "",
    ]
    for title, part in (("Types", types), ("Variants", [row for row in rows if ":" in row.name])):
        lines += [
            f"## {title}",
            "",
            "| type | result | route | position | hard weights | remarks |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            "| " + " | ".join(f"`{row.name}`" if i == 0 else cell for i, cell in enumerate(row.cells())) + " |"
            for row in part
        ]
        lines.append("")
    return "\n".join([*lines, *_hard_lines(rows)])


def _count(rows: list[Row], dtype: str) -> int:
    return sum(dtype in row.hard for row in rows)


def _hard_lines(rows: list[Row]) -> list[str]:
    lines = [
        "## Hard weights",
        "",
        "Trained models have properties that random weights lack. Each model above is verified again with all of these",
        "together, in planes and heads that differ from layer to layer:",
        "",
        *(f"- **{kind}**: {words}" for kind, words in KINDS.items()),
        "",
        "Not every kind is possible in every architecture:",
        "",
        "| kind | models without it | reason |",
        "|---|---|---|",
    ]
    for kind in KINDS:
        names = {row.name for row in rows if kind in row.without}
        by_reason: dict[str, list[str]] = {}
        for name in sorted(names):
            by_reason.setdefault(WITHOUT.get(kind, {}).get(name, "unknown"), []).append(f"`{name}`")
        if kind == NORMS:
            by_reason = {NO_NORM: [f"{len(names)} of {sum(row.status == PROVED for row in rows)}"]}
        lines += [f"| {kind} | {', '.join(models)} | {reason} |" for reason, models in by_reason.items()]
    refused = [f"- `{row.name}`: {row.hard_reason.strip()}" for row in rows if row.hard_reason]
    return [*lines, "", *(["Refused with hard weights:", "", *refused, ""] if refused else [])]


def examine_all() -> list[Row]:
    """Every type and variant."""
    return [examine(name) for name in [*causal_lm_types(), *variants()]]


def main() -> None:
    """Write the page and the catalog."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = examine_all()
    PAGE.write_text(render(rows, version=transformers.__version__), "utf-8")
    CATALOG.write_text(catalog(rows, version=transformers.__version__), "utf-8")
    sys.stdout.write(f"{PAGE}\n{CATALOG}\n")


if __name__ == "__main__":
    main()
