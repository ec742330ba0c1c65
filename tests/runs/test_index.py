"""Identity: names of checkpoints and models say what they say, and nothing else is read into them."""

import pytest

from wherewhat.runs.index import run_facts, stated_size, training_step


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step1000", 1000),
        ("step-1000", 1000),
        ("checkpoint-1000", 1000),
        ("global_step143000", 143000),
        ("step3k", 3000),
        ("ckpt_12", 12),
        ("iter-5", 5),
        ("stage1-step5", None),
        ("step1000-tokens4B", 1000),
        ("main", None),
        ("a1b2c3d4", None),
        ("pythia-160m", None),
        ("stepmother", None),
    ],
)
def test_steps(name, step):
    assert training_step(name) == step


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("pythia-160m", 160_000_000),
        ("Llama-3.1-8B", 8_000_000_000),
        ("SmolLM2-135M-Instruct", 135_000_000),
        ("qwen2.5-0.5b", 500_000_000),
        ("gpt2", None),
        ("stories15M", None),
        ("mixtral-8x7B", 7_000_000_000),
    ],
)
def test_sizes(name, size):
    assert stated_size(name) == size


def facts(config=None, extra=None):
    return run_facts("run", {"model": "m", **(config or {})}, {"extra": extra or {}})


def test_a_checkpoint_that_was_asked_for_wins_over_its_commit():
    found = facts(extra={"checkpoint": "step512", "revision": "0a1b"})
    assert (found["checkpoint"], found["step"]) == ("step512", 512)


def test_a_folder_called_after_a_step_belongs_to_the_model_around_it():
    found = facts({"model": "checkpoint-200"}, {"spec": "/somewhere/tiny/checkpoint-200"})
    assert (found["model"], found["checkpoint"], found["step"]) == ("tiny", "checkpoint-200", 200)


def test_counted_parameters_win_over_the_name():
    assert facts({"model": "pythia-160m"}, {"parameters": 162_322_944})["size"] == 162_322_944


def test_facts_that_are_not_there_are_none():
    found = run_facts("run", {}, {"extra": None})
    assert found.pop("run") == "run"
    assert set(found.values()) == {None}
