"""A tiny random model of every causal language model type, and what must hold on each of them."""
