"""lm-evaluation-harness, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

from wherewhat.errors import ConfigError


def lm_eval(module: str) -> Any:
    """A module of lm-evaluation-harness.

    Raises:
        ConfigError: If it is not installed.
    """
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be used ({error}): install it with pip install 'wherewhat[eval]'"
        ) from None
