"""Accuracy on questions with alternatives."""
