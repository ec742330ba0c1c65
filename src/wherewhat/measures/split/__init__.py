"""Position and content parts of queries, keys and logits."""

LEAST_DOCUMENTS = 3
"""Smallest number of documents: the mean of two others has an estimate of its noise."""
