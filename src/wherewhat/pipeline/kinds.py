"""Layers by kind: many models alternate sliding-window and full attention, or change the RoPE base between layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from wherewhat.capturing import LayerProof
from wherewhat.capturing.rotation import Rotation
from wherewhat.store import RunDirectory

Kinds = dict[str, list[int]]
"""Layers by the name of their kind, in the order of the first layer; empty where all are of one kind."""


def layer_kinds(layers: Sequence[LayerProof]) -> Kinds:
    """Group layers by attention window and rotation, and name each group by what differs."""
    windows, ropes = [_window(layer) for layer in layers], [_rope(layer.plan.rotation) for layer in layers]
    differing = [names for names in (windows, ropes) if len(set(names)) > 1]
    kinds: Kinds = {}
    for layer, *names in zip(layers, *differing, strict=True):
        found = kinds.setdefault(", ".join(names), [])
        if layer.plan.layer not in found:
            found.append(layer.plan.layer)
    return kinds if differing else {}


def stored_kinds(directory: RunDirectory) -> Kinds:
    """Layers by kind as a finished run holds them; empty for runs that do not say."""
    extra = cast("dict[str, Any]", directory.provenance().get("extra") or {})
    kinds: Kinds = extra.get("layer_kinds") or {}
    return dict(sorted(kinds.items(), key=lambda kind: kind[1]))  # the file has them by name


def _window(layer: LayerProof) -> str:
    if layer.window is not None:
        return f"window {layer.window:,}"
    return "window" if "window" in layer.features else "full"


def _rope(rotation: Rotation | None) -> str:
    """RoPE base, from the ratio of neighbouring frequencies; ``÷ s`` where the fastest plane is slowed down s times."""
    turning = [] if rotation is None else sorted((abs(x) for x in rotation.inv_freq.tolist() if x), reverse=True)
    if rotation is None or not turning:
        return "no RoPE"
    base = (turning[0] / turning[-1]) ** (rotation.planes / max(1, len(turning) - 1))
    slowed = "" if math.isclose(turning[0], 1, rel_tol=1e-3) else f" ÷ {1 / turning[0]:.3g}"
    return f"RoPE base {float(f'{base:.3g}'):,.0f}{slowed}"
