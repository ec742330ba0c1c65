"""Curves of every head and of controlled distance, read from run directories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from wherewhat.report.encoding import packed, rounded
from wherewhat.report.looking import Look
from wherewhat.report.measuring import Runs
from wherewhat.store import ProfileFile, RunDirectory, profile_name


def first_document(directory: RunDirectory) -> str:
    """Name of the first document of a run."""
    return str(cast("list[dict[str, Any]]", directory.config["documents"])[0]["name"])


def head_records(runs: Runs, look: Look, layers: Sequence[int]) -> list[list[dict[str, Any]]]:
    """For each layer and head what its panel draws: logit map, curves a, b and c, planes.

    The map and the curves are of the same document, so that ``a[i-j] + b[i] + c[j]`` is the map's fit.
    """
    names = ("axes", "heads", "planes", "frequencies")
    axes, heads, planes, frequencies = (_Curves(runs.find(name)) for name in names)
    records = []
    for layer in layers:
        a, b, c = (axes.get(layer, name) for name in "abc")
        by_plane = {
            "use": heads.get(layer, "frequency_use"),
            "share": planes.get(layer, "plane_share"),
            "plane_pos": frequencies.get(layer, "plane_s_pos"),
            "plane_sym": frequencies.get(layer, "plane_s_sym"),
        }
        logits = look.logits[layer]
        rows = int((2 * logits.shape[1]) ** 0.5)
        listed = []
        for head in range(logits.shape[0]):
            record: dict[str, Any] = {"map": packed(logits[head], bits=8)}
            if a is not None and b is not None and c is not None:
                record |= {
                    "a": packed(a[head], bits=16),
                    "b": packed(b[head, :rows], bits=16),
                    "c": packed(c[head], bits=16),
                }
            record |= {name: packed(x[head], bits=16) for name, x in by_plane.items() if x is not None}
            listed.append(record)
        records.append(listed)
    return records


def turns_per_token(runs: Runs, layers: Sequence[int]) -> list[list[float | None] | None]:
    """Turns of each plane for each token by layer; None for layers that do not rotate."""
    planes = _Curves(runs.find("planes"))
    found = (planes.get(layer, "plane_turns_per_token") for layer in layers)
    return [None if turns is None else _list(turns) for turns in found]


_DISTANCE = {
    "rank_correlation": "order of keys kept",
    "rank_correlation_scrambled": "the same, random phases",
    "drift": "drift of the key component",
    "drift_scrambled": "the same, random phases",
}


def controlled_distance(runs: Runs, layers: Sequence[int]) -> dict[str, Any] | None:
    """Controlled distance over all heads: median and quartiles at each dummy distance; None if it was not measured."""
    distance = _Curves(runs.find("distance"))
    measured = [layer for layer in layers if distance.get(layer, "distances") is not None]
    if not measured:
        return None
    grid = distance.get(measured[0], "distances")
    assert grid is not None
    curves = {}
    for name, title in _DISTANCE.items():
        found = [curve for layer in measured if (curve := distance.get(layer, name)) is not None]
        # Sliding windows do not change the grid, but one of another length could not be put on the same axis.
        same = [curve.double() for curve in found if curve.shape[-1] == len(grid)]
        if same:
            quartiles = torch.cat(same).nanquantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
            curves[name] = {"title": title, **dict(zip(("low", "mid", "high"), map(_list, quartiles), strict=True))}
    return {"distances": _list(grid), "curves": curves}


class _Curves:
    """Curves of the first document of a run, or of nothing."""

    def __init__(self, directory: RunDirectory | None) -> None:
        self._profiles: ProfileFile | None = None if directory is None else directory.profiles()
        self._document = "" if directory is None else first_document(directory)

    def get(self, layer: int, name: str) -> Tensor | None:
        if self._profiles is None:
            return None
        return self._profiles.get(profile_name(self._document, layer, name))


def _list(values: Tensor) -> list[float | None]:
    return [rounded(value) for value in values.tolist()]
