"""The HTML report and figures."""
