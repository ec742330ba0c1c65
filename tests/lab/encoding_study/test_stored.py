"""Identity: the study that is kept in the repository is the one its recipe makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from wherewhat_lab.encoding_study.recipe import read_recipe
from wherewhat_lab.encoding_study.study import open_runs

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "studies" / "encodings"


@pytest.fixture(scope="module")
def runs():
    if not STUDY.is_dir():
        pytest.skip("the study is not beside the tests")
    return open_runs(STUDY)


def test_it_is_of_the_recipe_small_and_whole(runs):
    recipe = read_recipe(ROOT / "recipes" / "encodings.toml")
    for run in runs:
        assert {name: run.config[name] for name in recipe.values()} == recipe.values()
    every = [(encoding, seed) for encoding in recipe.encodings for seed in recipe.seeds]
    assert sorted((run.encoding, run.seed) for run in runs) == sorted(every)
    assert sum(path.stat().st_size for path in STUDY.rglob("*")) < 10_000_000
    for run in runs:
        records = run.records()
        assert len(records) == run.config["watch"]["records"]
        assert int(records.steps[0]) == 0
        assert int(records.steps[-1]) == run.config["training"]["steps"]
        assert run.after()
