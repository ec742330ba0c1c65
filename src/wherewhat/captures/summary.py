"""A proof as a table for people and as values for programs: kinds of layers, equal layers in one row, remarks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from wherewhat.captures.comparison import LayerProof
from wherewhat.captures.layout import Unmeasured
from wherewhat.captures.rotation import Rotation

Kinds = dict[str, list[int]]
"""Layers by the name of their kind, in the order of the first layer; empty where all layers are alike."""


def layer_kinds(layers: Sequence[LayerProof]) -> Kinds:
    """Group layers by attention window and rotation; the name of each group states what differs."""
    windows, ropes = [_window(layer) for layer in layers], [_rope(layer.layout.rotation) for layer in layers]
    differing = [names for names in (windows, ropes) if len(set(names)) > 1]
    kinds: Kinds = {}
    for layer, *names in zip(layers, *differing, strict=True):
        found = kinds.setdefault(", ".join(names), [])
        if layer.layout.layer not in found:
            found.append(layer.layout.layer)
    return kinds if differing else {}


def _window(layer: LayerProof) -> str:
    if layer.window is not None:
        return f"window {layer.window:,}"
    return "window" if "window" in layer.features else "full"


def _rope(rotation: Rotation | None) -> str:
    """Return the RoPE base, from the ratio of frequencies; ``÷ s`` where the fastest plane is s times slower."""
    turning = [] if rotation is None else sorted((abs(x) for x in rotation.inv_freq.tolist() if x), reverse=True)
    if rotation is None or not turning:
        return "no RoPE"
    base = (turning[0] / turning[-1]) ** (rotation.planes / max(1, len(turning) - 1))
    slowed = "" if math.isclose(turning[0], 1, rel_tol=1e-3) else f" ÷ {1 / turning[0]:.3g}"
    return f"RoPE base {float(f'{base:.3g}'):,.0f}{slowed}"


@dataclass(frozen=True)
class ProofTable:
    """The numbers of a proof as text, ready to be drawn.

    Attributes:
        title: Attention modules, route, implementation and tolerance.
        columns: Names of the columns.
        rows: Cells of each row, one row per group of equal layers or per layer; then the layers not measured.
        remarks: Notes on the rotation of layers, and why layers are not measured, one line each.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]

    @classmethod
    def of(
        cls, layers: Sequence[LayerProof], unmeasured: Sequence[Unmeasured], *, title: str, each: bool = False
    ) -> ProofTable:
        """Return the table of a proof; with ``each`` one row per layer, with all errors."""
        modules = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", layer.layout.name) for layer in layers))
        errors = ("rot. err", "wts. err", "out. err") if each else ("error",)
        others = _by_reason(layers, unmeasured)
        columns = ("layer", "heads", "rotation", "also", *errors)
        not_measured = [(places, "", "not measured") + ("",) * (len(columns) - 3) for places in others.values()]
        return cls(
            title=f"{modules}: {title}",
            columns=columns,
            rows=(*_rows(layers, each=each), *not_measured),
            remarks=(
                *_notes(layers),
                *(f"Layers {places}: no softmax self-attention: {reason}." for reason, places in others.items()),
            ),
        )

    def text(self) -> str:
        """Return the table as aligned plain text, with title and remarks."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        drawn = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *(line.rstrip() for line in drawn), *self.remarks])

    def html(self) -> str:
        """Return the table as an HTML fragment."""
        header, *rows = (
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>"
            for tag, line in (("th", self.columns), *(("td", row) for row in self.rows))
        )
        remarks = "".join(f"<p>{escape(remark)}</p>" for remark in self.remarks)
        return (
            f"<table><caption>{escape(self.title)}</caption><thead>{header}</thead>"
            f"<tbody>{''.join(rows)}</tbody></table>{remarks}"
        )


def layer_values(layers: Sequence[LayerProof]) -> list[dict[str, Any]]:
    """Return what was proved of each layer as JSON values."""
    kinds = _kind_of(layers)
    return [
        {
            "layer": layer.layout.layer,
            "name": layer.layout.name,
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "rotation": _rotation_values(layer.layout.rotation),
            "window": layer.window,
            "kind": kinds.get(layer.layout.layer),
            "features": list(layer.features),
            "note": layer.layout.note or None,
            "errors": {
                "rotation": layer.rotation_error,
                "weights": layer.weights_error,
                "output": layer.output_error,
                "drift": layer.drift,
            },
        }
        for layer in layers
    ]


def _rotation_values(rotation: Rotation | None) -> dict[str, Any] | None:
    if rotation is None:
        return None
    return {"pairing": rotation.pairing, "planes": rotation.planes, "turning": rotation.turning}


def _kind_of(layers: Sequence[LayerProof]) -> dict[int, str]:
    return {layer: kind for kind, members in layer_kinds(layers).items() for layer in members}


def _rows(layers: Sequence[LayerProof], *, each: bool) -> Iterator[tuple[str, ...]]:
    """Yield the row of each group of layers: number or range, heads, rotation, features and errors."""
    kinds = _kind_of(layers)
    groups: dict[Any, list[LayerProof]] = {}
    for layer in layers:
        cells = _cells(layer, kinds.get(layer.layout.layer, ""))
        groups.setdefault((layer.layout.layer, *cells) if each else ("", *cells), []).append(layer)
    for (_, *cells), members in groups.items():
        numbers = [[x.rotation_error, x.weights_error, x.output_error] for x in members]
        shown = [max(column) for column in zip(*numbers, strict=True)] if each else [max(map(max, numbers))]
        yield _ranges([x.layout.layer for x in members]), *cells, *(f"{x:.0e}" for x in shown)


def _cells(layer: LayerProof, kind: str) -> tuple[str, str, str]:
    """Return heads, rotation, and kind and further features of a layer."""
    kind = kind.replace("RoPE base", "base")
    features = [feature for feature in layer.features if feature != "window" or "window" not in kind]
    heads = str(layer.heads) if layer.heads == layer.kv_heads else f"{layer.heads} / {layer.kv_heads} kv"
    return heads, str(layer.layout.rotation or "none"), ", ".join([kind, *features] if kind else features)


def _notes(layers: Sequence[LayerProof]) -> Iterator[str]:
    noted: dict[str, list[int]] = {}
    for layer in layers:
        noted.setdefault(layer.layout.note, []).append(layer.layout.layer)
    noted.pop("", None)
    return (f"Layers {_ranges(numbers)}: {note}." for note, numbers in noted.items())


def _by_reason(layers: Sequence[LayerProof], unmeasured: Sequence[Unmeasured]) -> dict[str, str]:
    """Return the layers that are not measured, by the reason.

    They are named where measured layers are numbered by the order of their calls and not by their block.
    """
    by_block = all(str(layer.layout.layer) in layer.layout.name.split(".") for layer in layers)
    found: dict[str, list[Unmeasured]] = {}
    for layer in unmeasured:
        found.setdefault(layer.reason, []).append(layer)
    return {
        reason: _ranges([x.layer for x in members]) if by_block else ", ".join(x.name for x in members)
        for reason, members in found.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ``0-4, 6``."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
