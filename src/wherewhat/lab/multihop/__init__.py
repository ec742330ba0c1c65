"""The multi-hop study."""
