"""Sweeps: models x weights x checkpoints x texts x measurements x seeds, into one store."""
