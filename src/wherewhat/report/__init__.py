"""One command, one HTML file that shows a model's where and what."""

from wherewhat.report.making import make_report
from wherewhat.report.page import Report

__all__ = ["Report", "make_report"]
