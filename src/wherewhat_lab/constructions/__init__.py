"""Transformers with explicit weights, and their geometry."""
