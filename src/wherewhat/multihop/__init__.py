"""The multi-hop laboratory: small models on tasks that need where, what or both, watched while they learn."""
