"""Identity: a sweep file has exactly the cells it says, and every mistake in it is named before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from wherewhat.errors import ConfigError, LoadError, TextError
from wherewhat.sweep.cells import expand, located, request_from_json, request_json
from wherewhat.sweep.engine import Resources, resources_of

BASE = {"models": ["tiny"], "texts": ["a.txt"], "measurements": ["attention"], "tokens": 24}
ITEMLESS = {"measurement": "choices", "items": "missing.jsonl"}


def test_cells_are_the_product_of_the_axes(sweep_file):
    models, weights = ["tiny", "grown/step-9"], ["random", "shuffled"]
    texts, measurements = ["a.txt", ["a.txt", "b.txt"]], ["attention", "axes"]
    axes = {"models": models, "weights": weights, "texts": texts, "measurements": measurements, "seeds": [3, 4, 5]}
    file = sweep_file({**BASE, **axes})
    cells = expand(file)
    assert len(cells) == len({cell.id for cell in cells}) == 2 * 2 * 3 * 2 * 2
    found = {(str(c.request.model.model), c.request.model.weights, c.request.model.seed, c.text, c.request.measurement)
             for c in cells}  # fmt: skip
    assert len(found) == len(cells)
    assert {text for *_, text, _ in found} == {"a", "a and 1 more"}


def test_seeds_repeat_only_what_is_drawn(sweep_file):
    cells = expand(sweep_file({**BASE, "weights": ["trained", "random"], "seeds": [0, 1, 2]}))
    seeds = [(cell.request.model.weights, cell.request.model.seed) for cell in cells]
    assert seeds == [("trained", 0), ("random", 0), ("random", 1), ("random", 2)]
    assert all(request_from_json(request_json(cell.request)) == cell.request for cell in cells)  # sent to workers
    drawn = expand(sweep_file({**BASE, "texts": [{"prompts": "random"}], "seeds": [0, 1, 2]}))
    assert [cell.request.model.seed for cell in drawn] == [0, 1, 2]


def test_a_measurement_with_prompts_of_its_own_is_not_repeated_for_texts(sweep_file):
    cells = expand(sweep_file({**BASE, "texts": ["a.txt", "b.txt"], "measurements": ["attention", "prompts"]}))
    assert [(c.request.measurement, c.text) for c in cells] == [
        ("attention", "a"),
        ("attention", "b"),
        ("prompts", None),
    ]


def write_items(path, gold=0) -> str:
    path.write_text(json.dumps({"context": "the cat sat on the", "choices": ["mat", "dog"], "gold": gold}))
    return str(path)


def test_items_are_not_repeated_for_texts_or_seeds(sweep_file, tmp_path):
    choices = {"measurement": "choices", "items": write_items(tmp_path / "q.jsonl")}
    axes = {"texts": ["a.txt", "b.txt"], "weights": ["trained", "random"], "seeds": [0, 1]}
    cells = expand(sweep_file({**BASE, **axes, "measurements": [choices]}))
    assert [(c.request.files, c.text, c.request.model.weights, c.request.model.seed) for c in cells] == [
        (None, None, "trained", 0), (None, None, "random", 0), (None, None, "random", 1),
    ]  # fmt: skip
    texts = {"prose": "a.txt", "first": {"items": choices["items"]}}
    (cell,) = expand(sweep_file({**BASE, "texts": texts, "measurements": ["choices"]}))
    assert (cell.text, cell.request.files, cell.request.items) == ("first", None, choices["items"])


def test_items_are_known_by_their_content(sweep_file, tmp_path):
    def cell(items):
        (made,) = expand(sweep_file({**BASE, "measurements": ["choices"], "items": items}))
        return made

    path = write_items(tmp_path / "q.jsonl")
    before = cell(path)
    relative = cell(os.path.relpath(path))
    assert relative.id == before.id
    assert Path(located(relative.request).items) == Path(os.path.relpath(path)).absolute()
    write_items(tmp_path / "q.jsonl", gold=1)
    assert cell(path).id != before.id
    both = [{"measurement": "choices", "items": items} for items in (path, write_items(tmp_path / "r.jsonl"))]
    assert len(expand(sweep_file({**BASE, "measurements": both}))) == 2


def test_toml_yaml_and_json_say_the_same(sweep_file):
    toml = """
    tokens = 24
    texts = {first = "a.txt", rest = {text = ["b.txt"], tokens = 20}}
    [[models]]
    model = "grown"
    checkpoints = "step-*"
    dtype = "float64"
    [measurements.heads]
    documents = 1
    set = {queries = 4}
    """
    yaml = """
    tokens: 24
    texts: {first: a.txt, rest: {text: [b.txt], tokens: 20}}
    models: [{model: grown, checkpoints: [step-9, step-10], dtype: float64}]
    measurements:
      - {measurement: heads, documents: 1, set: {queries: 4}}
    """
    one, other = expand(sweep_file(toml, "s.toml")), expand(sweep_file(yaml, "s.yaml"))
    assert [cell.json() for cell in one] == [cell.json() for cell in other]
    assert [(c.checkpoint, c.text, c.request.tokens) for c in one] == [
        ("step-9", "first", 24), ("step-9", "rest", 20), ("step-10", "first", 24), ("step-10", "rest", 20),
    ]  # fmt: skip
    assert one[0].request.options["queries"] == 4
    assert one[0].request.model.dtype == "float64"


def test_a_changed_text_or_model_is_another_cell(sweep_file, sweep_home):
    (before,) = expand(sweep_file(BASE))
    (again,) = expand(sweep_file({**BASE, "texts": [str(sweep_home / "a.txt")]}))
    assert again.id == before.id  # a text is known by its content, wherever it lies
    (sweep_home / "c").mkdir(exist_ok=True)
    (sweep_home / "c/a.txt").write_text("the dog ran " * 12)
    (other,) = expand(sweep_file({**BASE, "texts": ["c/a.txt"]}))
    assert other.id != before.id
    weights = sweep_home / "tiny/model.safetensors"
    stat = weights.stat()
    try:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
        assert expand(sweep_file(BASE))[0].id != before.id
    finally:
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_mistakes_are_named(sweep_file, subtests):
    for change, words in (
        ({"measurements": ["atention"]}, ["atention", "did you mean 'attention'"]),
        ({"measurements": {"axis": {}}}, ["axis", "did you mean 'axes'"]),
        ({"measurement": ["axes"]}, ["no key 'measurement'", "did you mean 'measurements'"]),
        ({"wieghts": ["trained"]}, ["wieghts", "did you mean 'weights'"]),
        ({"weights": ["traind"]}, ["traind", "did you mean 'trained'"]),
        ({"weights": []}, ["weights is empty"]),
        ({"seeds": ["one"]}, ["one", "whole number"]),
        ({"seeds": [-1]}, ["-1"]),
        ({"tokens": 1}, ["at least 2 tokens"]),
        ({"tokens": "many"}, ["many", "whole number"]),
        ({"dtype": "float7"}, ["float7"]),
        ({"measurements": [{"measurement": "attention", "set": {"sink": 1}}]}, ["sink", "did you mean 'sink_tokens'"]),
        ({"measurements": {"attention": {"sink_tokens": 1}}}, ["sink_tokens", "put it under 'set'"]),
        ({"measurements": {"attention": {"tokns": 1}}}, ["tokns", "did you mean 'tokens'"]),
        ({"measurements": []}, ["measurements is empty"]),
        ({"models": [{"modle": "tiny"}]}, ["models[0]", "the key 'model'"]),
        ({"models": [{"model": "tiny", "dtypes": "float32"}]}, ["dtypes", "did you mean 'dtype'"]),
        ({"models": [{"model": "tiny", "revisions": ["main"]}]}, ["tiny", "no revisions"]),
        ({"models": [{"model": "who/what", "checkpoints": ["x"]}]}, ["who/what", "no folder with checkpoints"]),
        ({"models": ["tiny", "tiny"]}, ["two cells are the same", "attention of tiny"]),
        ({"texts": ["a.txt", "./a.txt"]}, ["two cells are the same"]),
        ({"measurements": ["attention", {"measurement": "attention", "set": {"sink_tokens": 1}}]}, ["two cells"]),
        ({"texts": ["-"]}, ["standard input"]),
        ({"texts": [{"txt": "a.txt"}]}, ["txt", "did you mean 'text'"]),
        ({"texts": [{"prompts": "bindings"}]}, ["bindings", "did you mean 'binding'"]),
        ({"texts": ["embedded"], "measurements": ["axes", "choices"]}, ["choices needs --items"]),
        ({"texts": ["embedded"], "measurements": ["choices", "axes"]}, ["choices needs --items"]),
        ({"resources": {"gpu": 1}}, ["gpu", "did you mean 'gpus'"]),
        ({"resources": {"cpus": 0}}, ["cpus is 0"]),
        ({"resources": 3}, ["resources must be a table"]),
    ):
        file = sweep_file({**BASE, **change})
        with subtests.test(change=str(change)):
            with pytest.raises(ConfigError) as caught:
                (resources_of(file), expand(file))
            assert "\n" not in str(caught.value)
            for word in words:
                assert word in str(caught.value)


def test_what_is_missing_is_noticed_before_anything_runs(sweep_file, subtests):
    for change, error, word in (
        ({"texts": ["missing.txt"]}, TextError, "missing.txt"),
        ({"measurements": ["split"]}, TextError, "split compares documents"),
        ({"texts": ["embedded"], "measurements": ["axes", ITEMLESS]}, TextError, "missing.jsonl"),
        ({"models": ["./missing"]}, LoadError, "missing"),
        ({"models": ["grown"]}, LoadError, "no config.json"),
        ({"models": [{"model": "grown", "checkpoints": ["epoch-*"]}]}, LoadError, "epoch-*"),
        ({"models": ["who/what"], "offline": True}, LoadError, "who/what"),
    ):
        with subtests.test(change=str(change)):
            with pytest.raises(error) as caught:
                expand(sweep_file({**BASE, **change}))
            assert word in str(caught.value)


def test_files_that_are_no_sweep(sweep_file):
    for name, content, words in (
        ("s.toml", "tokens = ", "not valid TOML"),
        ("s.yaml", "a: [1", "not valid YAML"),
        ("s.json", "[1]", "names and values"),
        ("s.toml", "device-map = 1\ndevice_map = 2", "twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            sweep_file(content, name)


def test_resources_have_defaults(sweep_file):
    assert resources_of(sweep_file(BASE)) == Resources()
    file = sweep_file({**BASE, "resources": {"gpus": 0.5, "memory_gib": 12, "retries": 0}})
    assert resources_of(file) == Resources(gpus=0.5, memory_gib=12.0, retries=0)
