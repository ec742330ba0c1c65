"""Options from a file: the same names as on the command line, which wins where both speak."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wherewhat.checking import nearest
from wherewhat.errors import ConfigError


def read_config_file(path: Path, *, known: Iterable[str]) -> dict[str, Any]:
    """Values of a TOML or JSON file, keys with ``_`` for ``-``; measurement options stand under ``set``.

    Raises:
        ConfigError: If the file cannot be read, or a key is unknown (with the nearest known one).
    """
    try:
        content = path.read_text("utf-8")
        values = json.loads(content) if path.suffix == ".json" else tomllib.loads(content)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"--config {path} is not valid {kind}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} must hold names and values, not a {type(values).__name__}")
    allowed = sorted(known)
    found = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in allowed:
            hint = nearest(name, allowed, cutoff=0.6)
            raise ConfigError(f"--config {path}: there is no option '{key}': {hint}")
        found[name] = value
    return found
