"""Capture: queries, keys and values of a running model, verified against its own attention."""
