"""The sweep file: TOML, YAML or JSON with one key for each axis and for what all cells share."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError
from wherewhat.models.optional import require
from wherewhat.store.hashing import text_sha256

DEFAULT_STORE = "runs"
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class SweepFile:
    """What a sweep file says, not yet checked.

    Attributes:
        path: The file.
        values: Its keys and values; ``-`` in keys of the top level is ``_``.
        sha256: Hash of its text: how a started sweep is found again without expanding the file.
    """

    path: Path
    values: Mapping[str, Any]
    sha256: str

    @property
    def store(self) -> str:
        """Where the results go.

        Raises:
            ConfigError: If it is no text.
        """
        store = self.values.get("store", DEFAULT_STORE)
        if not isinstance(store, str) or not store.strip():
            raise ConfigError(f"{self.path}: store={store!r} is not a folder or an address such as s3://bucket/runs")
        return store


def read_sweep_file(path: Path) -> SweepFile:
    """Read a sweep file; ``.yaml`` and ``.yml`` are YAML, ``.json`` is JSON, everything else is TOML.

    Raises:
        ConfigError: If the file cannot be read, or is not what its name says.
    """
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"the sweep file {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"the sweep file {path} cannot be read: {error.strerror or error}") from error
    values = _parse(path, content)
    if not isinstance(values, dict):
        raise ConfigError(f"the sweep file {path} must hold names and values, such as measurements = ['axes']")
    named: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in named:
            raise ConfigError(f"the sweep file {path} has the key '{key}' twice")
        named[name] = value
    return SweepFile(path, named, text_sha256(content))


def _parse(path: Path, content: str) -> Any:
    suffix = path.suffix.lower()
    kind = "YAML" if suffix in _YAML else "JSON" if suffix == ".json" else "TOML"
    try:
        if kind == "YAML":
            return _yaml(content)
        return json.loads(content) if kind == "JSON" else tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the sweep file {path} is not valid {kind}: {reason}") from error


def _yaml(content: str) -> Any:
    yaml = require("yaml", why="a sweep file in YAML", install="pyyaml")
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
