"""RoPE's frequencies in bands from fast to slow: what each is by itself, and what the model is without it."""

from __future__ import annotations

import math
from typing import Any, cast

from wherewhat.measure.frequencies.masking import frequency_bands
from wherewhat.report.encoding import rounded
from wherewhat.report.measuring import Runs
from wherewhat.report.over_documents import documents, mean_of, scores_by_document
from wherewhat.store import ProfileFile, RunDirectory


def bands(runs: Runs) -> dict[str, Any] | None:
    """Scores of single planes and rise of the loss by band; None if it was not measured."""
    found = runs.request("frequencies")
    if found is None:
        return None
    request, directory = found
    scores = scores_by_document(directory)
    count = int(cast("dict[str, Any]", directory.config["options"])["bands"])
    listed = range(1, count + 1)
    return {
        "documents": len(documents(directory)),
        "tokens": request.tokens,
        "turns": _turns(directory.profiles(), directory, count),
        "positional": [mean_of(scores, f"s_pos_band_{band}") for band in listed],
        "symbolic": [mean_of(scores, f"s_sym_band_{band}") for band in listed],
        "without": [mean_of(scores, f"loss_without_band_{band}", less="loss") for band in listed],
        "without_random": mean_of(scores, "loss_without_random", less="loss"),
        "only": [mean_of(scores, f"loss_only_band_{band}", less="loss") for band in listed],
        "only_random": mean_of(scores, "loss_only_random", less="loss"),
    }


def _turns(profiles: ProfileFile, directory: RunDirectory, count: int) -> list[list[float | None]]:
    """Shortest and longest turn of each band in tokens, in the first layer that rotates; None for no turning."""
    first = f"{documents(directory)[0]}/"
    names = [name for name in profiles if name.startswith(first) and name.endswith("/inv_freq")]
    inv_freq = profiles[min(names, key=lambda name: int(name.rsplit("/", 2)[1]))]
    found = []
    for mask in frequency_bands(inv_freq, count):
        speeds = inv_freq[mask].double()
        fast, slow = float(speeds.max()), float(speeds.min())
        found.append([rounded(2 * math.pi / speed) if speed > 0 else None for speed in (fast, slow)])
    return found
