"""The command line: everything the pipeline can do, with progress, tables and one-line errors."""
