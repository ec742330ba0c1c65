"""End-to-end: every Python block of the documentation runs and prints what the page shows."""

from __future__ import annotations

import ast
import functools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import PAGES, ROOT, Block, blocks, run_page

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
RUN_ELSEWHERE = ("CONTRIBUTING.md", "training.md")  # by test_contributing.py and test_training_page.py
EMBEDDED = re.compile(r"smollm2|embedded")


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def uses_embedded_model(page: Path) -> bool:
    return any(EMBEDDED.search(block.code) for block in python_blocks(page) if block.not_run is None)


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
    from wherewhat.measures import measurement as registry
    from wherewhat.runs import subject

    load = subject.loader.load

    def loaded_once(spec="smollm2", *, tokenizer=None, progress=None, **options):
        default = subject.ModelRequest(model=spec)
        changed = [name for name, value in options.items() if value != getattr(default, name)]
        return load(spec, tokenizer=tokenizer, **options) if spec != "smollm2" or changed else embedded_model()

    if uses_embedded_model(request.getfixturevalue("page")):
        request.getfixturevalue("smollm2")
    monkeypatch.setattr(subject.loader, "load", loaded_once)
    monkeypatch.setattr(subject, "load", loaded_once)
    monkeypatch.setattr(registry, "_known", dict(registry.measurements()))
    monkeypatch.chdir(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in WITH_PYTHON if page.name not in RUN_ELSEWHERE],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
@pytest.mark.usefixtures("surroundings")
def test_python_on_a_page_runs(page):
    run_page(page)


def test_python_on_pages_compiles_and_imports_names_that_exist():
    """A block that cannot run gives the reason directly before it."""
    missing = []
    for page in WITH_PYTHON:
        left_out = [block for block in python_blocks(page) if block.not_run]
        assert page.read_text("utf-8").count("<!-- not run") == len(left_out), page.name
        for block in python_blocks(page):
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wherewhat"):
                    module = import_module(node.module)
                    names = [alias.name for alias in node.names]
                    missing += [(page.name, block.line, name) for name in names if not hasattr(module, name)]
    assert missing == []
