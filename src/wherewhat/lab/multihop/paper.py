"""Results of Urrutia et al., 2026 (arXiv 2605.31558), read from its text and vector figures with an error of 0.003."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wherewhat.lab.multihop.accuracy import EXTRA


@dataclass(frozen=True)
class PaperResults:
    """Results of one task; layers are counted from 0.

    Attributes:
        s_pos: Final positional score at the last token, by layer; an upper bound from layer 5 on.
        s_sym: Final symbolic score, by layer.
        pure: Layers with pure heads in the final scores, by γ and label.
        order: Order in which numbers of hops are learned.
        best_step: Step at which the largest accuracy is reached, the dashed line of the figure.
        frequency_ids: Weighted mean frequency ID (softmax weights), by layer.
        linear_ids: The same with linear weights, computed from the curves of the appendix, for the first layers.
        peaks: Largest logit contribution of one plane, for the first layers.
        lowest_s_sym: Smallest symbolic score during training, by layer; the paper does not discuss it.
        accuracy: Accuracy by number of extra tokens.
    """

    s_pos: tuple[float, ...]
    s_sym: tuple[float, ...]
    pure: Mapping[float, Mapping[str, tuple[int, ...]]]
    order: str
    best_step: int
    frequency_ids: tuple[int, ...]
    accuracy: Mapping[int, float]
    linear_ids: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    lowest_s_sym: Mapping[int, float] = field(default_factory=dict)


def _by_extra(values: str) -> Mapping[int, float]:
    return dict(zip(EXTRA, map(float, values.split()), strict=True))


_NUMBER = "1 1 .945 .881 .838 .803 .742 .644 .472 .359 .316 .292 .253 .205 .149 .104 .067 .042"
_LETTER = "1 1 1 1 1 1 1 .995 .990 .970 .957 .917 .894 .868 .797 .740 .628 .487"

PAPER: Mapping[str, PaperResults] = {
    "number": PaperResults(
        s_pos=(0.39, 1.0, 1.0, 0.96, 0.06, *(0.01,) * 7),
        s_sym=(0.62, 0.01, 0.01, 0.09, 0.99, *(1.0,) * 7),
        # The text says layers 0 to 3 are positional; these are the layers by the final scores.
        pure={
            0.1: {"positional": (1, 2, 3), "symbolic": tuple(range(4, 12))},
            0.05: {"positional": (1, 2), "symbolic": tuple(range(5, 12))},
        },
        order="1 hop first, then 2, 3, 4",
        best_step=4800,
        frequency_ids=(1, 2, 2, 2, 10, 39, 38, 38, 38, 37, 37, 38),
        linear_ids=(13.8, 9.2, 12.3, 21.0),
        peaks=(46, 76, 57, 25),
        accuracy=_by_extra(_NUMBER),
    ),
    "letter": PaperResults(
        s_pos=(0.32, *(0.0,) * 4, *(0.04,) * 7),
        s_sym=(0.86, *(1.0,) * 11),
        pure={gamma: {"positional": (), "symbolic": tuple(range(1, 12))} for gamma in (0.1, 0.05)},
        order="all hops together",
        best_step=3400,
        frequency_ids=(18, 32, 42, 37, 40, 38, 41, 38, 41, 39, 38, 40),
        lowest_s_sym={7: 0.87, 8: 0.81, 9: 0.56, 10: 0.35, 11: 0.19},
        accuracy=_by_extra(_LETTER),
    ),
}
"""Results by task. Frequency IDs count from 1, the fastest plane."""

INDEX_ANGLE, RETRIEVAL_ANGLE, LETTERS = 0.866, 0.0027, 8
"""Parameters of the figure of the discrepancy: angles of planes 2 and 42 per position, and number of letters."""
