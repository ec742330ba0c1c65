"""Convert small models to Hugging Face models and back."""
