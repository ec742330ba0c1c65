"""Whole studies: models trained and watched over several seeds, in directories that can be looked at later."""

from wherewhat.multihop.study.recipe import Recipe, read_recipe
from wherewhat.multihop.study.runs import StudyRun, open_run, train_and_watch
from wherewhat.multihop.study.setup import Setup

__all__ = ["Recipe", "Setup", "StudyRun", "open_run", "read_recipe", "train_and_watch"]
