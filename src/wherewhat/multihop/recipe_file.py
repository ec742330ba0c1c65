"""Studies are described in TOML files: reading one, whatever it describes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from wherewhat.errors import ConfigError


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        ConfigError: If the file cannot be read, holds something else, or nothing.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if not values:
        raise ConfigError(f"{path} is empty: a recipe says something, such as seeds = [0]")
    return values
