"""Attention entropy, sink mass and effective rank."""
