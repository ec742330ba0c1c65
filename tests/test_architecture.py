"""Identity: the package has the layers, module sizes and names that CONTRIBUTING describes."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "wherewhat"
LAYERS = ("text", "models", "captures", "extend", "measures", "runs", "report", "sweep", "cli", "lab")
"""Folders from the lowest to the highest: a folder imports those before it."""

FOUNDATION = ("errors", "boundary", "options", "imports", "numerics", "files", "hashes", "progress")
"""Modules that every folder may import and that import no folder."""

SHORT, MOST_SHORT, MOST_MODULES = 40, 15, 230
NOUNS_IN_ING = {"learning", "masking", "training"}
"""Module names that end in "ing" and are nouns."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text("utf-8"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not those of functions or under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def imported(module: str, *, at_import: bool) -> set[str]:
    """Modules of the package that a module imports; anywhere in its file, or only when it is imported."""
    found = set()
    for node in statements(tree(module).body) if at_import else ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "wherewhat":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules() else str(node.module))
    return found - {module}


def folder(module: str) -> str:
    """The folder of a module, or its own name where it is in none."""
    return [*module.split("."), ""][1]


@functools.cache
def edges() -> set[tuple[str, str]]:
    """Pairs of a folder and another one that it imports."""
    pairs = {(folder(a), folder(b)) for a in modules() for b in imported(a, at_import=False)}
    return {(a, b) for a, b in pairs if a != b and a and b}


def definitions() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Public functions and classes at the top of each module."""
    for module in modules():
        for node in tree(module).body:
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield module, node


def test_every_folder_has_its_layer():
    assert sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")) == sorted(LAYERS)


@pytest.mark.parametrize(("low", "high"), [(a, b) for i, a in enumerate(LAYERS) for b in LAYERS[i + 1 :]])
def test_no_folder_imports_a_higher_one(low, high):
    assert (low, high) not in edges()


@pytest.mark.parametrize("module", FOUNDATION)
def test_foundation_modules_import_no_folder(module):
    assert [b for a, b in edges() if a == module and b in LAYERS] == []


def test_there_are_no_cycles_when_modules_are_imported():
    graph = {module: imported(module, at_import=True) for module in modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_few_modules_are_short_and_there_are_not_too_many():
    assert len(modules()) <= MOST_MODULES
    own = {name: path for name, path in modules().items() if not path.stem.startswith("__")}
    short = [name for name, path in own.items() if len(path.read_text("utf-8").splitlines()) < SHORT]
    assert len(short) <= MOST_SHORT, short


def test_modules_are_named_by_nouns():
    names = {name.rpartition(".")[2] for name in modules()}
    assert {name for name in names if name.endswith("ing")} - NOUNS_IN_ING == set()


def test_no_two_public_classes_have_the_same_name():
    count = Counter(node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert {name: n for name, n in count.items() if n > 1} == {}


def test_every_public_function_and_class_has_a_docstring():
    assert [f"{module}.{node.name}" for module, node in definitions() if not ast.get_docstring(node)] == []
    assert [module for module in modules() if not ast.get_docstring(tree(module))] == []


def test_importing_the_package_does_not_import_torch():
    code = "import sys, wherewhat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_help_does_not_import_torch():
    code = "import sys; from wherewhat.cli.main import run_cli; run_cli(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
