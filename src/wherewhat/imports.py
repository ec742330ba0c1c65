"""Imports of other libraries: lazy, with an installation hint for missing ones, and without their warnings."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from wherewhat.errors import LoadError, PluginWarning, WherewhatError, one_line


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package that imports its names on first use (PEP 562).

    The names and their modules are those of the stub beside the package's ``__init__.py``, which type checkers read, in
    lines such as ``from package.module import name as name``.

    Args:
        package: Name of the package.
        file: Its ``__init__.py``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a public subpackage
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return getattribute, lambda: sorted(homes), sorted(homes)


@functools.cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package, without importing it; None when it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def plugins(group: str) -> dict[str, Any]:
    """Load the entry points of a group by name, sorted; none where the package runs without installed metadata.

    An entry point that cannot be loaded is left out with a warning, see :func:`isolated`.

    Args:
        group: ``wherewhat.commands`` for Typer applications that become commands, ``wherewhat.report`` for functions
            that return data for the page, ``wherewhat.measurements`` for measurements,
            ``wherewhat.length_methods`` for length methods.
    """
    from importlib.metadata import entry_points

    entries = sorted(entry_points(group=group), key=lambda entry: entry.name)
    loaded = {}
    for entry in entries:
        with isolated(group, entry.name):
            loaded[entry.name] = entry.load()
    return loaded


@contextlib.contextmanager
def isolated(group: str, name: str) -> Iterator[None]:
    """Turn any error in the context into a warning of one line that names the entry point and its package."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - code of other packages may raise any exception
        from importlib.metadata import entry_points

        packages = {entry.dist.name for entry in entry_points(group=group) if entry.name == name and entry.dist}
        source = f" of the package {' or '.join(sorted(packages))}" if packages else ""
        reason = one_line(error) if isinstance(error, WherewhatError) else f"{type(error).__name__}: {one_line(error)}"
        warnings.warn(f"the entry point '{name}' in {group}{source} is left out: {reason}", PluginWarning, stacklevel=3)


def require(package: str, *, why: str, install: str | None = None) -> ModuleType:
    """Import an optional package, or raise an error that states its purpose and how to install it.

    Args:
        package: Import name.
        why: The feature that needs it, as a noun: "reading GGUF files".
        install: Argument of ``pip install``; the package name by default.
    """
    try:
        return import_module(package)
    except ImportError:
        raise LoadError(
            f"{why} needs the package '{package}', which is not installed: pip install {install or package}"
        ) from None


@contextlib.contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """Silence transformers and huggingface_hub inside the context, then restore the previous settings.

    Args:
        stderr: Also discard output to `sys.stderr`. The GGUF reader of transformers draws a progress bar that no
            setting disables; nothing else needs this.
    """
    # By name: the package does not declare these functions as exported.
    hub: Any = import_module("huggingface_hub.utils")
    from transformers.utils import logging as log

    verbosity = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    hub_bars_off = hub.are_progress_bars_disabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        stack.callback(log.set_verbosity, verbosity)
        if bars:
            # Enabling transformers' bars also enables the hub's, so this callback must run first.
            stack.callback(hub.disable_progress_bars if hub_bars_off else hub.enable_progress_bars)
            stack.callback(log.enable_progress_bar)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
