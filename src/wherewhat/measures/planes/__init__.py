"""Per-plane contributions to the logits."""
