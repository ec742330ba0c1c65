"""Multi-hop records: scores of heads and accuracy at one training step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from wherewhat.lab.multihop.scores import HeadScores, HeldOutSequences, score_model
from wherewhat.runs.records import Axes, Recorder, Records, TensorTable
from wherewhat.runs.schema import Profile

_HEAD = ("layer", "head")
AXES: Axes = {
    "accuracy": ("hop",),  # share of correct answers
    "loss": ("hop",),  # mean cross-entropy of the answers
    "s_pos": _HEAD,  # positional score at the last token, mean over sequences
    "s_sym": _HEAD,  # symbolic score
    "s_pos_spread": _HEAD,  # standard deviation over sequences
    "s_sym_spread": _HEAD,
    "s_pos_path": _HEAD,  # positional score over the source tokens of all hops; NaN unless requested
    "s_sym_path": _HEAD,
    "effective_swaps": _HEAD,  # effective number of swaps, mean over sequences
    "entropy": _HEAD,  # entropy of attention at the last token in nats, mean over sequences
    "mean_frequency": _HEAD,  # mean frequency ID, weighted by use
    "mean_frequency_softmax": _HEAD,  # mean frequency ID, weighted by the softmax of use
    "r": _HEAD,  # correlation with three additive axes, mean over sequences
    "r_pooled": _HEAD,  # the same from the errors of all sequences together
    "use": (*_HEAD, "plane"),  # largest absolute logit contribution of each plane
}
"""Dimensions of each score of a record.

Constants of the records are ``hops``, the numbers of hops; ``counts``, the questions of each; and ``about``: a hash
of the recording, the number of sequences that heads are scored on, and their number of tokens. All are int64. Records
of earlier versions have neither ``effective_swaps`` nor ``mean_frequency_softmax``.
"""


def record_scores(scores: HeadScores) -> dict[str, Tensor]:
    """Return the scores of a record, float32, in the shapes of :data:`AXES`."""
    found: Mapping[str, Tensor] = {
        "accuracy": scores.accuracy.shares,
        "loss": scores.accuracy.loss,
        "s_pos": scores.s_pos.mean(-1),
        "s_sym": scores.s_sym.mean(-1),
        "s_pos_spread": scores.s_pos.std(-1, correction=0),
        "s_sym_spread": scores.s_sym.std(-1, correction=0),
        "s_pos_path": scores.s_pos_path,
        "s_sym_path": scores.s_sym_path,
        "effective_swaps": scores.effective.mean(-1),
        "entropy": scores.entropy.mean(-1),
        "mean_frequency": scores.mean_frequency,
        "mean_frequency_softmax": scores.mean_frequency_softmax,
        "r": scores.r.nanmean(-1),
        "r_pooled": scores.r_pooled,
        "use": scores.use,
    }
    return {name: value.float() for name, value in found.items()}


def multihop_recorder(
    held_out: HeldOutSequences, *, path: Path | None = None, identity: str = "", along_path: bool = False
) -> Recorder:
    """Return a recorder of head scores and accuracy.

    Args:
        held_out: Sequences to score the model on.
        path: File of the records, which is continued if it exists; None keeps them in memory only.
        identity: Text that identifies the training; records of another one are refused.
        along_path: Also score the other source tokens of hops.
    """
    digest = hashlib.blake2b(repr((identity, held_out.fingerprint, along_path)).encode(), digest_size=7)
    about = [int.from_bytes(digest.digest()), held_out.scored, held_out.sequences.tokens.shape[1]]
    hops = torch.tensor(held_out.hops)
    constants: TensorTable = {
        "hops": Profile(hops, ("hop",)),
        "counts": Profile((held_out.sequences.hops[:, None] == hops).sum(0), ("hop",)),
        "about": Profile(torch.tensor(about), ("number",)),
    }
    return Recorder(
        lambda model: record_scores(score_model(model, held_out, path=along_path)), AXES, constants=constants, path=path
    )


def overall_accuracy(records: Records) -> Tensor:
    """Return the share of correct answers over all numbers of hops, ``(records,)`` float64."""
    counts = records["counts"]
    return (records["accuracy"].double() * counts).sum(-1) / counts.sum()


def best_step(records: Records) -> int:
    """Return the step of the best checkpoint: the first record with the largest accuracy on held-out sequences."""
    hits = (records["accuracy"].double() * records["counts"]).round().sum(-1)  # whole numbers, so that equal is equal
    return int(records.steps[hits.argmax()])


def noise_level(records: Records) -> float:
    """Return the r of logits that are pure noise, the reference for the recorded ``r``."""
    n = int(records["about"][2])
    return float(min(1.0, (3 * n - 4) / (n * (n + 1) / 2 - 1)) ** 0.5)
