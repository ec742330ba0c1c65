"""End-to-end: every Python block of the documentation runs and prints what the page shows."""

from __future__ import annotations

import ast
import functools
import re
from typing import Any

import pytest

from helpers.pages import PAGES, ROOT, Block, blocks, run_page, same_output

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
EMBEDDED = re.compile(r"smollm2|embedded")
MOST_NOT_RUN = 5


def python_blocks(page) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def parameters() -> list[Any]:
    """Pages, of which those that use the embedded model are slow."""
    found = []
    for page in WITH_PYTHON:
        if page.name in ("CONTRIBUTING.md", "training.md"):  # run by test_contributing.py and test_training_page.py
            continue
        slow = any(EMBEDDED.search(block.code) for block in python_blocks(page) if block.not_run is None)
        name = page.relative_to(ROOT).as_posix()
        found.append(pytest.param(page, id=name, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working directory of all pages: a run that several pages ask for is measured once."""
    return tmp_path_factory.mktemp("pages")


@functools.cache
def embedded_model() -> Any:
    from wherewhat.runs.subject import load

    return load("smollm2", device="cpu")


@pytest.fixture
def surroundings(folder, monkeypatch, request):
    """Run in the folder of all pages, load the embedded model once, and forget registered measurements."""
    from wherewhat.measures import registry
    from wherewhat.runs import subject

    load = subject.loader.load

    def loaded_once(spec="smollm2", **options):
        options.pop("progress", None)
        default = subject.ModelRequest(model=spec)
        changed = [name for name, value in options.items() if value != getattr(default, name)]
        return load(spec, **options) if spec != "smollm2" or changed else embedded_model()

    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("smollm2")
    monkeypatch.setattr(subject.loader, "load", loaded_once)
    monkeypatch.setattr(subject, "load", loaded_once)
    monkeypatch.setattr(registry, "_known", dict(registry.measurements()))
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("page", parameters())
@pytest.mark.usefixtures("surroundings")
def test_python_on_a_page_runs(page):
    run_page(page)


def test_few_blocks_are_not_run():
    """A block that cannot run gives the reason; it compiles and imports names that exist."""
    left_out = [(page.name, block) for page in WITH_PYTHON for block in python_blocks(page) if block.not_run]
    listed = [f"{name}, line {block.line}: {block.not_run}" for name, block in left_out]
    assert len(listed) <= MOST_NOT_RUN, listed
    marks = sum(page.read_text("utf-8").count("<!-- not run") for page in WITH_PYTHON)
    assert marks == len(listed), "a mark is not directly before a Python block"
    for _, block in left_out:
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wherewhat"):
                module = __import__(node.module, fromlist=["_"])
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("r 0.21 of 9", "r  0.22\nof 9", True),
        ("r 0.21", "r 0.24", False),
        ("9 heads", "8 heads", False),
        ("1e-07 apart", "3e-07 apart", True),
        ("one", "two", False),
    ],
)
def test_outputs_are_compared_up_to_rounding(shown, printed, same):
    assert same_output(shown, printed) is same
