"""End-to-end: a multi-hop training beside the runs is shown on the page, number by number."""

from __future__ import annotations

import pytest
import torch

from wherewhat.errors import ConfigError
from wherewhat.lab.multihop.learning import curves, find_runs, learning_curves
from wherewhat.lab.multihop.purity import find_purity


def test_all_on_one_time_axis(multihop_study):
    seen, shown = multihop_study.records(), curves(multihop_study)
    assert shown["steps"] == seen.steps.tolist() == [0, 2, 4, 6]
    assert [curve["mean"] for curve in shown["accuracy"]] == [
        pytest.approx(seen["accuracy"][:, hop].tolist(), rel=1e-3) for hop in range(len(seen["hops"]))
    ]
    assert shown["scores"]["s_pos"]["mean"] == pytest.approx(seen["s_pos"].flatten(1).mean(1).tolist(), rel=1e-3)
    counts = find_purity(seen, gammas=(0.1,)).counts[0]
    assert torch.equal(torch.tensor(shown["counts"]).T, counts)


def test_found_in_the_run_directory_or_named(multihop_study, tmp_path):
    folder = multihop_study.path.parent
    assert [run.path.name for run in find_runs([], out=folder)] == [multihop_study.path.name]
    assert [run.path for run in find_runs([multihop_study.path], out=folder)] == [multihop_study.path]
    assert [run.path for run in find_runs([folder], out=tmp_path)] == [multihop_study.path]
    assert find_runs([], out=tmp_path / "nothing") == []
    assert learning_curves([], out=folder) == [curves(multihop_study)]
    with pytest.raises(ConfigError, match="holds no multi-hop training"):
        find_runs([tmp_path], out=tmp_path)
