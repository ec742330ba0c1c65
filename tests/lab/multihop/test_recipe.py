"""Errors: a recipe of multi-hop trainings that makes no sense ends in one line."""

from __future__ import annotations

import pytest

from wherewhat.errors import ConfigError
from wherewhat.options import build_recipe
from wherewhat_lab.multihop.study import MultihopRecipe


def test_what_makes_no_sense_is_refused(subtests):
    for wrong, match in (
        ({"seeds": 3}, "seeds=3"),
        ({"extra": 17}, "extra=17"),
        ({"seeds": "01"}, "seeds='01'"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": [True]}, "whole numbers"),
        ({"tasks": "number"}, "tasks='number' is not a tuple of strings"),
        ({"options": 1}, "options=1 is not names with values"),
        ({"task_options": {"number": 3}}, "table of tables"),
        ({"task": ["number"]}, "has no 'task'"),
    ):
        with subtests.test(wrong=wrong), pytest.raises(ConfigError, match=match):
            build_recipe(MultihopRecipe, wrong)
