"""What stands at the end of a text, planted further back: how far back a model still finds what it has read.

The last tokens of a document are cut into runs, and each run is planted once more at a depth of its own, over what
stood there. All depths share one pass. The model is asked for the end of each run, its beginning being the cue; the
document as it is, with nothing planted, is the control.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError

_FIRST = 16
"""First tokens that stay as they are: where attention rests, and what some methods always show."""


@dataclass(frozen=True)
class Planting:
    """A text whose last runs of tokens stand in it a second time.

    Attributes:
        control: Token ids ``(1, n)`` of the text as it is.
        planted: Token ids ``(1, n)`` with each run at its depth too.
        places: First token of each planted run, ``(depths,)``.
        run: Tokens of a run.
    """

    control: Tensor
    planted: Tensor
    places: Tensor
    run: int

    @property
    def body(self) -> int:
        """Tokens before the runs at the end."""
        return self.control.shape[1] - len(self.places) * self.run

    @property
    def distances(self) -> Tensor:
        """Tokens from each run at the end back to the planted one, ``(depths,)``."""
        return self.body + self.run * torch.arange(len(self.places)) - self.places


@dataclass(frozen=True)
class Found:
    """What of the planted runs a model finds, by depth.

    Attributes:
        gain: Mean log-probability of the tokens asked for, less that without the planting, nats, ``(depths,)``.
        exact: Share of them that are the likeliest token, less that without the planting, ``(depths,)``.
    """

    gain: Tensor
    exact: Tensor


def plant(ids: Tensor, depths: tuple[int, ...], *, run: int) -> Planting:
    """Plant the last runs of a text, one per depth.

    Args:
        ids: Token ids ``(1, n)``.
        depths: Where, in percent of the text: 0 is its beginning, 100 is just before its last runs.
        run: Tokens of a run.

    Raises:
        MeasureError: If the text has no room for them.
    """
    n, count = ids.shape[1], len(depths)
    body = n - count * run
    # One run's length is left between the last planted one and the end: what follows it there is no repetition.
    room = body - 2 * run
    first = min(_FIRST, max(0, room - count * run))
    places = torch.tensor([first + round(depth / 100 * (room - first)) for depth in depths])
    if room < first or bool((places.sort().values.diff() < run).any()):
        raise MeasureError(
            f"{n} tokens have no room for {count} planted runs of {run} tokens: give a longer text, fewer depths or a "
            "shorter run"
        )
    planted = ids.clone()
    for index, place in enumerate(places.tolist()):
        start = body + index * run
        planted[:, place : place + run] = ids[:, start : start + run]
    return Planting(ids, planted, places, run)


def find_planted(planting: Planting, planted: Tensor, control: Tensor) -> Found:
    """Compare what a model says at the end of both texts, from its logits ``(1, n, vocabulary)`` on each."""
    (gain, exact), (gain_before, exact_before) = _asked(planting, planted), _asked(planting, control)
    return Found(gain - gain_before, exact - exact_before)


def _asked(planting: Planting, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-probability and share of likeliest tokens at the end of the text, both ``(depths,)``."""
    predicting = logits[0, planting.body - 1 : -1].float()
    targets = planting.control[0, planting.body :].to(logits.device)
    logprob = predicting.log_softmax(-1).gather(-1, targets[:, None])[:, 0].double()
    best = (predicting.argmax(-1) == targets).double()
    cue = max(1, planting.run // 4)
    by_run = torch.stack([logprob, best]).cpu().view(2, -1, planting.run)[..., cue:].mean(-1)
    return by_run[0], by_run[1]
