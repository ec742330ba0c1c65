"""Position and content parts of queries, keys and logits."""
