"""The laboratory: small models, tasks, training, and two studies."""
