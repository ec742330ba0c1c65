"""Loss with the non-additive part of the logits scaled down."""
