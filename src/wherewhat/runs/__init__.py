"""Run directories, the execution of a request, and the reader of results."""
