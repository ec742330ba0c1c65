"""Identity: names of checkpoints and models say what they say, and nothing else is read into them."""

from wherewhat.runs.index import run_facts, stated_size, training_step


def test_steps_and_sizes_in_names():
    steps = {
        "step1000": 1000,
        "step-1000": 1000,
        "checkpoint-1000": 1000,
        "global_step143000": 143000,
        "step3k": 3000,
        "ckpt_12": 12,
        "iter-5": 5,
        "stage1-step5": None,
        "step1000-tokens4B": 1000,
        "main": None,
        "a1b2c3d4": None,
        "pythia-160m": None,
        "stepmother": None,
    }
    assert {name: training_step(name) for name in steps} == steps
    sizes = {
        "pythia-160m": 160_000_000,
        "Llama-3.1-8B": 8_000_000_000,
        "SmolLM2-135M-Instruct": 135_000_000,
        "qwen2.5-0.5b": 500_000_000,
        "gpt2": None,
        "stories15M": None,
        "mixtral-8x7B": 7_000_000_000,
    }
    assert {name: stated_size(name) for name in sizes} == sizes


def test_facts_of_a_run():
    def facts(config=None, extra=None):
        return run_facts("run", {"model": "m", **(config or {})}, {"extra": extra or {}})

    found = facts(extra={"checkpoint": "step512", "revision": "0a1b"})  # what was asked for wins over its commit
    assert (found["checkpoint"], found["step"]) == ("step512", 512)
    found = facts({"model": "checkpoint-200"}, {"spec": "/somewhere/tiny/checkpoint-200"})
    assert (found["model"], found["checkpoint"], found["step"]) == ("tiny", "checkpoint-200", 200)
    assert facts({"model": "pythia-160m"}, {"parameters": 162_322_944})["size"] == 162_322_944
    found = run_facts("run", {}, {"extra": None})
    assert found.pop("run") == "run"
    assert set(found.values()) == {None}
