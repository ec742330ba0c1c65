"""Claims of papers about position and content in attention, judged on a model."""
