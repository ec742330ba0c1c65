"""Measurements: functions from captured tensors to typed results."""
