"""End-to-end: a multi-hop training beside the runs is shown on the page, number by number."""

from __future__ import annotations

import pytest
import torch

from wherewhat.errors import ConfigError
from wherewhat.lab.multihop.learning import curves, find_runs, learning_curves
from wherewhat.lab.multihop.purity import find_purity
from wherewhat.lab.multihop.study import Setup, train_and_record

TINY = {"layers": 2, "heads": 2, "width": 16, "steps": 6, "record_every": 2, "batch": 4, "sequences": 800}


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    return train_and_record(Setup.of("number", TINY), out=out, scored=6, tested=12)


def test_all_on_one_time_axis(study):
    seen, shown = study.records(), curves(study)
    assert shown["steps"] == seen.steps.tolist() == [0, 2, 4, 6]
    assert [curve["mean"] for curve in shown["accuracy"]] == [
        pytest.approx(seen["accuracy"][:, hop].tolist(), rel=1e-3) for hop in range(len(seen["hops"]))
    ]
    assert shown["scores"]["s_pos"]["mean"] == pytest.approx(seen["s_pos"].flatten(1).mean(1).tolist(), rel=1e-3)
    counts = find_purity(seen, gammas=(0.1,)).counts[0]
    assert torch.equal(torch.tensor(shown["counts"]).T, counts)


def test_found_in_the_run_directory_or_named(study, tmp_path):
    folder = study.path.parent
    assert [run.path.name for run in find_runs([], out=folder)] == [study.path.name]
    assert [run.path for run in find_runs([study.path], out=folder)] == [study.path]
    assert [run.path for run in find_runs([folder], out=tmp_path)] == [study.path]
    assert find_runs([], out=tmp_path / "nothing") == []
    assert learning_curves([], out=folder) == [curves(study)]
    with pytest.raises(ConfigError, match="holds no multi-hop training"):
        find_runs([tmp_path], out=tmp_path)
