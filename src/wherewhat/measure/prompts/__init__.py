"""Prompts whose answer is known: whether the model finds it, by where it stands and among how many."""

from wherewhat.measure.prompts.measurement import PROMPTS

__all__ = ["PROMPTS"]
