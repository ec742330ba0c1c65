"""The additive decomposition of logits into distance, query and key terms."""
