"""The files of a measurement's own code: which modules are the user's, and a hash of each without comments."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path

from wherewhat.hashes import HASH_DIGITS, text_sha256
from wherewhat.imports import package_version

NOT_LISTED = frozenset({"wherewhat", "torch", "transformers"}) | sys.stdlib_module_names
"""Modules whose versions are not listed: those of three packages are in the identity anyway."""

_NOT_FOLLOWED = frozenset({"wherewhat", "torch", "transformers", "numpy", *sys.builtin_module_names})
"""Modules whose code is never followed, wherever they are installed."""


class OwnModules:
    """Decides which modules are the user's own code: the rest has a version.

    Own are ``__main__``, the package of the measurement, and all modules outside the folders of installed packages.
    """

    def __init__(self, module: str) -> None:
        self._top = module.partition(".")[0]
        self._known: dict[str, bool] = {}

    def __contains__(self, module: str) -> bool:
        top = module.partition(".")[0]
        if top not in self._known:
            self._known[top] = self._is_own(top)
        return self._known[top]

    def _is_own(self, top: str) -> bool:
        if top in _NOT_FOLLOWED:
            return False
        if top in (self._top, "__main__"):
            return True
        if top in sys.stdlib_module_names:
            return False
        file = _top_file(top)
        installed = file is None or {"site-packages", "dist-packages"} & set(file.parts)
        return not installed or (file is not None and package_version(distribution(top)) is None)


def _top_file(top: str) -> Path | None:
    """Return a file or folder of a top-level module, without importing it; None if it has none."""
    loaded = sys.modules.get(top)
    file = getattr(loaded, "__file__", None)
    if file is None:
        spec = None
        with suppress(ImportError, ValueError, AttributeError):
            spec = find_spec(top)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
        file = spec.origin if spec.has_location else folders[0] if folders else None
    return None if file is None else Path(file)


@functools.cache
def distribution(top: str) -> str:
    """Return the name of the installed package that a top-level module belongs to; its own if there is none."""
    if package_version(top) is not None:
        return top
    from importlib.metadata import packages_distributions

    return next(iter(packages_distributions().get(top, ())), top)


def read_sources(modules: Iterable[str], own: OwnModules) -> tuple[dict[str, str], set[str]]:
    """Return the hash of each own module that these modules need, by name, and the other packages that they import.

    Modules that are imported inside functions are included; nothing is imported to find them.
    """
    found: dict[str, str] = {}
    packages: set[str] = set()
    left = [name for module in modules for name in _with_parents(module)]
    while left:
        module = left.pop()
        if module in found:
            continue
        file = _file_of(module)
        if file is None:
            continue
        try:
            data = file.read_bytes()
        except OSError:
            continue
        digest, imports = _parsed(data, is_source=file.suffix == ".py")
        found[module] = digest[:HASH_DIGITS]
        inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
        package = getattr(sys.modules.get(module), "__package__", None) or inside
        for level, name, members in imports:
            try:
                base = resolve_name("." * level + name, package) if level else name
            except ImportError:  # beyond the top-level package
                continue
            if base not in own:
                if base.partition(".")[0] not in NOT_LISTED:
                    packages.add(base.partition(".")[0])
                continue
            left += _with_parents(base)
            left += [f"{base}.{member}" for member in members if member != "*"]
    return dict(sorted(found.items())), packages


def _with_parents(module: str) -> list[str]:
    """Return a module and the packages that it is in, whose code is run as well."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _file_of(module: str) -> Path | None:
    """Return the file of a module, loaded or not, without importing it."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        return Path(file)
    parent, _, _ = module.rpartition(".")
    spec = None
    with suppress(ImportError, ValueError, AttributeError):
        if not parent:
            spec = find_spec(module)
        else:
            folders = getattr(sys.modules.get(parent), "__path__", None)
            if folders is None:
                package = _file_of(parent)
                folders = None if package is None or package.name != "__init__.py" else [str(package.parent)]
            spec = None if folders is None else PathFinder.find_spec(module, list(folders))
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


@functools.lru_cache(maxsize=1024)
def _parsed(data: bytes, *, is_source: bool) -> tuple[str, list[tuple[int, str, list[str]]]]:
    """Return the hash of a file without comments and docstrings, and its imports: level, module and names."""
    try:
        tree = ast.parse(data) if is_source else None
    except (SyntaxError, ValueError, RecursionError):
        tree = None
    if tree is None:
        return hashlib.sha256(data).hexdigest(), []
    imports: list[tuple[int, str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[: isinstance(first.value.value, str)]
    return text_sha256(ast.dump(tree)), imports
