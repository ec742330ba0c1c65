"""What a perturbation does to single heads: their axes, and their output at tokens that were not touched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wherewhat.capturing.attention import LayerAttention
from wherewhat.measure.axes.layer import fit_layer
from wherewhat.measure.base import Subject
from wherewhat.measure.perturb.change import Change
from wherewhat.measure.perturb.passes import perform


@dataclass(frozen=True)
class LayerView:
    """One layer in one pass.

    Attributes:
        r: Correlation of logits with the three axes, ``(heads,)``.
        shares: What R² loses without an axis, ``(heads,)`` by axis.
        output: Attention output of some tokens, ``(rows, heads, d_v)``.
    """

    r: Tensor
    shares: dict[str, Tensor]
    output: Tensor


def view(subject: Subject, change: Change, rows: Tensor) -> dict[int, LayerView]:
    """Every layer of a pass over a disturbed text, with the attention output of tokens ``rows`` ``(rows,)``."""
    found: dict[int, LayerView] = {}

    def look(attention: LayerAttention) -> None:
        fit = fit_layer(attention)
        output = attention.output[0, rows.to(attention.output.device)].detach().float().cpu()
        shares = {axis: fit.unique[axis].cpu().double() for axis in "abc"}
        found[attention.layer] = LayerView(fit.r.cpu().double(), shares, output)

    perform(subject, change, look)
    return found


def last_untouched(change: Change, n: int, queries: int) -> tuple[Tensor, Tensor]:
    """Tokens among the last ``queries`` of n that were not moved: their places in the disturbed text, and before."""
    kept = (~change.moved & (change.origin >= n - queries)).nonzero()[:, 0]
    return kept, change.origin[kept]


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Mean over tokens of ‖after − before‖ / ‖before‖ by head, ``(heads,)``, from outputs ``(rows, heads, d_v)``."""
    size = before.norm(dim=-1).clamp_min(1e-30)
    felt: Tensor = ((after - before).norm(dim=-1) / size).double().mean(0)
    return felt
