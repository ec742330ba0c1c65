"""Positional or symbolic: what attention does when contents change places."""
