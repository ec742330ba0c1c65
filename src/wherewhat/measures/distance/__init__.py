"""Controlled distance: logits recomputed at dummy distances."""
