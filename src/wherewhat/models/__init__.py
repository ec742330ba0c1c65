"""Models: a name, folder, file or hub id becomes a checked model."""
