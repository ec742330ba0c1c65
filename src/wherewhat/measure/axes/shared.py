"""One distance curve per head over many documents: is *where* a property of the head or of the text?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wherewhat.errors import MeasureError
from wherewhat.measure.axes.region import Band
from wherewhat.measure.axes.solve import SUBSETS, Margins, fit_subsets


@dataclass(frozen=True)
class SharedCurve:
    """A head's common distance curve.

    Attributes:
        a: The curve, ``(heads, width)``.
        r: Correlation of each document's logits with the common curve and its own b and c, ``(documents, heads)``.
        r_separate: The same with each document's own curve, ``(documents, heads)``.
        r_pooled: Correlation over the logits of all documents at once, around their common mean, ``(heads,)``.
    """

    a: Tensor
    r: Tensor
    r_separate: Tensor
    r_pooled: Tensor


def shared_curve(a: Tensor, sse: Tensor, tss: Tensor, mean: Tensor, *, n: int) -> SharedCurve:
    """Fit one ``a`` per head over many documents, with ``b`` and ``c`` of each document's own, exactly.

    Least squares is linear in the logits, and documents of one length have the same normal equations, so the common
    curve is the mean of the separate ones. A document's error grows by what of the difference ``a_t - a`` its own b and
    c cannot take over, which is again a least-squares fit, of a matrix known in closed form.

    Args:
        a: Each document's own curve in the canonical gauge, ``(documents, heads, width)``.
        sse: Each document's sum of squared errors, ``(documents, heads)``.
        tss: Each document's sum of squares around its mean, ``(documents, heads)``.
        mean: Each document's mean logit, ``(documents, heads)``.
        n: Queries (and keys) of every document.

    Raises:
        MeasureError: If there are fewer than two documents or shapes do not agree.
    """
    if a.ndim != 3 or a.shape[0] < 2 or any(x.shape != a.shape[:2] for x in (sse, tss, mean)):
        raise MeasureError(
            f"curves {tuple(a.shape)}, errors {tuple(sse.shape)}, totals {tuple(tss.shape)} and means "
            f"{tuple(mean.shape)} must be of two or more documents and the same heads"
        )
    documents, heads, width = a.shape
    a = a.double()
    common = a.mean(0)
    band = Band(n, width, a.device)
    offset = torch.zeros(documents * heads, sum(band.sizes), dtype=torch.float64, device=a.device)
    band.unpack(offset)[0].copy_((a - common).view(-1, width))
    nothing = Margins(band, torch.zeros_like(offset), torch.zeros(documents * heads).to(offset))
    error = sse.double() + fit_subsets(nothing, offset).sse[SUBSETS.index("bc")].view(documents, heads)
    total = tss.double()
    between = band.pairs * (mean.double() - mean.double().mean(0)).square()
    return SharedCurve(
        a=common,
        r=(1 - error / total).clamp(0, 1).sqrt(),
        r_separate=(1 - sse.double() / total).clamp(0, 1).sqrt(),
        r_pooled=(1 - error.sum(0) / (total + between).sum(0)).clamp(0, 1).sqrt(),
    )
