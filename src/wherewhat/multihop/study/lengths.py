"""Accuracy of a trained model on longer inputs, beside the lengths at which its heads should fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wherewhat.multihop.dynamics import LengthAccuracy, accuracy_by_length
from wherewhat.multihop.study.runs import StudyRun
from wherewhat.numerics import new_process_settings
from wherewhat.store.atomic import write_file
from wherewhat.store.hashing import parse_object, readable_json

_SEED = 1_000_003
"""Seed of the longer sequences: one that no training uses."""


@new_process_settings()
def measure_lengths(run: StudyRun, lengths: Sequence[int], *, count: int, device: str = "cpu") -> LengthAccuracy:
    """Accuracy by length; what was measured before is read.

    Raises:
        ConfigError: If a length is shorter than the task's sequences.
        LoadError: If training is not finished.
    """
    file = run.path / f"lengths-{count}.json"
    known: dict[str, Any] = (parse_object(file.read_bytes()) or {}) if file.exists() else {}
    missing = [length for length in lengths if str(length) not in known]
    if missing:
        model = run.model(device=device)
        found = accuracy_by_length(model, run.setup.task, lengths=missing, count=count, seed=_SEED)
        for length, hits, counts in zip(found.lengths, found.hits.tolist(), found.counts.tolist(), strict=True):
            known[str(length)] = {"hops": list(found.hops), "hits": hits, "counts": counts}
        write_file(file, readable_json(known))
    rows = [known[str(length)] for length in lengths]
    return LengthAccuracy(
        lengths=tuple(lengths),
        hops=tuple(rows[0]["hops"]),
        hits=torch.tensor([row["hits"] for row in rows]),
        counts=torch.tensor([row["counts"] for row in rows]),
    )
