"""Finished runs as figures and tables, for notebooks and papers."""

from wherewhat.figures.choosing import FIGURES, figure, offered
from wherewhat.figures.exporting import save_figure, save_table
from wherewhat.figures.result import Result, run

__all__ = ["FIGURES", "Result", "figure", "offered", "run", "save_figure", "save_table"]
