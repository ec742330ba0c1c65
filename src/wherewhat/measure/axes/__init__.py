"""The additive decomposition of logits into distance, query and key: where and what."""

from wherewhat.measure.axes.fit import AxesFit, fit_axes

__all__ = ["AxesFit", "fit_axes"]
