"""Other libraries: imported on first use, with an install hint where one is missing, and without their warnings."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from wherewhat.errors import LoadError


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package, from the module that holds each of its names (PEP 562)."""

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return getattribute, lambda: sorted(homes)


def plugins(group: str) -> dict[str, Any]:
    """Load what installed packages, this one included, add under an entry point group, by name."""
    from importlib.metadata import entry_points

    return {point.name: point.load() for point in entry_points(group=group)}


def require(package: str, *, why: str, install: str | None = None) -> ModuleType:
    """Import an optional package, or say in one line what it is needed for and how to get it.

    Args:
        package: Import name.
        why: What needs it, as a noun: "reading GGUF files".
        install: What to give to pip; the package name unless told.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise LoadError(
            f"{why} needs the package '{package}', which is not installed: pip install {install or package}"
        ) from None


@contextlib.contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """Silence transformers and huggingface_hub inside the context, then restore what was set before.

    Args:
        stderr: Also swallow what is written to `sys.stderr`. The GGUF reader of transformers draws a
            progress bar that no setting turns off; nothing else needs this.
    """
    # By name: the functions are there at run time, but the package does not declare them exported.
    hub: Any = importlib.import_module("huggingface_hub.utils")
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
