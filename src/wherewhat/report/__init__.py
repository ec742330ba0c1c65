"""One command, one HTML file that shows models' where and what."""

from wherewhat.report.making import make_report
from wherewhat.report.page import Report

__all__ = ["Report", "make_report"]
