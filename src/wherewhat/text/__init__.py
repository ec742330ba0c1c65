"""Documents, prompts and questions."""
