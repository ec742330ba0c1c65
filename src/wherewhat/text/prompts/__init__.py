"""Prompts with known answers for any tokenizer."""
