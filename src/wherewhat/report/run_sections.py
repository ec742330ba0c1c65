"""What a page shows of one run: curves by distance, frequency, perturbation and length, and swap scores of heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wherewhat.lengths import find_method
from wherewhat.measures.frequencies.masking import frequency_bands
from wherewhat.measures.perturb import KINDS, percent
from wherewhat.measures.statistics import interval
from wherewhat.measures.swaps import LABELS, SCORE_LABELS
from wherewhat.report.data import head_values, interval_json, mean_of, rounded, rounded_list
from wherewhat.rules.roles import PATTERNS, ROLE_METRICS, ROLES, find_roles, portraits
from wherewhat.runs.results import StoredRun
from wherewhat.scores import NON_NEGATIVE


def bands(run: StoredRun) -> dict[str, Any]:
    """Return scores of single planes and loss increase by frequency band, of a run of frequencies."""
    count = int(run.options["bands"])
    listed = range(1, count + 1)
    return {
        "documents": len(run.documents),
        "tokens": run.directory.config["tokens"],
        "turns": _turns(run, count),
        "positional": [mean_of(run, f"s_pos_band_{band}") for band in listed],
        "symbolic": [mean_of(run, f"s_sym_band_{band}") for band in listed],
        "without": [mean_of(run, f"loss_without_band_{band}", less="loss") for band in listed],
        "without_random": mean_of(run, "loss_without_random", less="loss"),
        "only": [mean_of(run, f"loss_only_band_{band}", less="loss") for band in listed],
        "only_random": mean_of(run, "loss_only_random", less="loss"),
    }


def _turns(run: StoredRun, count: int) -> list[list[float | None]]:
    """Return the shortest and longest period of each band in tokens, in the first layer with RoPE; None for none."""
    inv_freq = next(iter(_layers_with(run, "inv_freq").values()))
    periods = []
    for mask in frequency_bands(inv_freq, count):
        speeds = inv_freq[mask].double()
        fast, slow = float(speeds.max()), float(speeds.min())
        periods.append([rounded(2 * math.pi / speed) if speed > 0 else None for speed in (fast, slow)])
    return periods


def _layers_with(run: StoredRun, name: str) -> dict[int, Tensor]:
    """Return a curve of the first document by layer, for the layers that have it."""
    named = (key for key in run.profiles if key.startswith(f"{run.documents[0]}/") and key.endswith(f"/{name}"))
    layers = sorted({int(key.rsplit("/", 2)[1]) for key in named})
    return {layer: curve for layer in layers if (curve := run.curve(layer, name)) is not None}


_UNMODIFIED = "none"


def lengths(run: StoredRun) -> dict[str, Any] | None:
    """Return loss by position of each length method of a run of extend, and its difference to the unmodified model.

    The difference is taken on each document before the mean, so that differences between texts do not hide it. Without
    the unmodified model there is none; without any method None is returned.
    """
    named = {name: run.curves(f"loss_by_position_{name}") for name in run.options["methods"]}
    plain, methods = named.get(_UNMODIFIED), []
    for name, curves in named.items():
        if not curves:
            continue
        pairs = list(zip(curves, plain, strict=True)) if plain else []
        buckets = range(len(curves[0]))
        methods.append(
            {
                "name": name,
                "rule": find_method(name).rule(),
                "loss": [
                    interval_json(interval([float(c[i, 1]) for c in curves]).within(NON_NEGATIVE)) for i in buckets
                ],
                "cost": [
                    interval_json(interval([float(c[i, 1] - p[i, 1]) for c, p in pairs])) for i in buckets if pairs
                ],
                "beyond": mean_of(run, f"loss_beyond_{name}"),
                "beyond_cost": mean_of(run, f"loss_beyond_{name}", less=f"loss_beyond_{_UNMODIFIED}"),
                "found": mean_of(run, f"found_beyond_{name}"),
            }
        )
    if not methods:
        return None
    edge = mean_of(run, "trained_length")
    return {
        "documents": len(run.documents),
        "tokens": run.directory.config["tokens"],
        "edge": None if edge is None else edge["mean"],
        "positions": [rounded(float(x)) for x in next(filter(None, named.values()))[0][:, 0]],
        "methods": methods,
    }


def perturbed(run: StoredRun) -> list[str]:
    """Return the kinds of perturbation that a run has losses of, those of layers by layer."""
    prefix = "loss_by_rate_"
    ends = (name.rsplit("/", 1)[1] for name in run.profiles)
    return list(dict.fromkeys(end.removeprefix(prefix) for end in ends if end.startswith(prefix)))


def perturbation(run: StoredRun) -> dict[str, Any]:
    """Return the loss increase by kind and rate, on all targets and on untouched ones, of a run of perturb."""
    kinds = []
    for kind in run.options["kinds"] or perturbed(run):
        curves = run.curves(f"loss_by_rate_{kind}")
        if not curves:
            continue
        rates = curves[0][:, 0].tolist()
        # The rates were stored in single precision; rounding restores the names of their metrics.
        names = [percent(round(rate, 6)) for rate in rates]
        kinds.append(
            {
                "id": kind,
                "title": KINDS.get(kind, kind),
                "rates": [float(name) for name in names],
                "all": [mean_of(run, f"rise_{kind}_at_{name}") for name in names],
                "untouched": [mean_of(run, f"rise_{kind}_at_{name}_untouched") for name in names],
            }
        )
    return {
        "documents": len(run.documents),
        "tokens": run.directory.config["tokens"],
        "loss": mean_of(run, "loss"),
        "kinds": kinds,
    }


_DISTANCE = {
    "rank_correlation": "order of keys kept",
    "rank_correlation_scrambled": "the same, random phases",
    "drift": "drift of the key component",
    "drift_scrambled": "the same, random phases",
}


def controlled_distance(run: StoredRun) -> dict[str, Any] | None:
    """Return median and quartiles over heads at each dummy distance, of a run of distance; None without curves."""
    measured = _layers_with(run, "distances")
    if not measured:
        return None
    grid = next(iter(measured.values()))
    curves = {}
    for name, title in _DISTANCE.items():
        of_layers = [curve for layer in measured if (curve := run.curve(layer, name)) is not None]
        # Curves with another number of distances cannot be drawn on the same axis.
        same = [curve.double() for curve in of_layers if curve.shape[-1] == len(grid)]
        if same:
            quartiles = torch.cat(same).nanquantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)
            curves[name] = {
                "title": title,
                **dict(zip(("low", "mid", "high"), map(rounded_list, quartiles), strict=True)),
            }
    return {"distances": rounded_list(grid), "curves": curves}


def swaps(run: StoredRun, layers: Sequence[int]) -> dict[str, Any] | None:
    """Return scores, intervals and labels of every head; over all documents together where there are several.

    The run is of heads; without scores of single heads None is returned.
    """
    if "s_pos" not in run.head_metrics:
        return None
    together = "_together" if "s_pos_together" in run.head_metrics else ""

    def version(ending: str) -> dict[str, Any]:
        values: dict[str, Any] = {"label": head_values(run, f"label{ending}{together}", layers)}
        for score in ("s_pos", "s_sym"):
            for bound in ("", "_low", "_high"):
                values[f"{score}{bound}"] = head_values(run, f"{score}{ending}{bound}{together}", layers)
        single, codes = run.head_values(f"label{ending}"), zip(layers, values["label"], strict=True)
        return {**values, "votes": [_votes(single, layer, of_layer) for layer, of_layer in codes]}

    return {
        **version("_no_sink"),
        "labels": ["sink", *SCORE_LABELS],
        "codes": list(LABELS),
        "all_keys": {**version(""), "labels": list(SCORE_LABELS), "codes": list(LABELS)},
        **{name: run.options[name] for name in ("gamma", "sink_threshold", "sink_tokens")},
    }


def _votes(
    single: Mapping[tuple[int, int], list[float]], layer: int, codes: list[float | None] | None
) -> list[list[int]] | None:
    """Return for each head the number of documents in which it has the given label alone, and that of documents."""
    if codes is None:
        return None
    listed = [single.get((layer, head), []) for head in range(len(codes))]
    pairs = zip(listed, codes, strict=True)
    return [[0 if code is None else values.count(code), len(values)] for values, code in pairs]


def roles(runs: Mapping[str, StoredRun], layers: Sequence[int]) -> dict[str, Any] | None:
    """Return roles and portrait of every head of a model and its control models, of runs of heads by weights.

    Returns:
        ``names`` of all roles, those that are ``patterns``, their ``metrics``, and by weights and layer a list of
        ``roles`` and the ``portrait`` of each head; None for a layer without scores. None if there are no runs.
    """
    if not runs:
        return None
    heads: dict[str, list[list[dict[str, Any]] | None]] = {}
    for weights, run in runs.items():
        sentences = portraits(run)
        listed = {place: [item.role for item in items] for place, items in find_roles(run).items()}
        by_layer: dict[int, list[dict[str, Any]]] = {}
        for (layer, head), sentence in sorted(sentences.items()):
            by_layer.setdefault(layer, []).append({"roles": listed[layer, head], "portrait": sentence})
        heads[weights] = [by_layer.get(layer) for layer in layers]
    return {"names": list(ROLES), "patterns": list(PATTERNS), "metrics": ROLE_METRICS, "heads": heads}
