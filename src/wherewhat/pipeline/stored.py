"""A document's numbers as they were measured, read back from its part of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wherewhat.measure.base import Curve, DocumentScores, LayerScores
from wherewhat.store import ProfileFile

if TYPE_CHECKING:
    import pyarrow as pa


def stored_document(table: pa.Table, profiles: ProfileFile | None = None) -> DocumentScores:
    """The numbers of one document, from its score table and, where they are wanted, its curves.

    Undefined values come back as NaN.
    """
    columns = table.select(["layer", "head", "metric", "value"]).to_pydict()
    heads: dict[int, dict[str, dict[int, float]]] = {}
    whole: dict[int | None, dict[str, float]] = {}
    for layer, head, metric, value in zip(*columns.values(), strict=True):
        number = torch.nan if value is None else value
        if head is None:
            whole.setdefault(layer, {})[metric] = number
        else:
            heads.setdefault(layer, {}).setdefault(metric, {})[head] = number
    curves: dict[int | None, dict[str, Curve]] = {}
    if profiles is not None:
        for name in profiles:
            _, index, curve = name.rsplit("/", 2)
            layer = None if index == "-" else int(index)
            curves.setdefault(layer, {})[curve] = Curve(profiles[name], profiles.axes(name))
    indices = sorted({*heads, *(i for i in [*whole, *curves] if i is not None)})
    layers = [
        LayerScores(
            layer=i,
            heads={
                metric: torch.tensor([values[h] for h in sorted(values)], dtype=torch.float64)
                for metric, values in heads.get(i, {}).items()
            },
            whole=whole.get(i, {}),
            curves=curves.get(i, {}),
        )
        for i in indices
    ]
    return DocumentScores(layers, whole.get(None, {}), curves.get(None, {}))
