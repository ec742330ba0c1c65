"""Identity: imports go one way, from higher folders of the package to lower ones, and heavy packages come late."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "wherewhat"
LAYERS = (
    "text",
    "models",
    "captures",
    "caches",
    "lengths",
    "measures",
    "runs",
    "plans",
    "rules",
    "report",
    "sweep",
    "cli",
)
"""Folders from the lowest to the highest: a folder imports those before it."""

LAB = "wherewhat_lab"
"""The package of small models, which imports wherewhat and is attached to it by entry points."""

FOUNDATION = ("errors", "boundary", "options", "imports", "numerics", "files", "progress", "scores", "chart_style")
"""Modules that every folder may import and that import no folder."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
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


def named(module: str, *, at_import: bool) -> Iterator[tuple[str, str]]:
    """Modules and names that a module imports; anywhere in its file, or only when it is imported."""
    for node in statements(tree(module).body) if at_import else ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


def imported(module: str, *, at_import: bool) -> set[str]:
    """Modules of the package that a module imports."""
    pairs = set(named(module, at_import=at_import))
    found = {f"{source}.{name}" if f"{source}.{name}" in modules() else source for source, name in pairs}
    return found & modules().keys() - {module}


@functools.cache
def edges() -> set[tuple[str, str]]:
    """Pairs of a folder, or of a module beside the folders, and another one that it imports."""
    parts = {module: [*module.split("."), ""] for module in modules()}
    places = {module: LAB if package == LAB else folder for module, (package, folder, *_) in parts.items()}
    pairs = {(places[a], places[b]) for a in modules() for b in imported(a, at_import=False)}
    return {(a, b) for a, b in pairs if a != b and a and b}


def test_imports_go_one_way():
    assert sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")) == sorted(LAYERS)
    order = {name: number for number, name in enumerate(LAYERS)}
    assert [(a, b) for a, b in edges() if a in order and b in order and order[a] < order[b]] == []
    assert [(a, b) for a, b in edges() if a in FOUNDATION and b in LAYERS] == []
    assert [a for a, b in edges() if b == LAB] == []
    texts = [module for module in modules() if f"{module}.".startswith("wherewhat.text.")]
    foreign = {source.partition(".")[0] for module in texts for source, _ in named(module, at_import=False)}
    assert foreign - sys.stdlib_module_names == {"wherewhat"}  # texts and prompts need no other package
    try:
        # Imports inside functions count too: a module that two others need of each other is one too few.
        TopologicalSorter({module: imported(module, at_import=False) for module in modules()}).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_heavy_packages_are_imported_late():
    code = """
import sys
import wherewhat, wherewhat.runs.directory
early = {"torch", "pyarrow", "numpy", "filelock", "safetensors"} & sys.modules.keys()
assert not early, early
from wherewhat.cli.main import run_cli
run_cli(["--help"])
assert "torch" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_MODULES = 43
"""Modules of which functions run in ``wherewhat axes``. A reader who follows one number meets all of them."""


@pytest.mark.slow
def test_one_number_passes_few_modules(speller, tmp_path):
    code = f"""
import inspect, sys, threading
from pathlib import Path
from wherewhat.cli.main import run_cli

source, modules = {str(PACKAGE)!r}, set()

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(source):
        modules.add(str(Path(code.co_filename).relative_to(source)))

threading.setprofile(note)
sys.setprofile(note)
assert run_cli(["axes", {str(speller)!r}, "--documents", "2", "--tokens", "64"]) == 0
sys.setprofile(None)
Path("modules").write_text("\\n".join(sorted(modules)))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WHEREWHAT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = (tmp_path / "modules").read_text().split()
    assert len(found) <= _MODULES, found
