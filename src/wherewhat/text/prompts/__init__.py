"""Prompts with known key items for any tokenizer: binding, numbers, letters and random tokens."""

from wherewhat.text.prompts.making import KINDS, make
from wherewhat.text.prompts.prompt import Item, Prompt
from wherewhat.text.prompts.speller import Speller

__all__ = ["KINDS", "Item", "Prompt", "Speller", "make"]
