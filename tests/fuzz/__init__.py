"""A fuzzer: hostile command lines, files, models and run directories; see CONTRIBUTING.md."""
