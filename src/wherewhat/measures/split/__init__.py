"""Position and content parts of queries, keys and logits."""

LEAST_DOCUMENTS = 3
"""Smallest number of documents: two others make a mean with a sample of its noise."""
