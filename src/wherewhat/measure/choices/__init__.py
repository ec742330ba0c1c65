"""Questions with alternatives: whether the model chooses the right one, and still with a disturbed question."""

from wherewhat.measure.choices.answering import Choices
from wherewhat.measure.choices.measurement import CHOICES

__all__ = ["CHOICES", "Choices"]
