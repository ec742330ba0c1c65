"""Accuracy on prompts with a known answer."""
