"""Studies are described in TOML files: reading one, whatever it describes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: If the file cannot be read or holds something else.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
