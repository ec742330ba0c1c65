"""Positional and symbolic heads, and attention patterns."""
