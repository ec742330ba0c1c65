"""End-to-end: a multi-hop training beside the runs is shown on the page, number by number."""

from __future__ import annotations

import pytest

from wherewhat_lab.multihop.learning import curves, find_purity, learning_curves


def test_all_on_one_time_axis(multihop_study):
    seen, shown = multihop_study.records(), curves(multihop_study)
    assert shown["steps"] == seen.steps.tolist() == [0, 2, 4, 6]
    accuracy, scores, counts = shown["panels"]
    assert [curve["mean"] for curve in accuracy["series"]] == [
        pytest.approx(seen["accuracy"][:, hop].tolist(), rel=1e-3) for hop in range(len(seen["hops"]))
    ]
    means = seen["s_pos"].flatten(1).mean(1).tolist()
    assert scores["series"][0]["name"] == "positional score"
    assert scores["series"][0]["mean"] == pytest.approx(means, rel=1e-3)
    purity = find_purity(seen, gammas=(0.1,))
    wanted = [*purity.counts[0].T.tolist(), *purity.ever[0].T[1:3].tolist()]
    assert [curve["mean"] for curve in counts["series"]] == wanted
    assert [curve["name"] for curve in counts["series"]][4:] == ["ever positional", "ever symbolic"]
    assert {curve["shape"] for curve in counts["series"]} == {"hv"}
    assert shown["note"].startswith("2 layers of 2 heads, evaluated on 4 held-out sequences. Accuracy 0.9 is reached")
    names = [curve["name"] for panel in shown["panels"] for curve in panel["series"]]
    assert shown["table"]["header"] == ["step", *names]
    assert [row[0] for row in shown["table"]["rows"]] == ["0", "2", "4", "6"]


def test_found_in_the_run_directory_or_named(multihop_study, tmp_path):
    path = multihop_study.path
    expected = {path.resolve(): curves(multihop_study)}
    assert learning_curves(path) == learning_curves(path.parent) == expected
    assert learning_curves(tmp_path) == learning_curves(tmp_path / "nothing") == {}
