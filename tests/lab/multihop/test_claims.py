"""Identity: verdicts follow from numbers that are known; end-to-end: tiny runs are judged by the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from helpers.command_line import assert_one_line
from wherewhat.errors import ConfigError
from wherewhat.measures.swaps import LABELS
from wherewhat.report.judgement import Judgement
from wherewhat_lab.constructions.checks import check_randomly
from wherewhat_lab.multihop import claims
from wherewhat_lab.multihop.accuracy import Accuracy
from wherewhat_lab.multihop.claims import LONGER, judge_runs
from wherewhat_lab.multihop.figures import ROLES, measure_figures
from wherewhat_lab.multihop.study import Setup, train_and_record

TINY = {"layers": 2, "heads": 2, "width": 16, "steps": 4, "record_every": 2, "batch": 4, "sequences": 800, "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def _fewer_inputs():
    """Check the constructions of claim 15 on fewer inputs; ``constructions`` checks them on 100,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "check_randomly", partial(check_randomly, count=900))
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Tiny runs of both tasks and three seeds."""
    out = tmp_path_factory.mktemp("runs")
    return {
        task: [
            measure_figures(
                train_and_record(Setup.of(task, TINY).seeded(seed), out=out, scored=4, tested=8), (0,), count=12
            )
            for seed in (0, 1, 2)
        ]
        for task in ("number", "letter")
    }


def planted(found, *, number, letter):
    """The same runs with other pure heads, roles and accuracies: labels, roles and hits of 10 by task.

    Labels are those of all keys and those without the sink; the same if there are no others.
    """

    def purity(labels):
        codes = torch.tensor([[LABELS.index(name) for name in labels]])  # one layer
        return SimpleNamespace(
            final=codes[None], pure=lambda kind, gamma: (codes == LABELS.index(kind)).nonzero().tolist()
        )

    def changed(one, labels, roles, hits, no_sink=None):
        flow = {"roles": torch.tensor([[ROLES.index(name) for name in roles]])}
        accuracy = Accuracy((1,), torch.tensor([hits]), torch.tensor([10]), torch.zeros(1))
        changed = replace(one, flow=flow, extra={"last": {LONGER: accuracy}})
        return replace_purity(changed, purity(labels), purity(no_sink or labels))

    given = {"number": number, "letter": letter}
    return {task: [changed(one, *given[task]) for one in runs] for task, runs in found.items()}


def replace_purity(one, purity, purity_no_sink):
    one.__dict__.update(purity=purity, purity_no_sink=purity_no_sink)  # cached properties
    return one


def verdicts(found):
    return {one.claim.number: (one.verdict, one.condition) for one in judge_runs(found)}


def test_planted_heads_decide(found):
    pure, hop = ["positional", "symbolic", "symbolic"], ["Index", "Reflexive", "Reflexive"]
    as_stated = planted(
        found,
        number=(pure, hop, 2),
        letter=(["symbolic"] * 3, ["Retrieval", "Reflexive", "Reflexive"], 9),
    )
    made = verdicts(as_stated)
    # The bounds hold for the minimum over inputs only.
    assert made[15] == ("holds if", "the constructions are meant and the minimum over inputs is meant")
    assert made[12] == made[16] == ("holds", "")
    assert made[14][0] in ("holds", "cannot be told")  # twelve heads
    reversed_ = planted(found, number=(["symbolic"] * 3, ["other"] * 3, 9), letter=(pure, ["other"] * 3, 2))
    made = verdicts(reversed_)
    assert made[12][0] == made[16][0] == made[14][0] == "does not hold"
    with pytest.raises(ConfigError, match="three or more runs of the letter task"):
        judge_runs({**found, "letter": found["letter"][:2]})


def test_verdicts_under_resampled_trainings(found):
    """Claim 16: number always keeps little; letter keeps much in two trainings of three, so the verdict is open.

    It holds if only those two are drawn, or only the third, which is at the threshold: 8 + 1 of 27 draws.
    """
    pure, hop = ["symbolic"] * 3, ["Reflexive"] * 3
    given = planted(found, number=(pure, hop, 2), letter=(pure, hop, 9))
    given["letter"][2] = planted(found, number=(pure, hop, 2), letter=(pure, hop, 5))["letter"][2]
    error = 3 * math.sqrt(9 / 27 * 18 / 27 / 500)  # three standard errors of a share of 500 draws
    stability = {one.claim.number: one.stability for one in judge_runs(given)}
    assert stability[16].verdict == "cannot be told"
    assert stability[16].over == "3 trainings of number and 3 trainings of letter"
    assert stability[16].changed == pytest.approx(9 / 27, abs=error)
    assert stability[16].verdicts == pytest.approx({"cannot be told": 18 / 27, "holds": 9 / 27}, abs=error)
    assert stability[12].changed == 0  # all trainings have the same heads
    assert stability[12].resamples == stability[16].resamples == 500
    assert stability[15].changed is None
    assert judge_runs(given, seed=1)[-1].stability != stability[16]


def test_kinds_of_heads_are_judged_in_both_versions(found):
    """A sink that counts as symbolic over all keys decides the first version alone."""
    pure, roles = ["positional", "symbolic", "symbolic"], ["other"] * 3
    sinks = ["positional", "sink", "sink"]
    given = planted(found, number=(pure, roles, 2, sinks), letter=(["symbolic"] * 3, roles, 9, sinks[1:] * 2))
    assert verdicts(given)[12] == ("holds if", "number is meant, over all keys and letter is meant, over all keys")
    (judged,) = (one.judged for one in judge_runs(given) if one.claim.number == 12)
    numbers = {number.title: number.value.mean for number in judged.numbers}
    assert numbers["number: sink heads at the end, without the sink"] == 2
    assert numbers["number: pure symbolic heads at the end, over all keys"] == 2
    assert numbers["number: pure symbolic heads at the end, without the sink"] == 0
    for runs in given.values():
        replace_purity(runs[0], runs[0].purity, None)  # records of an earlier version
    (judged,) = (one.judged for one in judge_runs(given) if one.claim.number == 12)
    assert "judged over all keys alone" in judged.notes[0]
    assert len(judged.statements) == 2


def test_the_command_judges_and_writes(cli, found, tmp_path):
    paths = [one.run.path for runs in found.values() for one in runs]
    shown = cli("multihop", "claims", *paths, "--file", tmp_path / "c.json", "--count", 12, "--device", "cpu")
    assert shown.code == 0
    made = Judgement.load(tmp_path / "c.json")
    assert sorted(made.verdicts) == [11, 12, 13, 14, 15, 16]
    assert [run["name"] for run in made.data["runs"]] == [path.name for path in paths]
    assert str(tmp_path) not in json.dumps(made.data)
    assert_one_line(
        cli("multihop", "claims", paths[0], "--file", tmp_path / "d.json"), "three or more runs of the number task"
    )
    assert not (tmp_path / "d.json").exists()
