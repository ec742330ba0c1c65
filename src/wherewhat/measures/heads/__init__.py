"""Positional and symbolic scores of heads, and attention patterns."""
