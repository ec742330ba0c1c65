"""Packages that only some ways of loading need."""

import importlib
from types import ModuleType

from wherewhat.errors import LoadError


def require(package: str, *, why: str, install: str | None = None) -> ModuleType:
    """Import an optional package, or say in one line what it is needed for and how to get it.

    Args:
        package: Import name.
        why: What needs it, as a noun: "reading GGUF files".
        install: What to give to pip; the package name unless told.

    Raises:
        LoadError: The package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise LoadError(
            f"{why} needs the package '{package}', which is not installed: pip install {install or package}"
        ) from None
