"""Positional and symbolic scores by swapping tokens."""
