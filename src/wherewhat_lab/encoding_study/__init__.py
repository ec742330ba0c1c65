"""The study of position encodings."""
