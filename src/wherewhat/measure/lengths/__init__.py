"""Texts longer than a model was trained on: what each length method makes of them, and why."""

from wherewhat.measure.lengths.measurement import EXTEND

__all__ = ["EXTEND"]
