"""What a model does when the order of its text, its positions or its features are disturbed."""

from wherewhat.measure.perturb.measurement import PERTURB

__all__ = ["PERTURB"]
