"""What is followed over training, each as one number of a record, with words for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from wherewhat.encodings.records import Records
from wherewhat.measure.swaps.labels import LABELS, label

GAMMA = 0.1
"""A head is pure with one score of at least 1 - γ and the other of at most γ."""


@dataclass(frozen=True)
class Panel:
    """One number that is followed over training.

    Attributes:
        name: Its name.
        title: A few words for the axis.
        reading: One sentence on how to read it.
        of: From records to its value at each, ``(records,)``.
    """

    name: str
    title: str
    reading: str
    of: Callable[[Records], Tensor]


def _mean(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records.values[name].flatten(1).nanmean(1)


def _largest(name: str) -> Callable[[Records], Tensor]:
    return lambda records: records.values[name].flatten(1).amax(1)


def _pure(kind: str) -> Callable[[Records], Tensor]:
    def share(records: Records) -> Tensor:
        codes = label(records.values["s_pos"], records.values["s_sym"], GAMMA)
        return (codes == LABELS.index(kind)).double().flatten(1).mean(1)

    return share


def additive_cost(records: Records) -> Tensor:
    """By how much the loss rises, on the same documents, when all logits are additive, ``(records,)``."""
    additive = records.values["loss_additive"]
    return (additive - records.values["loss"][:, : additive.shape[1]]).mean(1)


PANELS = (
    Panel("loss", "loss (nats/byte)", "Mean next-byte loss on held-out windows.", _mean("loss")),
    Panel("r", "r", "Correlation of logits with a[i-j] + b[i] + c[j], mean over heads.", _mean("r")),
    Panel(
        "r_behaviour",
        "r of behaviour",
        "The same without the query term, which softmax cancels.",
        _mean("r_behaviour"),
    ),
    Panel("r_a", "r, distance alone", "Correlation of logits with a distance curve alone: where.", _mean("r_a")),
    Panel("r_bc", "r, query + key", "Correlation of logits with query and key terms, without distance.", _mean("r_bc")),
    Panel(
        "induction",
        "induction",
        "Attention of the best head on what followed the same byte before, in random bytes that repeat themselves.",
        _largest("induction"),
    ),
    Panel(
        "previous_token",
        "previous byte",
        "Attention of the best head on the byte before, on held-out text.",
        _largest("previous_token"),
    ),
    Panel(
        "copying",
        "copying (nats)",
        "How much lower the loss is on the second half of repeated random bytes than on the first.",
        _mean("copying"),
    ),
    Panel(
        "positional",
        "pure positional",
        "Share of heads with a positional score of 0.9 or more and a symbolic one of 0.1 or less.",
        _pure("positional"),
    ),
    Panel(
        "symbolic",
        "pure symbolic",
        "Share of heads with a symbolic score of 0.9 or more and a positional one of 0.1 or less.",
        _pure("symbolic"),
    ),
    Panel(
        "additive_cost",
        "cost of additive logits",
        "Rise of the loss when every head's logits are replaced by their additive fit.",
        additive_cost,
    ),
)
"""In the order they are shown."""

EVENTS = ("loss", "r_behaviour", "r_a", "r_bc", "induction", "previous_token", "copying", "additive_cost")
"""Panels whose turning points are compared."""
